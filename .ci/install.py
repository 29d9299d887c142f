"""Installs packages into the environment of the Python that runs this: with uv, which is faster than pip.

    .venv/bin/python .ci/install.py UV_VERSION [arguments that `pip install` takes]

uv gets pip's settings of this machine (indexes, links, certificates), unless it has its own. Where uv cannot be
installed, or does not know an argument, pip does the work.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# pip's name of a setting: uv's variable, and what joins several values in it
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}


def pip_settings() -> dict[str, str]:
    """As `pip config list` tells them: of files first, then of the environment, which count more."""
    done = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, _, value in pairs if value}


def uv_environment() -> dict[str, str]:
    settings = pip_settings()
    found = {
        variable: separator.join(settings[name].split())
        for name, (variable, separator) in SETTINGS.items()
        if settings.get(name)
    }
    # Like pip, the best version of all indexes, and bytecode: not every environment may write it on first import.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_COMPILE_BYTECODE": "1", **found, **os.environ}


def main() -> int:
    version, *arguments = sys.argv[1:]
    if subprocess.run([*PIP, "install", "--quiet", f"uv=={version}"], check=False).returncode == 0:
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *arguments]
        if subprocess.run(command, env=uv_environment(), check=False).returncode == 0:
            return 0
    print("uv cannot install this; pip does", file=sys.stderr)
    return subprocess.run([*PIP, "install", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

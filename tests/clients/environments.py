"""The environment of each client: packages of its own below build/clients/NAME, so that their versions do not meet.

A client is a directory with `requirements.txt` and `abilities.py`, or `package.json` and `abilities.mjs`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


@dataclass(frozen=True)
class Client:
    """One client program or library."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def is_node(self) -> bool:
        return (self.directory / "package.json").exists()

    @property
    def requirements(self) -> Path:
        return self.directory / ("package.json" if self.is_node else "requirements.txt")

    @property
    def environment(self) -> Path:
        return REPOSITORY / "build" / "clients" / self.name

    def pins(self) -> dict[str, str]:
        """Versions of the packages that it names, in order."""
        pattern = r'^ *"([@a-z/-]+)": "(\d[\w.]*)"' if self.is_node else r"^([\w-]+)(?:\[.*\])?==(\S+)"
        return dict(re.findall(pattern, self.requirements.read_text(), re.MULTILINE))

    def is_here(self) -> bool:
        """Whether its environment holds what its requirements name."""
        stamp = self.environment / "requirements.sha256"
        return stamp.exists() and stamp.read_text() == self._digest()

    def is_in_ours(self) -> bool:
        """Whether this Python has its packages in any version, so that it needs no environment."""
        installed = {found.name.lower() for found in distributions()}
        return not self.is_node and self.pins().keys() <= installed

    def make(self, uv_version: str) -> None:
        """Raises CalledProcessError where a package cannot be had."""
        if self.is_here():
            return
        shutil.rmtree(self.environment, ignore_errors=True)
        self.environment.mkdir(parents=True)
        if self.is_node:
            # Modules are looked for above the script, so that the script stands beside them.
            shutil.copy(self.requirements, self.environment)
            npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
            subprocess.run(npm, cwd=self.environment, check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", self.environment], check=True)
            install = [self.environment / "bin/python", REPOSITORY / ".ci/install.py", uv_version, "--quiet"]
            subprocess.run([*install, "-r", self.requirements], env=_without_bytecode(), check=True)
        (self.environment / "requirements.sha256").write_text(self._digest())

    def command(self, python: str | None = None) -> list[str]:
        """What runs its abilities. python: in place of that of its environment."""
        if self.is_node:
            for script in (HERE / "shared/contract.mjs", self.directory / "abilities.mjs"):
                shutil.copy(script, self.environment)
            return ["node", str(self.environment / "abilities.mjs")]
        return [python or str(self.environment / "bin/python"), str(self.directory / "abilities.py")]

    def _digest(self) -> str:
        return hashlib.sha256(self.requirements.read_bytes()).hexdigest()


def all_clients() -> list[Client]:
    return [Client(found.parent) for found in sorted(HERE.glob("*/abilities.*"))]


def _without_bytecode() -> dict[str, str]:
    """Most of it is never imported."""
    return {**os.environ, "UV_COMPILE_BYTECODE": "0"}

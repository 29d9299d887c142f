"""README and docs do not lie: programs run, commands, options, settings, links and paths exist."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import typer

from actors.models.catalog import models_dir
from cluster.cli.app import app
from cluster.config import ClusterConfig
from cluster.gateway.requests.schema import SpeculationFields
from paceline_testing.echo_gateway import echo_gateway
from paceline_testing.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [(kind, text) for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
SHELL = "".join(text for kind, text in BLOCKS if kind == "sh")
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *(page for page in DOCS if page.name != "coming-from.md")]  # that one has its own test
SHELLS = [text for page in PAGES for text in re.findall(r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)]
LINES = [
    line.split(" #")[0].split(" >")[0].strip() for text in SHELLS for line in text.replace("\\\n", "").splitlines()
]
COMMANDS = sorted({line[line.index("paceline ") :] for line in LINES if re.match(r"([A-Z_]+=\S+ )?paceline ", line)})
HTTP, GRPC = "127.0.0.1:8000", "127.0.0.1:9000"


@pytest.fixture(scope="module")
def gateway():
    with echo_gateway("smollm2") as addresses:
        yield addresses


@pytest.mark.parametrize("program", [text for text in PROGRAMS if HTTP in text or GRPC in text])
def test_client_programs_print_what_the_server_streams(gateway, capsys, program):
    program = program.replace(HTTP, gateway[0]).replace(GRPC, gateway[1])
    assert ":8000" not in program
    assert ":9000" not in program
    exec(compile(program, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20


def test_the_curl_call_streams(gateway):
    url, body = re.search(r"curl -N http://(\S+) .*?-d '(.*?)'", SHELL, re.DOTALL).groups()
    assert url.startswith(HTTP)
    with httpx.stream("POST", "http://" + url.replace(HTTP, gateway[0]), json=json.loads(body)) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200, lines
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3


def run_without_a_server():
    (program,) = [text for text in PROGRAMS if "LocalEngine" in text]
    exec(compile(program, "README.md", "exec"), {})


def test_the_program_without_a_server_runs(tmp_path, monkeypatch, capsys):
    """On a tiny model in the demo model's place."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    save_tiny_model(models_dir(tmp_path) / "smollm2")
    run_without_a_server()
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.slow
def test_the_program_without_a_server_runs_on_the_demo_model(smollm2_dir, capsys):
    run_without_a_server()
    assert "Paris" in capsys.readouterr().out


def test_no_program_is_left_untested():
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_options_exist(command):
    words = shlex.split(command)[1:]
    known = typer.main.get_command(app)
    path = []
    while hasattr(known, "commands"):
        path.append(words.pop(0))
        _, known, _ = known.resolve_command(typer.Context(known), [path[-1]])
    options = {name for parameter in known.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_settings_on_the_command_lines_exist():
    defaults = ClusterConfig().model_dump()
    for command in COMMANDS:
        for word, value in pairwise(shlex.split(command)):
            if word == "--set":
                section, key = value.split("=")[0].split(".")
                assert key in defaults[section]


def test_settings_that_pages_name_exist():
    defaults = ClusterConfig().model_dump()
    in_requests = {f"speculation.{name}" for name in SpeculationFields.model_fields}
    for page in PAGES:
        for name in re.findall(rf"`((?:{'|'.join(defaults)})\.[a-z_.]+)(?::[^`]*)?`", page.read_text("utf-8")):
            value = defaults
            for part in name.split(".") if name not in in_requests else ():
                assert part in value, f"{page.name}: there is no setting {name}"
                value = value[part]


def test_make_has_the_targets_that_are_named():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", README))
    assert named >= {"setup", "serve", "test", "check"}
    assert named <= targets


def test_the_layout_names_what_exists():
    (layout,) = [text for kind, text in BLOCKS if kind == "text" and "actors/" in text]
    for line in layout.splitlines():
        assert (ROOT / line.split()[0]).exists(), line


@pytest.mark.parametrize("folder", ["cluster", "cluster/gateway", "actors", "cache_service"])
def test_the_architecture_lists_what_is_in_a_folder(folder):
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| `{folder}/` \| \|\n((?:\|.*\n)+)", page, re.MULTILINE)
    listed = [name for row in table.splitlines() for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
    there = [path.name for path in (ROOT / folder).iterdir() if path.is_dir() or path.suffix == ".py"]
    assert sorted(listed) == sorted(set(there) - {"__init__.py", "__pycache__"})


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:cluster|actors|cache_service|tests|configs|k8s)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_readme_can_be_read_in_one_sitting():
    assert len(README.splitlines()) <= 220

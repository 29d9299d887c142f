"""docs/coming-from.md does not lie: its programs run, its command lines parse, the options that it names exist."""

import inspect
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from actors.drafters.registry import CPU_DRAFTER_NAMES, DRAFTER_NAMES, create_drafter, expand_drafters
from actors.errors import InvalidRequest
from actors.models.loader import load_config
from actors.models.source import ModelSource
from cluster.cli.app import app
from cluster.config import ClusterConfig
from cluster.config import load_config as load_cluster_config
from cluster.gateway.requests.schema import CompletionBody, parse_fields
from cluster.generation import GenerationOptions
from cluster.offline.engine import LocalEngine
from cluster.offline.options import KEYS
from cluster.offline.results import Generation
from paceline_testing.tiny_models import save_eagle_head, save_tiny_model, tiny_eagle_tensors

PACELINE = typer.main.get_command(app)
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
SHELL = "".join(text for kind, text in BLOCKS if kind == "sh")
COMMANDS = [line for line in SHELL.replace("\\\n", " ").splitlines() if line.strip()]
HERE = [cells[1] for cells in re.findall(r"^\| (.*?) \| (.*?) ?\|", PAGE, re.MULTILINE)]  # second cells of all tables


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The directories that the page speaks of."""
    root = tmp_path_factory.mktemp("coming-from")
    shape = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "max_positions": 256}
    target = save_tiny_model(root / "target", "llama", 5, layers=3, **shape)
    save_tiny_model(root / "draft", "llama", 5, layers=1, **shape)
    save_tiny_model(root / "translator", "t5", 5)
    save_tiny_model(root / "small-translator", "t5", 5, layers=1)
    config = load_config(ModelSource("target", "target", target))
    save_eagle_head(root / "head", config, tiny_eagle_tensors(config, "eagle3", 9))
    notes = root / "notes.md"
    notes.write_text("one two three four\none two five\n")
    arguments = ["build", str(notes), "--target", str(target), "--out", str(root / "corpus")]
    PACELINE.main(["corpus", *arguments], standalone_mode=False)
    return root


@pytest.mark.parametrize("program", PROGRAMS, ids=[f"program{number}" for number, _ in enumerate(PROGRAMS, 1)])
def test_every_program_runs_as_it_is(place, monkeypatch, program):
    """What it asserts, such as that drafts change no token, holds."""
    monkeypatch.chdir(place)
    exec(compile(program, "coming-from.md", "exec"), {})


def test_a_program_that_is_wrong_fails(place, monkeypatch):
    monkeypatch.chdir(place)
    (program,) = [text for text in PROGRAMS if "naive" in text]
    for old, new in (("eagle_depth=", "eagle_width="), ("== naive.token_ids", "!= naive.token_ids")):
        with pytest.raises((InvalidRequest, AssertionError)):
            exec(compile(program.replace(old, new), "coming-from.md", "exec"), {})


def parse(command: str) -> typer.Context:
    """The context that the command line's function would be called with; nothing is called. Raises UsageError."""
    name, *arguments = shlex.split(command)
    context = PACELINE.make_context(name, arguments)
    while isinstance(context.command, typer.core.TyperGroup):
        rest = [*context._protected_args, *context.args]
        found, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(found, rest, parent=context)
    return context


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_line_is_understood(command):
    assert command.startswith("paceline ")
    context = parse(command)
    for option in ("drafter", "drafters"):
        values = context.params.get(option) or []
        for value in [values] if isinstance(values, str) else values:
            expand_drafters([name.strip() for name in value.split(",")])
    load_cluster_config(None, context.params.get("settings", []))


@pytest.mark.parametrize(
    "command",
    [
        "paceline generate --model target --lookahead 3",
        "paceline generate --gamma many",
        "paceline generate --quantization int2",
        "paceline corpus build notes.md",
        "paceline corpus dump corpus",
        "paceline model list now",
        "paceline unheard",
    ],
)
def test_a_command_line_that_is_wrong_is_not(command):
    with pytest.raises(Exception, match=r"\S") as error:
        parse(command)
    assert error.value.exit_code == 2


def test_every_section_has_a_program_and_a_table():
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 11
    for section in sections:
        assert "\n```python\n" in section, section.splitlines()[0]
        assert "| Paceline |" in section, section.splitlines()[0]


def test_every_option_in_the_tables_exists():
    known = {option for command in all_commands(PACELINE) for option in options_of(command)}
    named = {option for cell in HERE for option in re.findall(r"`(--[\w-]+)", cell)}
    assert len(named) > 10
    assert named <= known


def all_commands(command):
    yield command
    for name in getattr(command, "commands", {}):
        _, inner, _ = command.resolve_command(typer.Context(command), [name])
        yield from all_commands(inner)


def options_of(command):
    return [name for parameter in command.params for name in parameter.opts]


def test_every_keyword_in_the_tables_exists():
    functions = [LocalEngine.__init__, LocalEngine.generate, LocalEngine.beam_search]
    known = {name for function in functions for name in inspect.signature(function).parameters}
    known |= {*KEYS, *GenerationOptions.model_fields}
    for name in CPU_DRAFTER_NAMES:
        known |= set(inspect.signature(type(create_drafter(name)).__init__).parameters)
    named = {keyword for cell in HERE for keyword in re.findall(r"`(\w+)=`", cell)}
    assert len(named) > 20
    assert named <= known


def test_every_setting_drafter_and_figure_in_the_tables_exists():
    defaults = ClusterConfig().model_dump()
    settings = {pair for cell in HERE for pair in re.findall(r"`(target|draft|speculation|router)\.(\w+)`", cell)}
    assert len(settings) > 5
    assert all(key in defaults[section] for section, key in settings)
    drafters = {name for cell in HERE for name in re.findall(r"drafters? `(\w+)`", cell)}
    assert drafters
    assert drafters <= set(DRAFTER_NAMES)
    figures = set(re.findall(r"`Generation\.(\w+)`", PAGE))
    assert len(figures) > 5
    assert figures <= {field.name for field in fields(Generation)}


def test_the_body_of_a_request_is_one_that_the_server_takes():
    (body,) = [text for kind, text in BLOCKS if kind == "json"]
    assert parse_fields(CompletionBody, json.loads(body)).speculation.max_draft_tokens == 8


def test_links_between_the_pages_lead_somewhere():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"

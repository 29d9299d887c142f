"""docs/parity.md: every ability has one row, and every test and file that a row names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (P\d\d) \| ([^|]+) \| ([^|]+) \| (?:([^|]+) )?\|$", PAGE, re.MULTILINE)
NODE_IDS = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


@cache
def names_in(file: Path) -> frozenset[str]:
    """Names of the test functions at the top of a file, which is read and not run."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions) and node.name.startswith("test_"))


def test_every_ability_has_exactly_one_row():
    assert [row[0] for row in ROWS] == [f"P{number:02}" for number in range(1, 49)]
    assert re.findall(r"^\| P\d+", PAGE, re.MULTILINE) == [f"| {row[0]}" for row in ROWS]


@pytest.mark.parametrize("node_id", NODE_IDS)
def test_every_test_that_is_named_exists(node_id):
    path, _, name = node_id.partition("::")
    assert (ROOT / path).is_file()
    assert name in names_in(ROOT / path)


@pytest.mark.parametrize(("number", "ability", "here", "tests"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_its_tests_or_says_why_there_is_nothing(number, ability, here, tests):
    named = re.findall(r"`(tests/[^`]+)`", tests)
    assert tests == ", ".join(f"`{node_id}`" for node_id in named)
    assert len(set(named)) == len(named)
    if "not here" in here:
        assert "because" in here
    elif not named:
        assert here.startswith("not yet")


def test_files_that_are_linked_exist():
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links
    assert all((ROOT / "docs" / link).is_file() for link in links)

"""The measurements for a GPU run dry: every experiment of every part gives figures, and none an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.slot import PARTS, Experiment, run_part, tables

SLOT = Path(__file__).with_name("slot.py")
pytestmark = pytest.mark.whole


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_dry(part, tmp_path, request):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    if part == 4:
        request.getfixturevalue("smollm2_dir")
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    command = [sys.executable, SLOT, "--part", str(part), "--dry", "--out", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    done = json.loads((tmp_path / f"part{part}-dry.json").read_text())
    assert list(done["experiments"]) == [experiment.name for experiment in PARTS[part]]
    for name, record in done["experiments"].items():
        assert record["rows"], name
        assert "error" not in record
        assert all(row.get("equal", True) for row in record["rows"]), record["rows"]


class Setting:
    is_dry = True

    def release(self) -> None:
        pass


def test_a_failure_is_recorded_and_the_next_goes_on(tmp_path, monkeypatch):
    def rows(experiment, setting):
        yield {"first": 1}
        if experiment.name == "bad":
            raise RuntimeError("out of memory")
        yield {"second": 2}

    monkeypatch.setattr(Experiment, "rows", rows)
    monkeypatch.setitem(PARTS, 1, [Experiment("bad", 9), Experiment("good", 9), Experiment("long", 0)])
    run_part(1, Setting(), tmp_path / "part1.json")
    told = json.loads((tmp_path / "part1.json").read_text())["experiments"]
    assert told["bad"]["rows"] == [{"first": 1}]
    assert told["bad"]["error"] == "RuntimeError: out of memory"
    assert told["good"]["rows"] == [{"first": 1}, {"second": 2}]
    assert told["long"]["rows"] == [{"first": 1}]
    assert told["long"]["cut"] == "after 0 s"


def test_a_deadline_cuts_a_row_and_says_what_was_left_out(tmp_path, monkeypatch):
    def rows(experiment, setting):
        yield {"name": experiment.name, "us": 1.23456}
        if experiment.name == "slow":
            time.sleep(60)

    monkeypatch.setattr(Experiment, "rows", rows)
    monkeypatch.setitem(PARTS, 1, [Experiment("quick", 9), Experiment("slow", 99), Experiment("last", 9)])
    began = time.monotonic()
    done = run_part(1, Setting(), tmp_path / "part1.json", seconds=0.5)
    assert time.monotonic() - began < 30
    told = json.loads((tmp_path / "part1.json").read_text())["experiments"]
    assert told == done["experiments"]
    assert "cut" not in told["quick"]
    assert told["slow"]["rows"] == [{"name": "slow", "us": 1.23456}]
    assert told["slow"]["cut"] == told["last"]["cut"] == "the part's 0 s are over"
    assert "| name | us |\n|---|---|\n| slow | 1.235 |" in tables(done)


def test_tables_have_all_columns_and_what_went_wrong():
    done = {"experiments": {"one": {"rows": [{"a": 1}, {"b": 3, "a": 2}], "error": "RuntimeError: no"}}}
    assert tables(done) == "\n### one\n\n| a | b |\n|---|---|\n| 1 |  |\n| 2 | 3 |\n\nRuntimeError: no"

"""The measurements for a GPU run dry: every experiment of every part gives figures, and none an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.slot import PARTS, Experiment, run_part

SLOT = Path(__file__).with_name("slot.py")
pytestmark = pytest.mark.whole


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_dry(part, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
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

"""A cluster whose processes are killed and stopped, and whose target groups come and go: see `tests.bench.real_chaos`,
which does it for longer."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline_testing.real_chaos import run_chaos


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_fails_and_no_text_changes_whatever_is_killed_stopped_and_scaled(ray_here, ports, tmp_path):
    chaos = run_chaos(tmp_path, ports, groups=3, seconds=75.0, seed=1)
    outcomes = Counter(map(chaos.outcome, chaos.records))
    print(outcomes, Counter(fault.kind for fault in chaos.faults), f"{chaos.num_resumed} went on elsewhere")
    assert [record.error for record in chaos.failures] == []
    assert chaos.left_over == []
    assert outcomes["right"] > 20
    assert chaos.num_resumed > 0
    assert chaos.num_cached > 0
    assert len({fault.kind for fault in chaos.faults}) > 4

"""The benchmarks run: few rounds of each, whose times say nothing here."""

from __future__ import annotations

import pytest

from tests.bench import bench_round_planning


@pytest.mark.parametrize("attention", ["triton_tree", "padded"])
@pytest.mark.parametrize("kind", bench_round_planning.KINDS)
def test_the_planning_of_a_round_is_taken_apart(kind, attention):
    if attention == "triton_tree":
        pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    found = bench_round_planning.measure(2, 7, kind, attention, rounds=4, context=40)
    assert list(found) == ["total", *bench_round_planning.PARTS]
    elsewhere = {"plan"} if attention == "triton_tree" else {"send", "packed sampling"}
    assert all((time > 0.0) == (part not in elsewhere) for part, time in found.items()), found

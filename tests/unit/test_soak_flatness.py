"""The judge of the soak: what grows is found out, and what rises and falls is not taken for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def load_flatness():
    path = Path(__file__).parents[1] / "soak" / "flatness.py"
    spec = importlib.util.spec_from_file_location("soak_flatness", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


flatness = load_flatness()
TIMES = [10.0 * number for number in range(120)]
BOUND = flatness.Bound(0.05, 2.0)


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-10, 10), st.integers(4, 40))
def test_the_growth_of_a_line_is_its_own(start, rise, quarter):
    times = [10.0 * number for number in range(4 * quarter)]
    found = flatness.judge("line", times, [start + rise * time for time in times], BOUND)
    half_s = times[-1] / 2
    assert found.growth == pytest.approx(rise * half_s, abs=abs(rise) * 20 + 1e-6)


def test_what_has_levelled_out_is_flat_and_what_goes_on_rising_is_not():
    levels = [100 * (1 - np.exp(-time / 100)) for time in TIMES]
    rises = [100 + time / 50 for time in TIMES]
    assert flatness.judge("levels", TIMES, levels, BOUND).is_flat
    found = flatness.judge("rises", TIMES, rises, BOUND)
    assert not found.is_flat
    assert found.growth == pytest.approx(11.9, abs=0.4)
    assert found.most == pytest.approx(rises[-1])


def test_outliers_and_waves_are_no_growth():
    waves = [100 + 4 * (number % 10) for number in range(120)]
    waves[-1] = 1_000.0
    assert flatness.judge("waves", TIMES, waves, BOUND).is_flat


def test_one_handle_more_every_minute_is_found():
    handles = [10 + time // 60 for time in TIMES]
    assert not flatness.judge("fds", TIMES, handles, flatness.Bound(0.0, 2.0)).is_flat


def test_a_single_sample_says_nothing():
    assert flatness.judge("alone", [10.0], [5.0], BOUND).growth == 0.0

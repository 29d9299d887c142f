"""Scenarios with the shapes of published traces have the figures that their files give."""

from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from cluster.simulate.arrivals import arrival_times
from cluster.simulate.scenario import load_scenario

TRACES = Path(__file__).parents[3] / "bench/simulate/traces"


@pytest.mark.parametrize(
    ("name", "rate", "dispersion_10s", "dispersion_60s"),
    [
        ("azure-code-2023", 2.57, 71.6, 164.0),
        ("azure-conversation-2023", 5.53, 3.86, 16.1),
        ("mooncake-conversation-2024", 3.40, 2.10, 2.89),
    ],
)
def test_requests_come_as_unevenly_as_in_the_trace(name, rate, dispersion_10s, dispersion_60s):
    """dispersion: variance of the requests in so many seconds, by their mean."""
    traffic = load_scenario(TRACES / f"{name}.yaml", None, {}).traffic
    seconds = 150_000.0
    times = np.array(list(takewhile(lambda time: time < seconds, arrival_times(traffic, np.random.default_rng(1)))))
    assert len(times) / seconds == pytest.approx(rate, rel=0.1)
    for window, dispersion, error in ((10.0, dispersion_10s, 0.6), (60.0, dispersion_60s, 0.25)):
        counts = np.bincount((times // window).astype(int))
        assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=error)

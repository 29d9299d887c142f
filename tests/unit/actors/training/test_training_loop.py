"""A training with a time limit ends in time, its learning rate as low as after all steps."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from actors.training import training_loop
from actors.training.training_loop import run_steps


def rates_and_shares(monkeypatch, steps: int, most_s: float | None) -> tuple[list[float], list[float], tuple[int, int]]:
    """Learning rate of each step, share that its loss was told, and (done, total) at the end. A step takes a second."""
    clock = itertools.count()
    own_time = SimpleNamespace(monotonic=lambda: float(next(clock)))  # other threads of this process read the real one
    monkeypatch.setattr(training_loop, "time", own_time)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rates: list[float] = []
    shares: list[float] = []
    reports: list[tuple[int, int]] = []

    def loss(_: None, share: float) -> torch.Tensor:
        rates.append(optimizer.param_groups[0]["lr"])
        shares.append(share)
        return weight.sum()

    run_steps(
        [None] * steps,
        loss,
        optimizer,
        stage="training",
        report=lambda _, done, total: reports.append((done, total)),
        most_s=most_s,
    )
    return rates, shares, reports[-1]


@pytest.mark.parametrize(("steps", "most_s", "done"), [(1000, 200.0, 199), (100, 200.0, 100), (100, None, 100)])
def test_a_training_goes_through_its_whole_schedule_in_the_time_it_has(monkeypatch, steps, most_s, done):
    rates, shares, end = rates_and_shares(monkeypatch, steps, most_s)
    assert end == (done, steps)
    assert len(rates) == len(shares) == done
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0, abs=0.011)
    assert rates[19] > 0.9  # warm
    assert rates[-1] < 0.031

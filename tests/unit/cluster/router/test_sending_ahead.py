"""Whether rounds are sent ahead: by trying, by what is lost, and by what promises of such rounds have brought."""

from __future__ import annotations

import pytest

from cluster.router.ahead_trial import AheadTrial
from cluster.router.sending_ahead import _MOST_TRUST, _Promises


def run(trial: AheadTrial, rounds: int, *, wait_s: float, speed_up: float, verify_s: float = 0.01) -> list[bool]:
    """How each of some rounds was run. Serial ones wait; those that are sent ahead do not, and bring `speed_up` times
    the tokens a second."""
    modes = []
    for _ in range(rounds):
        modes.append(trial.is_on)
        serial_s = verify_s + wait_s
        if trial.is_on:
            trial.observe(8, serial_s / speed_up, verify_s, was_serial=False)
        else:
            trial.observe(8, serial_s, verify_s, was_serial=True)
    return modes


def test_nothing_is_tried_where_the_target_hardly_waits():
    trial = AheadTrial()
    assert not any(run(trial, 2000, wait_s=0.0002, speed_up=1.5))
    assert trial.wait_share == pytest.approx(0.0002 / 0.0102)


@pytest.mark.parametrize(("speed_up", "share"), [(1.15, (0.9, 1.0)), (0.9, (0.01, 0.12))])
def test_what_has_been_faster_stays_and_the_other_is_tried_seldom(speed_up, share):
    trial = AheadTrial()
    modes = run(trial, 4000, wait_s=0.002, speed_up=speed_up)
    least, most = share
    assert least <= sum(modes[400:]) / 3600 <= most
    assert any(modes[400:])
    assert not all(modes[400:])


def test_a_change_of_what_is_faster_is_found_out():
    trial = AheadTrial()
    run(trial, 400, wait_s=0.002, speed_up=1.15)
    assert trial.is_on
    modes = run(trial, 1500, wait_s=0.002, speed_up=0.8)
    assert sum(modes[200:]) / 1300 < 0.3


@pytest.mark.parametrize("number", [0, 1, 5, 30])
def test_one_long_pause_decides_nothing(number):
    trial = AheadTrial()
    run(trial, number, wait_s=0.002, speed_up=1.15)
    trial.observe(8, 0.5, 0.01, was_serial=not trial.is_on)
    modes = run(trial, 340, wait_s=0.002, speed_up=1.15)
    assert all(modes[100:])
    assert 0.0015 < trial.wait_s < 0.003


def test_trust_follows_what_promised_tokens_bring_either_way():
    poor, rich, none = _Promises(), _Promises(), _Promises()
    assert poor.trust == 1.0
    for _ in range(200):
        poor.observe(10.0, 4.0)
        rich.observe(10.0, 15.0)
        none.observe(0.1, 15.0)
    assert poor.trust == pytest.approx(0.4, abs=0.02)
    assert rich.trust == pytest.approx(1.5, abs=0.02)
    assert none.trust == _MOST_TRUST

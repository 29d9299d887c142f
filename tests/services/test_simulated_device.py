"""A device in told time behind the real router, links and workers: what it waits for, and what work ahead brings."""

from __future__ import annotations

import pytest

from tests.bench.bench_simulated_device import KINDS, simulate, simulate_draft_worker


@pytest.mark.parametrize("sequences", [1, 8, 32])
@pytest.mark.parametrize("ms", [4, 10])
def test_a_device_idles_at_most_5_percent_where_rounds_are_sent_ahead_and_outcomes_are_few(ms, sequences):
    serial, ahead = (simulate(mode, KINDS["no drafts"], ms / 1e3, sequences, 60) for mode in ("off", "on"))
    assert ahead.used == ahead.sent >= 60
    assert ahead.idle <= 0.05 < serial.idle
    assert ahead.tokens_per_s > 1.03 * serial.tokens_per_s


def test_text_that_drafters_foresee_is_computed_without_waiting_for_the_router():
    serial, ahead = (simulate(mode, KINDS["foreseen"], 0.01, 8, 200) for mode in ("off", "auto"))
    assert ahead.used >= 150
    assert ahead.idle <= 0.05
    assert ahead.tokens_per_s > 1.04 * serial.tokens_per_s


def test_told_time_is_the_same_in_each_run():
    first, second = (simulate("auto", KINDS["1 in 4 not"], 0.004, 2, 40) for _ in range(2))
    assert first == second


def test_drafts_made_ahead_save_time_and_change_no_token():
    alone, ahead = (simulate_draft_worker(outcomes, 0.004, sequences=2, rounds=30) for outcomes in (0, 4))
    assert alone.ready == 0.0
    assert ahead.ready > 0.3
    assert ahead.tokens_a_round > 0.98 * alone.tokens_a_round  # deeper drafts pay, where they take less time
    assert ahead.tokens_per_s > 1.02 * alone.tokens_per_s

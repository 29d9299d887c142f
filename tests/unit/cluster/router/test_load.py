"""What a router tells gateways of its load and its target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.registry import CACHE
from cluster.router.counters import RouterCounters
from cluster.router.load import AnswerCosts, router_load
from cluster.router.step_time import StepTimeCurve
from paceline_testing.rounds import toy_core, toy_info

ROWS = (1, 4, 16, 64, 256, 512)
CURVE = StepTimeCurve([(rows, 0.01 + 0.001 * rows) for rows in ROWS])


def costs(*, ended: int, rounds: int, drafted: int = 0, accepted: int = 0, from_cache: int = 0) -> AnswerCosts:
    counters = RouterCounters()
    observed = AnswerCosts(counters)
    counters.emitted_tokens = rounds + accepted + from_cache
    counters.draft_tokens = drafted
    counters.accepted_tokens.update({"suffix": accepted, CACHE: from_cache})
    observed.observe(ended)
    return observed


def waiting(*uncomputed: int) -> list[Any]:
    return [SimpleNamespace(num_uncomputed=count) for count in uncomputed]


def test_before_anything_has_ended_answers_take_a_usual_number_of_rounds():
    for nothing_yet in (costs(ended=0, rounds=0), costs(ended=0, rounds=5)):
        assert (nothing_yet.answer_rounds, nothing_yet.rows, nothing_yet.cache_gain) == (64.0, 1.0, 0.0)
    refused = costs(ended=9, rounds=0)
    assert (refused.answer_rounds, refused.rows, refused.cache_gain) == (1.0, 1.0, 0.0)


def test_rounds_rows_and_what_the_cache_brings_are_those_of_the_last_requests():
    usual = costs(ended=4, rounds=200, drafted=600, accepted=100, from_cache=50)
    assert (usual.answer_rounds, usual.rows, usual.cache_gain) == (50.0, 4.0, 50 / 300)
    counters = RouterCounters()
    changing = AnswerCosts(counters)
    for number, turns in enumerate([100] * 5 + [10] * 20, 1):
        counters.emitted_tokens += 64 * turns
        changing.observe(64 * number)
    assert 10 <= changing.answer_rounds < 11


def test_where_each_round_has_many_tokens_the_cache_saves_no_more_rounds_than_its_share():
    """350 tokens in 50 rounds, 50 of them from the cache: without it, seven rounds more and not fifty."""
    assert costs(ended=1, rounds=50, accepted=250, from_cache=50).cache_gain == pytest.approx(1 / 6)


def test_the_load_is_of_the_curve_and_prompts_that_are_computed_are_no_backlog():
    load = router_load(waiting(1, 0, 300, 70), 3, 4, CURVE, costs(ended=4, rounds=200, drafted=200), 256)
    assert (load.num_running, load.num_waiting, load.num_places, load.backlog_tokens) == (3, 1, 4, 370)
    assert load.token_s == pytest.approx(0.001, rel=0.01)
    assert load.round_s == pytest.approx(0.012, rel=0.01)  # two rows
    assert load.sequence_s == pytest.approx(0.002, rel=0.01)
    idle = router_load([], 0, 1, CURVE, costs(ended=0, rounds=0), 256)
    assert (idle.num_waiting, idle.backlog_tokens, idle.sequence_s) == (0, 0, 0.0)
    assert idle.token_s > 0


@pytest.mark.parametrize(("has_prefix_cache", "tokens"), [(True, 40), (False, 0)])
def test_the_size_of_the_prefix_cache_if_there_is_one(has_prefix_cache, tokens):
    core = toy_core(toy_info(16, has_prefix_cache=has_prefix_cache))
    assert core.prefix_cache_tokens == 0
    core.blocks.observe(SimpleNamespace(free_blocks=3, total_blocks=10))
    assert core.prefix_cache_tokens == tokens

"""How many prompt rows a round computes, by what rounds have taken."""

import pytest

from cluster.config import MOST_PREFILL_ROWS, RouterConfig, SpeculationConfig
from cluster.router.prefill_budget import PromptRound, next_prefill_rows, prefill_rows, round_limits
from cluster.router.step_time import StepTimeCurve

ROWS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)


def curve(seconds, rows=ROWS) -> StepTimeCurve:
    return StepTimeCurve([(count, seconds(count)) for count in rows])


def gpu(flat_s: float, row_s: float) -> StepTimeCurve:
    """The weights are read in flat_s; beyond, products take row_s a row."""
    return curve(lambda rows: max(flat_s, rows * row_s) + 1e-4)


@pytest.mark.parametrize(
    ("step_times", "decoding", "rows"),
    [
        # 70B on 8 GPUs: reading takes as long as computing 250 rows. Decoding waits for at most 4 times that.
        (gpu(6e-3, 24e-6), 0, 256),
        (gpu(6e-3, 6e-6), 0, 1024),
        (gpu(6e-3, 3e-6), 8, 2048),
        (gpu(6e-3, 0.5e-6), 8, MOST_PREFILL_ROWS),
        # each row costs as much as the first
        (curve(lambda rows: 5e-3 * rows), 0, 256),
        (curve(lambda rows: 5e-3 * rows + 1e-6), 4, 25),
        (curve(lambda rows: 5e-4 * rows), 4, 256),  # within 0.15 seconds
        (curve(lambda rows: 10e-3 + 8e-3 * rows - 1e-6), 1, 16),
        (curve(lambda rows: 30e-3 + 40e-3 * rows), 1, 8),
        (curve(lambda rows: 0.3 + 8e-3 * rows), 1, 38),  # who decode wait longer than that anyway
        (curve(lambda rows: 60e-3 + 2e-4 * rows), 1, 256),  # for long rounds not four times as long
        # a CPU, measured up to 64 rows
        (curve(lambda rows: 30e-3 + 4e-3 * rows, ROWS[:4]), 0, 256),
        (curve(lambda rows: 30e-3 + 4e-3 * rows + 1e-6, ROWS[:4]), 4, 25),
        (curve(lambda rows: 30e-3 + 4e-3 * rows, ROWS[:4]), 32, 39),  # who decode wait for one another anyway
        # rows get cheaper, but others would wait too long for it
        (curve(lambda rows: 6e-3 + 1e-3 * rows**0.75), 0, MOST_PREFILL_ROWS),
        (curve(lambda rows: 6e-3 + 1e-3 * rows**0.75), 1, 256),
        (curve(lambda rows: 0.4 + 1e-3 * rows**0.75), 0, 4096),
        (curve(lambda rows: 0.7 + 1e-3 * rows**0.75), 0, 1024),  # of a slower one, others wait for a second at most
    ],
)
def test_as_many_as_make_rows_cheaper_and_keep_no_one_waiting(step_times, decoding, rows):
    assert prefill_rows(step_times, decoding, None) == rows


def test_a_given_number_is_kept():
    assert prefill_rows(gpu(6e-3, 0.5e-6), 8, 17) == 17


def test_a_round_that_was_slower_than_thought_makes_the_next_ones_smaller():
    step_times = gpu(6e-3, 0.5e-6)
    assert prefill_rows(step_times, 1, None) == MOST_PREFILL_ROWS
    for _ in range(3):
        step_times.observe(1, 6e-3)
        step_times.observe(MOST_PREFILL_ROWS + 1, 1.0)
    assert prefill_rows(step_times, 1, None) < MOST_PREFILL_ROWS


def gaps_beside(first_context: int, load: float = 1.0) -> list[float]:
    """Seconds of the rounds with a prompt that ends at 8,000 tokens, beside one sequence that decodes; the first
    first_context tokens are in a cache. A row at 8,000 tokens takes five times as long as the first one."""
    step_times, last, seconds = curve(lambda rows: 0.02 + 2.3e-3 * rows, (1, 4, 8, 16, 32, 64)), None, []
    for _ in range(20):
        step_times.observe(1, 0.0223)
    context = first_context
    while context < 8000:
        rows = min(8000 - context, next_prefill_rows(step_times, 1, None, last))
        took_s = load * (0.0223 + rows * (2.3e-3 + 1.2e-6 * context))
        step_times.observe(rows + 1, took_s)
        last = PromptRound(rows, took_s)
        context += rows
        seconds.append(took_s)
    return seconds


def test_rows_that_take_longer_behind_more_tokens_are_fewer():
    seconds = gaps_beside(0)
    assert max(seconds) < 0.15
    assert sum(seconds) / len(seconds) > 0.12  # as many as there is time for


def test_a_prompt_that_is_mostly_in_a_cache_begins_with_few_rows():
    seconds = gaps_beside(7500)
    assert max(seconds) < 0.15


def test_a_loaded_machine_computes_prompts_all_the_same():
    seconds = gaps_beside(6000, load=8.0)
    assert len(seconds) <= 2000 / 8


def test_a_fast_target_computes_a_prompt_at_once():
    assert next_prefill_rows(gpu(6e-3, 3e-6), 8, None, None) == 2048


def test_the_largest_round_of_a_router():
    limits = round_limits(RouterConfig(max_running=3), SpeculationConfig(max_rows=50))
    assert (limits.prefill_rows, limits.sequences, limits.draft_rows) == (MOST_PREFILL_ROWS, 3, 50)
    assert round_limits(RouterConfig(max_prefill_rows=9), SpeculationConfig()).prefill_rows == 9

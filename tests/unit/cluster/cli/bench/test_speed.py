"""The arithmetic of the local benchmark on examples worked out by hand."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.bench.speed import Answer, Difference, TimedBlock, find_differences, measure_speed
from cluster.cli.table import plain_table, print_table


def block(method, task, prompt, seconds, num_tokens, rounds=1, drafted=0, accepted=None):
    return TimedBlock(
        method, task, (prompt,), seconds, (Answer(tuple(range(num_tokens)), rounds, drafted, accepted or {}),)
    )


BLOCKS = [
    block("slow", "a", "1", 2.0, 10, rounds=10),  # 5 tokens/s
    block("fast", "a", "1", 1.0, 10, rounds=4, drafted=12, accepted={"suffix": 4, "lookup": 2}),  # 10: x 2
    block("fast", "b", "2", 2.0, 40, rounds=20, drafted=28, accepted={"suffix": 14}),  # 20: x 1
    block("slow", "b", "2", 2.0, 40, rounds=40),  # 20
    block("slow", "b", "3", 4.0, 30, rounds=30),  # 7.5
    block("fast", "b", "3", 1.0, 30, rounds=6, drafted=0),  # 30: x 4
    block("slow", "b", "4", 1.0, 0, rounds=1),  # nothing said: no ratio of its own, but its time counts
    block("fast", "b", "4", 1.0, 0, rounds=1),
]


def test_the_overall_ratio_is_of_all_tokens_by_all_seconds():
    speed = measure_speed(BLOCKS, "fast", "slow")
    assert (speed.num_prompts, speed.num_tokens, speed.seconds) == (4, 80, 5.0)
    assert speed.tokens_per_second == 16.0
    assert speed.ratio == pytest.approx(16.0 / (80 / 9.0))  # 1.8
    assert speed.tokens_per_round == pytest.approx(80 / 31)
    assert speed.draft_tokens == 40
    assert speed.accepted_tokens == {"suffix": 18, "lookup": 2}
    assert speed.accepted_share == 0.5


def test_a_task_is_summed_up_alone_and_the_reference_against_itself():
    speed = measure_speed(BLOCKS, "fast", "slow", "b")
    assert (speed.num_tokens, speed.seconds) == (70, 4.0)
    assert speed.ratio == pytest.approx((70 / 4) / (70 / 7))
    reference = measure_speed(BLOCKS, "slow", "slow")
    assert (reference.ratio, reference.accepted_share, reference.accepted_tokens) == (1.0, None, {})


def test_nothing_said_gives_no_ratio_and_no_error():
    blocks = [block("slow", "a", "1", 1.0, 0, rounds=0), block("fast", "a", "1", 1.0, 3)]
    speed = measure_speed(blocks, "fast", "slow")
    assert speed.ratio is None
    assert measure_speed(blocks, "slow", "slow").tokens_per_round == 0.0


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_answers_agree_up_to_their_first_difference_and_not_at_it(expected, found):
    blocks = [
        TimedBlock(name, "t", ("same", "p"), 1.0, (Answer((7,), 1), Answer(tuple(tokens), 1)))
        for name, tokens in (("right", expected), ("other", found))
    ]
    differences = find_differences(blocks, "other", "right")
    if expected == found:
        assert differences == ()
        return
    (difference,) = differences
    at = difference.position
    assert expected[:at] == found[:at]
    one, other = (tokens[at] if at < len(tokens) else None for tokens in (expected, found))
    assert one != other
    assert difference == Difference("p", at, one, other)


def test_a_table_in_a_pipe_is_plain_aligned_text():
    out = io.StringIO()
    print_table("speeds", ("method", "x"), [("a [none]", "1.00"), ("b", "10.00")], out)
    assert out.getvalue() == "speeds\nmethod        x\na [none]   1.00\nb         10.00\n"
    assert plain_table("t", ("only",), []) == "t\nonly\n"


def test_a_table_on_a_terminal_is_drawn_with_every_cell():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    print_table("speeds", ("method", "x"), [("a [none]", "1.00")], out)
    assert "a [none]" in out.getvalue()
    assert "│" in out.getvalue()

from types import SimpleNamespace

from cluster.router.failed_rounds import GIVEN_UP_AFTER, count_failed_round, sequences_in_turn
from cluster.router.sequence import RequestProgress, TargetState


def sequence(num_failed=0):
    return SimpleNamespace(
        target=TargetState(num_failed_rounds=num_failed),
        drafts=SimpleNamespace(from_round=0),
        progress=RequestProgress(0.0),
    )


def test_isolated_sequences_and_all_others_take_turns():
    good, first, second = sequence(1), sequence(2), sequence(3)
    assert sequences_in_turn([good], 1) == [good]
    running = [first, good, second]
    assert [sequences_in_turn(running, round_id) for round_id in (1, 2)] == [[good], [first]]
    assert sequences_in_turn([first, second], 1) == [first]


def test_a_sequence_loses_its_drafts_then_its_request_unless_that_has_ended():
    one, cancelled = sequence(), sequence()
    cancelled.progress.is_cancelled = True
    failed = SimpleNamespace(entries=[SimpleNamespace(sequence=each) for each in (one, cancelled)], round_id=10)
    assert count_failed_round(failed) == []
    assert one.drafts.from_round == 0
    assert count_failed_round(failed) == []
    assert one.drafts.from_round > 10
    given_up = [count_failed_round(failed) for _ in range(GIVEN_UP_AFTER - 2)]
    assert given_up[-1] == [one]

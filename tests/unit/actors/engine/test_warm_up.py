"""What is known of a target before its first request."""

import pytest

from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import warm_up
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("num_blocks", "rows"), [(40, [1, 4, 8, 16, 32]), (4, [1, 4, 8])], ids=["small vocabulary", "small KV cache"]
)
def test_times_of_forwards_up_to_what_the_engine_has_room_for(num_blocks, rows):
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(num_blocks, 4, True))
    profile = warm_up(engine)
    assert [measured for measured, _ in profile] == rows
    assert all(0.0 < seconds < 5.0 for _, seconds in profile)


def test_nothing_of_it_stays_in_the_engine():
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4, True))
    warm_up(engine)
    assert engine.num_sequences == 0
    assert engine.pool.num_free == engine.pool.num_blocks
    check_integrity(engine)


def test_a_rank_that_does_not_sample_runs_the_same_forwards():
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4, True), samples=False)
    assert [rows for rows, _ in warm_up(engine)] == [1, 4, 8, 16, 32]

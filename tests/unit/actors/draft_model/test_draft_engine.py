"""What a draft model cannot read costs its own drafts only, however it came to be asked.

Covers `actors.draft_model.guesser`, too.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from actors.draft_model.draft_engine import DraftEngine
from actors.engine.options import EngineOptions
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import make_tiny_model

VOCAB = 61
POSITIONS = 32
GREEDY = SamplingParams(seed=1, temperature=0.0)
METHODS = ("tree", "lookahead")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """With learned positions: beyond the last one there is nothing to look up."""
    return make_tiny_model("gpt2", seed=3, vocab_size=VOCAB, layers=2, max_positions=POSITIONS)


@pytest.fixture
def engine(model) -> DraftEngine:
    return DraftEngine(copy.deepcopy(model), EngineOptions(256, 4))


def item(seq_id: int, start: int, token_ids: list[int], method: str, **fields: Any) -> DraftItem:
    begin = None if start else SequenceStart(GREEDY, len(token_ids))
    delta = SequenceDelta(seq_id, start, np.array(token_ids, np.int32))
    return DraftItem(delta, begin=begin, method=method, **({"max_nodes": 8, "max_depth": 4} | fields))


def sizes(engine: DraftEngine, *items: DraftItem, finished: tuple[int, ...] = ()) -> dict[int, int]:
    """Nodes by sequence; nothing is stale and the blocks are whole."""
    result = engine.draft(DraftBatch(1, list(items), list(finished)))
    assert result.stale_seq_ids == []
    check_integrity(engine)
    return dict(zip(result.seq_ids, [len(tree.token_ids) for tree in result.trees], strict=True))


@pytest.mark.parametrize("unknown", [VOCAB, 10**9, -1])
@pytest.mark.parametrize("method", METHODS)
def test_a_token_that_the_model_has_not_leaves_its_sequence_without_drafts(engine, method, unknown):
    found = sizes(engine, item(1, 0, [3, 4, unknown, 5], method), item(2, 0, [3, 4, 5], method))
    assert found[1] == 0
    assert found[2] > 0
    # Its further tokens are harmless, but there is nothing of it to go on from.
    assert sizes(engine, item(1, 4, [6], method), item(2, 3, [6], method))[1] == 0
    assert len(engine._table) == 1
    # Another sequence of that number begins afresh, as does this one from its beginning.
    assert sizes(engine, item(1, 0, [3, 4, 5], method), finished=(1, 2))[1] > 0


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_token_is_no_phrase_for_those_who_come_after(engine, method):
    text = [5, 6, 7, 8] * 5
    for start in (0, 21):
        sizes(engine, item(1, start, [*text, VOCAB] if start == 0 else [9], method))
    assert sizes(engine, item(2, 0, text, method))[2] > 0


@pytest.mark.parametrize("wanted", [0, 8])
@pytest.mark.parametrize("method", METHODS)
def test_a_text_with_more_tokens_than_positions_is_not_read(engine, method, wanted):
    long = [3 + index % 40 for index in range(POSITIONS + 8)]
    found = sizes(engine, item(1, 0, long, method, max_nodes=wanted), item(2, 0, [3, 4, 5], method))
    assert found[1] == 0
    assert found[2] > 0


@pytest.mark.parametrize("method", METHODS)
def test_drafts_end_with_the_positions(engine, method):
    for length in range(POSITIONS - 6, POSITIONS + 4):
        text = [3 + index % 40 for index in range(length)]
        found = sizes(engine, item(length, 0, text, method), finished=(length - 1,))
        assert (found[length] > 0) == (length <= POSITIONS)


@pytest.mark.parametrize("method", METHODS)
def test_a_message_cannot_ask_for_a_tree_without_end(model, method):
    engine = DraftEngine(make_tiny_model("llama", seed=3, vocab_size=VOCAB, layers=1, max_positions=4096),
                         EngineOptions(2048, 4))  # fmt: skip
    asked = item(1, 0, [3, 4, 5], method, max_nodes=50_000, max_depth=50_000, branch=2)
    assert 0 < sizes(engine, asked)[1] <= 256

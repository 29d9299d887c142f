"""The warm-up of draft engines that have little room, few positions or another vocabulary: it leaves nothing, and they
draft afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.draft_model.warm_up import warm_up
from actors.engine.options import EngineOptions
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from actors.models.token_text import TokenText
from paceline_testing.integrity import check_integrity
from paceline_testing.other_vocabularies import merging_tokenizer
from paceline_testing.tiny_models import make_byte_tokenizer, make_tiny_model

TARGET = TokenText(make_byte_tokenizer(), "target")
DRAFT = TokenText(merging_tokenizer(), "draft")


@pytest.fixture(autouse=True)
def everything(monkeypatch):
    """As if launches were recorded."""
    monkeypatch.setattr(DraftEngine, "records_launches", True)


@pytest.mark.parametrize(("num_blocks", "max_positions"), [(3, 1024), (64, 8), (64, 1024)])
@pytest.mark.parametrize("drafts_as", ["llama", "t5", "another vocabulary"])
def test_a_warm_up_leaves_nothing(drafts_as, num_blocks, max_positions):
    kind = "t5" if drafts_as == "t5" else "llama"
    model = make_tiny_model(kind, vocab_size=len(DRAFT), hidden_size=32, layers=1, max_positions=max_positions)
    inner = DraftEngine(model, EngineOptions(num_blocks, 4))
    engine = RetokenizedDraftEngine(inner, TARGET, DRAFT) if drafts_as == "another vocabulary" else inner
    warm_up(engine, gamma=3, branch=2)
    check_integrity(engine)
    assert engine.pool.num_free == engine.pool.num_blocks
    begin = SequenceStart(SamplingParams(0, temperature=0.0), 2)
    item = DraftItem(SequenceDelta(1, 0, np.array([5, 6], np.int32)), 2, begin, max_depth=2)
    assert engine.draft(DraftBatch(0, [item])).seq_ids == [1]

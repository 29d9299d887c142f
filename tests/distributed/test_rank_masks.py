"""Two ranks draw within masks that follow a round, and go on together after a round whose masks never came."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.build import build_target_engine
from actors.engine import model_runner
from actors.engine.rank_group import LeadingRank, follow
from actors.errors import LinkError
from actors.messages import (
    RoundMasks,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    TokenMasks,
    VerifyBatch,
    VerifyItem,
)
from actors.models.source import ModelSource
from actors.options import TargetGroupOptions
from paceline_testing.drafting import tree_to_verify
from paceline_testing.integrity import check_integrity
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = ([5, 9, 33, 2], [7], [40, 41])
OPTIONS = TargetGroupOptions(device="cpu", kv_cache_tokens=512, block_size=4)
FREE = 1  # place of the sequence without a grammar
LOST_ROUND = 3


def is_allowed(before: int, token: int) -> bool:
    return (5 * before + 11 * token) % 7 < 2


def masks_behind(tokens: list[int], vocab_size: int) -> TokenMasks:
    bits = np.array([[is_allowed(before, token) for token in range(vocab_size)] for before in tokens])
    padded = np.zeros((len(tokens), -(-vocab_size // 32) * 32), bool)
    padded[:, :vocab_size] = bits
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32).reshape(-1)
    return TokenMasks(words, np.arange(len(tokens), dtype=np.int32))


def decode(engine: Any, vocab_size: int, steps: int, *, loses_masks: bool = False) -> list[list[int]]:
    """Texts of all prompts, all but one within a grammar. loses_masks: those of one round do not come."""
    texts = [list(prompt) for prompt in PROMPTS]
    sent = [0] * len(texts)
    number = 0
    while min(len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)) < steps:
        number += 1
        items, drafts, masks = [], [], []
        for place, text in enumerate(texts):
            draft = next(token for token in range(number, vocab_size) if is_allowed(text[-1], token))
            begin = None if sent[place] else SequenceStart(SamplingParams(place, temperature=1.5), len(PROMPTS[place]))
            delta = SequenceDelta(place + 1, sent[place], np.array(text[sent[place] :], np.int32))
            items.append(VerifyItem(delta, 99, tree_to_verify([draft], [-1]), begin))
            drafts.append(draft)
            masks.append(None if place == FREE else masks_behind([text[-1], draft], vocab_size))

        def give(number: int = number, masks: list[TokenMasks | None] = masks) -> RoundMasks:
            if loses_masks and number == LOST_ROUND:
                raise LinkError("lost")
            return RoundMasks(number, masks)

        try:
            result = engine.answer(VerifyBatch(number, items, masks_follow=True), give)
        except LinkError:
            engine.clear()
            sent = [0] * len(texts)
            continue
        assert [verdict.seq_id for verdict in result.verdicts] == [1, 2, 3]
        for place, verdict in enumerate(result.verdicts):
            sent[place] = len(texts[place])
            texts[place] += [drafts[place]] * len(verdict.path) + [verdict.next_token]
    for place, (text, prompt) in enumerate(zip(texts, PROMPTS, strict=True)):
        pairs = pairwise(text[len(prompt) - 1 :])
        assert place == FREE or all(is_allowed(*pair) for pair in pairs)
    return [text[: len(prompt) + steps] for text, prompt in zip(texts, PROMPTS, strict=True)]


def run_rank(rank: int, ring: Any, answers: Any, path: Path, draws_on_device: bool, steps: int) -> None:
    if draws_on_device:
        model_runner.choose_attention = lambda device: "triton_tree"
    options = OPTIONS.model_copy(update={"tensor_parallel": 2})
    engine = build_target_engine(ModelSource("tiny", "tiny", path), options, rank=rank)
    if rank == 0:
        leading = LeadingRank(engine, ring)
        answers.put(decode(leading, engine.vocab_size, steps, loses_masks=True))
        leading.stop()
    else:
        follow(engine, ring)
    check_integrity(engine)
    assert engine.num_sequences == len(PROMPTS)


@pytest.mark.parametrize(("draws_on_device", "steps"), [(False, 12), (True, 5)])
def test_two_ranks_draw_within_masks_and_outlive_a_round_without_them(tmp_path, draws_on_device, steps):
    model_dir = save_tiny_model(tmp_path, "llama", 5, layers=2, hidden_size=64, heads=4, kv_heads=2)
    alone, again = (build_target_engine(ModelSource("tiny", "tiny", model_dir), OPTIONS) for _ in range(2))
    wanted = decode(alone, alone.vocab_size, steps)
    assert decode(again, again.vocab_size, steps, loses_masks=True) == wanted
    with ranks_at_work(2, run_rank, model_dir, draws_on_device, steps) as answers:
        assert answers.get(timeout=ANSWER_WITHIN_S) == wanted

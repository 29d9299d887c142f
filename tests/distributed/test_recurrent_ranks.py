"""Two ranks of a target with a recurrent state give the tokens of one, from cached states, too, and with chains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.build import build_target_engine
from actors.draft_tree import DraftTree
from actors.engine.rank_group import LeadingRank, follow
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.random_model import random_model
from actors.models.source import ModelSource
from actors.models.tiny_config import config_of_type, tiny_config
from actors.options import TargetGroupOptions
from paceline_testing.integrity import check_integrity
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work

KINDS = [
    "qwen3_next",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "qwen3_5_text",
            "olmo_hybrid",
            "lfm2_moe",
            "nemotron_h",
            "granitemoehybrid",
            "jamba",
            "kimi_linear",
            "minimax",
        )
    ),
]
SAMPLINGS = (SamplingParams(1, temperature=0.0), SamplingParams(2, temperature=0.8, top_p=0.9))
PROMPTS = ([5, 9, 33, 2], list(range(40, 63)))
STEPS = 8


def options_of(ranks: int) -> TargetGroupOptions:
    return TargetGroupOptions(device="cpu", dtype="float32", kv_cache_tokens=4096, block_size=4, tensor_parallel=ranks)


def decode(engine, truth: list[list[int]] | None = None) -> tuple[list[list[int]], list[int], int]:
    """Texts after both prompts have been answered, computed tokens that were cached, and accepted draft tokens.
    truth: texts of which each round drafts two tokens and then a wrong one."""
    texts, known, cached, accepted = [list(prompt) for prompt in PROMPTS], [0, 0], [0, 0], 0
    while min(len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)) < STEPS:
        items = []
        for index, text in enumerate(texts):
            begin = SequenceStart(SAMPLINGS[index], len(PROMPTS[index])) if known[index] == 0 else None
            chain = [] if truth is None else [*truth[index][len(text) :][:2], 1]
            draft = DraftTree.chain(np.array(chain, np.int32), np.ones(len(chain), np.float32))
            delta = SequenceDelta(index + 1, known[index], np.array(text[known[index] :], np.int32))
            items.append(VerifyItem(delta, 7, draft, begin))
            known[index] = len(text)
        for verdict in engine.answer(VerifyBatch(1, items)).verdicts:
            index = verdict.seq_id - 1
            cached[index] = max(cached[index], verdict.num_cached)
            if verdict.next_token >= 0:
                texts[index] += [*items[index].tree.token_ids[verdict.path].tolist(), verdict.next_token]
                accepted += len(verdict.path)
    engine.answer(VerifyBatch(2, [], [1, 2]))
    return [text[: len(prompt) + STEPS] for text, prompt in zip(texts, PROMPTS, strict=True)], cached, accepted


def decode_twice(engine) -> tuple[list[list[int]], int, int]:
    """With and without drafts and cached states; the texts, cached tokens and accepted draft tokens."""
    plain, *_ = decode(engine)
    drafted, cached, accepted = decode(engine, plain)
    assert drafted == plain
    return plain, sum(cached), accepted


def run_rank(rank: int, ring, answers, path: Path) -> None:
    engine = build_target_engine(ModelSource("tiny", "tiny", path), options_of(2), rank=rank)
    if rank == 0:
        leading = LeadingRank(engine, ring)
        answers.put(decode_twice(leading))
        leading.stop()
    else:
        follow(engine, ring)
    check_integrity(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_tokens_of_one(tmp_path, kind):
    random_model(tiny_config(config_of_type(kind))).save_pretrained(tmp_path)
    wanted = decode_twice(build_target_engine(ModelSource("tiny", "tiny", tmp_path), options_of(1)))
    with ranks_at_work(2, run_rank, tmp_path) as answers:
        assert answers.get(timeout=ANSWER_WITHIN_S) == wanted
    assert wanted[1] > 0
    assert wanted[2] > 0

"""Two ranks of a target with a recurrent state give the tokens of one, from cached states, too, and with chains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.build import build_target_engine
from actors.draft_tree import DraftTree
from actors.engine.rank_group import LeadingRank, follow
from actors.engine.recurrent.mixer import is_mixer
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.random_model import random_model
from actors.models.source import ModelSource
from actors.models.tiny_config import config_of_type, tiny_config
from actors.options import TargetGroupOptions
from paceline_testing.integrity import check_integrity
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work

# Part of the weights of mixers that a rank of two has. MOSTLY is an upper limit: some of their linears are whole.
DIVIDED, MOSTLY, WHOLE = 0.5, 0.6, 1.0
TWO_GROUPS = {"mamba_n_groups": 2}
KINDS = [
    pytest.param("lfm2", {}, DIVIDED, id="lfm2"),
    pytest.param("falcon_h1", {}, MOSTLY, id="falcon_h1"),
    pytest.param("qwen3_next", {}, DIVIDED, id="qwen3_next"),
    *(
        pytest.param(kind, changes, part, id=f"{kind}{'-changed' if changes else ''}", marks=pytest.mark.slow)
        for kind, changes, part in (
            ("lfm3", {}, DIVIDED),
            ("lfm2_moe", {}, DIVIDED),
            ("qwen3_5_text", {}, DIVIDED),
            ("qwen3_5_moe_text", {}, DIVIDED),
            ("olmo_hybrid", {}, DIVIDED),
            ("kimi_linear", {}, MOSTLY),
            ("jamba", {}, DIVIDED),
            ("nemotron_h", {"n_groups": 2}, DIVIDED),
            ("granitemoehybrid", TWO_GROUPS, DIVIDED),
            ("bamba", TWO_GROUPS, DIVIDED),
            ("falcon_h1", TWO_GROUPS | {"mamba_rms_norm": True}, DIVIDED),
            ("bamba", {}, WHOLE),
            ("minimax", {}, WHOLE),
        )
    ),
]
SAMPLINGS = (SamplingParams(1, temperature=0.0), SamplingParams(2, temperature=0.8, top_p=0.9), SamplingParams(3))
PROMPTS = ([5, 9, 33, 2], list(range(40, 63)), [7, 8, 30, 31, 9, 6])
FIRST_ROUNDS = (0, 0, 3)
STEPS = 8
RESUMED = 3  # tokens of each answer that a second router was told


def options_of(ranks: int) -> TargetGroupOptions:
    return TargetGroupOptions(device="cpu", dtype="float32", kv_cache_tokens=16384, block_size=4, tensor_parallel=ranks)


def source_of(path: Path) -> ModelSource:
    return ModelSource("tiny", "tiny", path)


def save_model(kind: str, changes: dict, path: Path) -> None:
    config = tiny_config(config_of_type(kind))
    for name, value in changes.items():
        setattr(config, name, value)
    random_model(config).save_pretrained(path)


def decode(engine, truth: list[list[int]] | None = None, begun: int = 0) -> tuple[list[list[int]], list[int], int]:
    """Texts after all prompts have been answered, computed tokens that were cached, and accepted draft tokens.
    truth: texts of which two rounds in three draft two tokens and then a wrong one. begun: tokens of them that are
    known from the beginning."""
    texts = [(prompt if truth is None else truth[index])[: len(prompt) + begun] for index, prompt in enumerate(PROMPTS)]
    known, cached, accepted, turn = [0] * len(PROMPTS), [0] * len(PROMPTS), 0, 0
    while min(len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)) < STEPS:
        items, indices = [], [index for index, first in enumerate(FIRST_ROUNDS) if turn >= first]
        for index in indices:
            text = texts[index]
            begin = SequenceStart(SAMPLINGS[index], len(PROMPTS[index])) if known[index] == 0 else None
            is_drafted = truth is not None and (turn + index) % 3
            chain = [*truth[index][len(text) :][:2], 1] if truth is not None and is_drafted else []
            draft = DraftTree.chain(np.array(chain, np.int32), np.ones(len(chain), np.float32))
            delta = SequenceDelta(index + 1, known[index], np.array(text[known[index] :], np.int32))
            items.append(VerifyItem(delta, 7, draft, begin))
            known[index] = len(text)
        for verdict in engine.answer(VerifyBatch(1, items)).verdicts:
            index = verdict.seq_id - 1
            cached[index] = max(cached[index], verdict.num_cached)
            if verdict.next_token >= 0:
                texts[index] = [*texts[index], *items[indices.index(index)].tree.token_ids[verdict.path].tolist()]
                texts[index].append(verdict.next_token)
                accepted += len(verdict.path)
        turn += 1
    engine.answer(VerifyBatch(2, [], [1, 2, 3]))
    return [text[: len(prompt) + STEPS] for text, prompt in zip(texts, PROMPTS, strict=True)], cached, accepted


def decode_thrice(engine) -> tuple[list[list[int]], int, int]:
    """Without drafts, with drafts and cached states, and as a second router goes on with answers of a first one; the
    texts, cached tokens and accepted draft tokens."""
    plain, *_ = decode(engine)
    drafted, cached, accepted = decode(engine, plain)
    assert drafted == plain
    assert decode(engine, plain, RESUMED)[0] == plain
    return plain, sum(cached), accepted


def linear_weights(engine) -> int:
    """Of all recurrent mixers."""
    mixers = [module for module in engine.model.modules() if is_mixer(module)]
    linears = [
        module
        for mixer in mixers
        for module in mixer.modules()
        if hasattr(module, "in_features") and not list(module.children())
    ]
    return sum(linear.in_features * linear.out_features for linear in linears)


def run_rank(rank: int, ring, answers, path: Path) -> None:
    engine = build_target_engine(source_of(path), options_of(2), rank=rank)
    if rank == 0:
        leading = LeadingRank(engine, ring)
        answers.put((decode_thrice(leading), linear_weights(engine)))
        leading.stop()
    else:
        follow(engine, ring)
    check_integrity(engine)


@pytest.mark.parametrize(("kind", "changes", "part"), KINDS)
def test_two_ranks_give_the_tokens_of_one(tmp_path, kind, changes, part):
    save_model(kind, changes, tmp_path)
    alone = build_target_engine(source_of(tmp_path), options_of(1))
    whole = linear_weights(alone)
    texts, cached, accepted = wanted = decode_thrice(alone)
    assert_greedy(tmp_path, texts[0], len(PROMPTS[0]))
    assert cached > 0
    assert accepted > 0
    with ranks_at_work(2, run_rank, tmp_path) as answers:
        said, weights = answers.get(timeout=ANSWER_WITHIN_S)
    assert said == wanted
    assert weights == whole * part if part != MOSTLY else weights < whole * part


def assert_greedy(path: Path, text: list[int], num_prompt: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([text])).logits[0]
    assert text[num_prompt:] == logits[num_prompt - 1 : -1].argmax(-1).tolist()

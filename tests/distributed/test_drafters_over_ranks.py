"""Two ranks say what one says without drafts, with every drafter but one: hybrids, sinks, EAGLE and MTP heads."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from actors.build import build_target_engine
from actors.drafters.registry import DRAFTER_NAMES
from actors.engine.rank_group import LeadingRank, begin_rounds, follow, least_of_ranks
from actors.engine.warm_up import warm_up
from actors.models.loader import read_model_info
from actors.models.random_model import random_model
from actors.models.source import ModelSource
from actors.models.tiny_config import config_of_type, tiny_config
from actors.options import MTP_HEAD, TargetGroupOptions
from cluster.offline import engine as offline_engine
from cluster.offline.corpus import build_corpus
from cluster.offline.engine import LocalEngine
from paceline_testing import mtp_checkpoints
from paceline_testing.draft_times import let_drafts_pay
from paceline_testing.integrity import check_integrity
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work
from paceline_testing.tiny_models import (
    BYTE_VOCAB_SIZE,
    END_OF_TURN,
    PADDING,
    make_byte_tokenizer,
    save_eagle_head,
    save_tiny_model,
    tiny_eagle_tensors,
)

COMMON = {"device": "cpu", "batch_size": 4, "kv_cache_tokens": 4096}
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash")]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.3}
CONSTRAINED = {"temperature": 0.0, "structured_outputs": {"regex": "(oak|elm) and then (ash|fir)"}}
WAYS = (GREEDY, SAMPLED, CONSTRAINED)
DRAFTERS = tuple(name for name in DRAFTER_NAMES if name not in ("none", "auto", "cache"))  # there is no shared cache


def serve_rank(rank: int, ring, answers, path: Path, options: dict, predictions: list[list[int]]) -> None:
    """Rank 0: a local engine whose target is the group."""
    target = TargetGroupOptions(
        device="cpu", dtype="float32", kv_cache_tokens=16384, block_size=4, tensor_parallel=2,
        eagle_head=options["eagle_head"], eagle_depth=3, eagle_top_k=3,
    )  # fmt: skip
    engine = build_target_engine(ModelSource("tiny", "tiny", path), target, rank=rank)
    begin_rounds(timedelta(seconds=ANSWER_WITHIN_S))
    if rank:
        warm_up(engine)
        least_of_ranks(0)  # rank 0 is ready, too: it may compile drafters for longer than ranks wait for a round
        follow(engine, ring)
    else:
        leading = LeadingRank(SimpleNamespace(verify=engine.verify, clear=engine.clear), ring)
        offline_engine.build_target = lambda *_: engine
        local = LocalEngine(str(path), drafters=DRAFTERS, **COMMON, **options)
        engine.verify = leading.answer
        least_of_ranks(0)
        with pytest.MonkeyPatch.context() as patch:
            let_drafts_pay(patch)
            together = [answers_of(local, way, predictions=predictions) for way in WAYS for _ in range(2)]
            counters, alone, drafted = local.core.counters, {}, {}
            for name in DRAFTERS:
                before = counters.drafted_tokens[name]
                alone[name] = answers_of(local, way_of(name), predictions=predictions, drafters=[name])
                drafted[name] = counters.drafted_tokens[name] - before
        answers.put((together, alone, drafted, counters.accepted_tokens.total()))
        assert not counters.drafter_errors
        leading.stop()
    check_integrity(engine)


def way_of(drafter: str) -> dict:
    """How a drafter is asked alone."""
    return CONSTRAINED if drafter == "grammar" else GREEDY


def answers_of(local: LocalEngine, way: dict, **options) -> list[list[int]]:
    generations = local.generate(PROMPTS, max_new_tokens=16, ignore_eos=True, **way, **options)
    return [generation.token_ids for generation in generations]


def save_target(path: Path, kind: str) -> str:
    """Write a target that has a head; what `eagle_head` is for it."""
    if kind == "qwen3_next":
        mtp_checkpoints.qwen3_next().save(path)
        return MTP_HEAD
    config = tiny_config(config_of_type(kind))
    config.vocab_size, config.eos_token_id, config.pad_token_id = BYTE_VOCAB_SIZE, END_OF_TURN, PADDING
    config.tie_word_embeddings = False
    random_model(config).save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return str(save_eagle_head(path / "head", config, tiny_eagle_tensors(config, "eagle", 9)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "gpt_oss", "qwen3_next"])
def test_two_ranks_say_the_same_with_all_drafters_and_with_each_alone(tmp_path, kind):
    path = tmp_path / "target"
    head = save_target(path, kind)
    plain = LocalEngine(str(path), drafters=("none",), draft_model="none", **COMMON)
    greedy, sampled, constrained = (answers_of(plain, way) for way in WAYS)
    nearly = [[token if at % 5 else 66 for at, token in enumerate(text)] for text in greedy]
    documents = [(np.array([*prompt, *text], np.int32), True) for prompt, text in zip(PROMPTS, nearly, strict=True)]
    corpus = build_corpus(documents, read_model_info(ModelSource("tiny", "tiny", path)), tmp_path / "corpus").path
    draft_model = save_tiny_model(tmp_path / "draft", "llama", 5, layers=1)
    drafting = {"eagle_head": head, "draft_model": str(draft_model), "corpora": [corpus]}
    with ranks_at_work(2, serve_rank, path, drafting, nearly) as answers:
        together, alone, drafted, accepted = answers.get(timeout=ANSWER_WITHIN_S)
    assert together == [greedy] * 2 + [sampled] * 2 + [constrained] * 2
    assert alone == {name: constrained if name == "grammar" else greedy for name in DRAFTERS}
    assert {name for name in DRAFTERS if not drafted[name]} == set()
    assert accepted > 0

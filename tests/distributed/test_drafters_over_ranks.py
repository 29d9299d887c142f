"""Two ranks say what one says without drafts, with all drafters that apply: hybrids, sinks and MTP heads."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.build import build_target_engine
from actors.drafters.registry import DRAFTER_NAMES
from actors.engine.rank_group import LeadingRank, begin_rounds, follow, least_of_ranks
from actors.engine.warm_up import warm_up
from actors.models.random_model import random_model
from actors.models.source import ModelSource
from actors.models.tiny_config import config_of_type, tiny_config
from actors.options import TargetGroupOptions
from cluster.offline import engine as offline_engine
from cluster.offline.engine import LocalEngine
from paceline_testing import mtp_checkpoints
from paceline_testing.draft_times import let_drafts_pay
from paceline_testing.integrity import check_integrity
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, END_OF_TURN, PADDING, make_byte_tokenizer, save_tiny_model

COMMON = {"device": "cpu", "batch_size": 4, "kv_cache_tokens": 4096}
ASKED = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.3})


def serve_rank(rank: int, ring, answers, path: Path, options: dict) -> None:
    """Rank 0: a local engine whose target is the group."""
    target = TargetGroupOptions(
        device="cpu", dtype="float32", kv_cache_tokens=16384, block_size=4, tensor_parallel=2,
        eagle_head=options.get("eagle_head", "none"),
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
        local = LocalEngine(str(path), **COMMON, **options)
        engine.verify = leading.answer
        least_of_ranks(0)
        with pytest.MonkeyPatch.context() as patch:
            let_drafts_pay(patch)
            answers.put([answers_of(local, sampling) for sampling in ASKED for _ in range(2)])
        counters = local.core.counters
        answers.put((sum(counters.drafted_tokens.values()), sum(counters.accepted_tokens.values())))
        leading.stop()
    check_integrity(engine)


def answers_of(local: LocalEngine, sampling: dict) -> list[list[int]]:
    words = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash")]
    predictions = [[65, 66, 67]] * len(words)
    generations = local.generate(words, max_new_tokens=16, ignore_eos=True, predictions=predictions, **sampling)
    return [generation.token_ids for generation in generations]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "gpt_oss", "qwen3_next"])
def test_two_ranks_say_the_same_with_all_drafters(tmp_path, kind):
    path = tmp_path / "target"
    if kind == "qwen3_next":
        mtp_checkpoints.qwen3_next().save(path)
        drafting = {"drafters": ("eagle",), "eagle_head": "mtp", "eagle_depth": 3, "draft_model": "none"}
    else:
        config = tiny_config(config_of_type(kind))
        config.vocab_size, config.eos_token_id, config.pad_token_id = BYTE_VOCAB_SIZE, END_OF_TURN, PADDING
        random_model(config).save_pretrained(path)
        make_byte_tokenizer().save_pretrained(path)
        names = tuple(name for name in DRAFTER_NAMES if name not in ("none", "auto", "eagle"))
        drafting = {"drafters": names, "draft_model": str(save_tiny_model(tmp_path / "draft", "llama", 5, layers=1))}
    plain = LocalEngine(str(path), drafters=("none",), draft_model="none", **COMMON)
    wanted = [answers_of(plain, sampling) for sampling in ASKED]
    with ranks_at_work(2, serve_rank, path, drafting) as answers:
        said, (drafted, accepted) = (answers.get(timeout=ANSWER_WITHIN_S) for _ in range(2))
    assert said == [wanted[0]] * 2 + [wanted[1]] * 2
    assert drafted > 0
    if kind != "qwen3_next":  # a random head is right by chance
        assert accepted > 0

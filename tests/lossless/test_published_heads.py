"""Heads in all published layouts only draft: under every load the text is the target's own."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from actors.drafters.registry import DRAFTER_NAMES
from actors.models.quiet import quiet_transformers
from actors.models.random_model import random_model
from actors.models.tiny_config import config_of_type, tiny_config
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation
from paceline_testing.integrity import check_integrity
from paceline_testing.published_heads import LAYERS, TARGET_SIZE, VOCAB
from paceline_testing.published_layouts import LAYOUTS
from paceline_testing.tiny_models import (
    BYTE_VOCAB_SIZE,
    END_OF_TURN,
    PADDING,
    make_byte_tokenizer,
    make_tiny_model,
    save_eagle_head,
    save_tiny_model,
    tiny_eagle_tensors,
)

# Some are longer than the rows of a round, and all together need more blocks than there are.
PROMPTS = [
    np.random.default_rng(length).integers(0, VOCAB, length).tolist() for length in (20, 3, 61, 5, 12, 40, 7, 30)
]
SAMPLING: dict[str, dict] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 7}}
OPTIONS = {"max_new_tokens": 8, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("drafts_pay")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_tiny_model("llama", 3, VOCAB, LAYERS, TARGET_SIZE, 4, 2).save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return path


def local_engine(target: Path, head: Path | str, **options) -> LocalEngine:
    options = {"batch_size": 8, "max_rows": 48, "kv_cache_tokens": 256, "eagle_depth": 3, "eagle_top_k": 3} | options
    return LocalEngine(str(target), draft_model="none", eagle_head=head, device="cpu", **options)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


@pytest.fixture(scope="module")
def plain(target_dir) -> dict[str, list[list[int]]]:
    """What the target alone says, with many rows in a round and blocks for all."""
    local = local_engine(target_dir, "none", drafters=("none",), max_rows=256, kv_cache_tokens=1024)
    return {name: tokens(local.generate(PROMPTS, **OPTIONS, **sampling)) for name, sampling in SAMPLING.items()}


def forgets(local: LocalEngine):
    """Has the target lose all sequences, once among prompts and once later."""
    rounds = itertools.count()

    def forget(trace) -> None:
        if next(rounds) in (3, 8):
            local.target.clear()

    return forget


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_changes_a_token_of_eight_texts_or_of_one(tmp_path, target_dir, plain, name):
    """Eight texts with the head alone: in chunks, with too few blocks, and lost by the target midway. Then one text
    with all drafters. One is greedy and the other sampled, by turns."""
    eight, one = ("greedy", "sampled") if list(LAYOUTS).index(name) % 2 else ("sampled", "greedy")
    local = local_engine(target_dir, LAYOUTS[name][0]().save(tmp_path / "head"))
    together = local.generate(PROMPTS, drafters=["eagle"], on_round=forgets(local), **OPTIONS, **SAMPLING[eight])
    assert tokens(together) == plain[eight]
    counters = local.core.counters
    assert counters.drafted_tokens["eagle"] > 0
    assert counters.preempted > 0
    assert counters.stale_sequences > 0
    assert tokens(local.generate(PROMPTS[:1], **OPTIONS, **SAMPLING[one])) == plain[one][:1]
    assert not counters.invalid_trees
    check_integrity(local.target)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bitwise_no_layout_changes_a_token_under_any_load(tmp_path, target_dir, name, batch_size):
    options = {"batch_size": batch_size, "exact": "bitwise"}
    alone = local_engine(target_dir, "none", drafters=("none",), **options)
    local = local_engine(target_dir, LAYOUTS[name][0]().save(tmp_path / "head"), **options)
    long = OPTIONS | {"max_new_tokens": 40}
    for sampling in SAMPLING.values():
        wanted = tokens(alone.generate(PROMPTS, **long, **sampling))
        for drafters in (["eagle"], None):
            drafted = local.generate(PROMPTS, drafters=drafters, on_round=forgets(local), **long, **sampling)
            assert tokens(drafted) == wanted
    check_integrity(local.target)


@pytest.mark.slow
def test_a_head_beside_all_other_drafters_changes_no_token_of_gpt_oss(tmp_path):
    """Attention sinks, sliding windows and experts."""
    config = tiny_config(config_of_type("gpt_oss"))
    config.vocab_size, config.eos_token_id, config.pad_token_id = BYTE_VOCAB_SIZE, END_OF_TURN, PADDING
    config.tie_word_embeddings = False
    with quiet_transformers():
        random_model(config).save_pretrained(tmp_path / "target")
    make_byte_tokenizer().save_pretrained(tmp_path / "target")
    head = save_eagle_head(tmp_path / "head", config, tiny_eagle_tensors(config, "eagle", 9))
    draft = save_tiny_model(tmp_path / "draft", "llama", 5, layers=1)
    drafters = tuple(name for name in DRAFTER_NAMES if name not in ("none", "auto"))
    local = LocalEngine(
        str(tmp_path / "target"), draft_model=str(draft), drafters=drafters, eagle_head=head, batch_size=8,
        device="cpu", kv_cache_tokens=1024, dtype="float32",
    )  # fmt: skip
    prompts = [list(b"say oak and oak and"), list(b"say elm and elm and"), [65]]
    for sampling in SAMPLING.values():
        wanted = tokens(local.generate(prompts, drafters=(), **OPTIONS, **sampling))
        predictions = [[token if at % 5 else 66 for at, token in enumerate(text)] for text in wanted]
        assert tokens(local.generate(prompts, predictions=predictions, **OPTIONS, **sampling)) == wanted
    assert local.core.counters.drafted_tokens["eagle"] > 0
    assert not local.core.counters.invalid_trees
    check_integrity(local.target)

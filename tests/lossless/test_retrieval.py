"""Drafts from a corpus change the number of rounds and nothing else, whatever the corpus says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.models.loader import read_model_info
from actors.models.source import ModelSource
from cluster.offline.corpus import build_corpus
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash", "fir")]
OPTIONS = {"max_new_tokens": 48, "ignore_eos": True, "seed": 5}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), "llama", 5, layers=2)


def engine(target: Path, drafter: str, **options) -> LocalEngine:
    return LocalEngine(
        str(target), draft_model="none", drafters=(drafter,), device="cpu", kv_cache_tokens=4096, exact="bitwise",
        **options,
    )  # fmt: skip


def corpus_of(target: Path, out: Path, generations: list[Generation]) -> Path:
    info = read_model_info(ModelSource(str(target), target.name, target))
    documents = [(np.array([*g.prompt_token_ids, *g.token_ids], np.int32), True) for g in generations]
    return build_corpus(documents, info, out).path


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_the_same_with_a_corpus_of_the_answers_and_take_few_rounds(
    target, drafts_pay, tmp_path, temperature
):
    plain = engine(target, "none").generate(PROMPTS, temperature=temperature, **OPTIONS)
    corpus = corpus_of(target, tmp_path / "index", plain)
    drafted = engine(target, "retrieval", corpora=[corpus]).generate(PROMPTS, temperature=temperature, **OPTIONS)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    for generation in drafted:
        assert generation.rounds <= 48 / 4
        assert generation.accepted_tokens["retrieval"] >= 48 - generation.rounds


def test_answers_are_the_same_with_a_corpus_that_misleads(target, drafts_pay, tmp_path):
    plain = engine(target, "none").generate(PROMPTS, temperature=0.9, **OPTIONS)
    for generation in plain:
        generation.token_ids[1::3] = [(token + 1) % 256 for token in generation.token_ids[1::3]]
    wrong = [list(g.token_ids) for g in plain]
    corpus = corpus_of(target, tmp_path / "index", plain)
    drafted = engine(target, "retrieval", corpora=[corpus]).generate(PROMPTS, temperature=0.9, **OPTIONS)
    right = engine(target, "none").generate(PROMPTS, temperature=0.9, **OPTIONS)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in right]
    assert all(g.token_ids != other for g, other in zip(drafted, wrong, strict=True))
    assert sum(g.draft_tokens - sum(g.accepted_tokens.values()) for g in drafted) > 0

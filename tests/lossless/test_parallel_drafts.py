"""A parallel draft model changes no token, and the guesses of its mask tokens are used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.errors import ModelError
from cluster.offline.engine import LocalEngine
from paceline_testing.integrity import check_integrity
from paceline_testing.other_vocabularies import TEXT, merging_tokenizer
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [TEXT[first : first + 30] for first in range(0, 24, 8)] + ["x"]
MASK = 3  # a byte that no text here has
SHAPE = {"hidden_size": 48, "max_positions": 512}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.7, "seed": 7},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A target to which all tokens are nearly the same, so that it hardly matters what comes before, and a mask token
    can guess; the same as a parallel draft model; and one of another vocabulary."""
    home = tmp_path_factory.mktemp("models")
    dirs = {name: save_tiny_model(home / name, "llama", 5, layers=2, **SHAPE) for name in ("target", "draft")}
    for path in dirs.values():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        embeddings = model.get_input_embeddings().weight.data
        embeddings += 5 * embeddings[0].clone()
        model.save_pretrained(path)
    other = save_tiny_model(home / "other", "llama", 6, tokenizer=merging_tokenizer(), layers=1, **SHAPE)
    for path in (dirs["draft"], other):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"pard_token": MASK, "spd_type": "pard"}))
    return dirs | {"other": other}


def engine(target: Path, draft: Path | str, batch_size: int = 4, **options) -> LocalEngine:
    drafters = ("none",) if draft == "none" else ("draft_model",)
    options = {"exact": "bitwise", "kv_cache_tokens": 8192} | options
    return LocalEngine(
        str(target), draft_model=str(draft), drafters=drafters, batch_size=batch_size, device="cpu", **options
    )


def tokens(local: LocalEngine, **options) -> list[list[int]]:
    generations = local.generate(PROMPTS, max_new_tokens=16, **options)
    for draft in local._drafts.values():
        check_integrity(draft)
    assert local.target.pool.num_free == local.target.pool.num_blocks
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_are_the_same_with_and_without_parallel_drafts(models, sampling):
    plain = tokens(engine(models["target"], "none", 1), **sampling)
    for draft, batch_size in (("draft", 1), ("draft", 4), ("other", 4)):
        drafted = engine(models["target"], models[draft], batch_size, gamma=5)
        assert isinstance(drafted._drafts["draft"], RetokenizedDraftEngine) == (draft == "other")
        assert tokens(drafted, **sampling) == plain


def test_guesses_of_mask_tokens_are_accepted(models, drafts_pay):
    local = engine(models["target"], models["draft"], 1, gamma=5)
    generation = local.generate([PROMPTS[0]], max_new_tokens=60, temperature=0.0)[0]
    assert generation.accepted_tokens["draft_model"] >= generation.rounds  # two tokens a round and more


def test_a_model_that_says_how_many_tokens_it_guesses_is_asked_for_no_more(models, drafts_pay, tmp_path):
    told = shutil.copytree(models["draft"], tmp_path / "told")
    config = json.loads((told / "config.json").read_text())
    (told / "config.json").write_text(json.dumps(config | {"pard_depth": 2}))
    options = {"max_new_tokens": 60, "temperature": 0.0}
    generation = engine(models["target"], told, 1, gamma=5, branch=1).generate([PROMPTS[0]], **options)[0]
    assert generation.rounds < generation.draft_tokens <= 2 * generation.rounds
    (told / "config.json").write_text(json.dumps(config | {"pard_depth": 0}))
    with pytest.raises(ModelError, match="pard_depth is 0; it must be"):
        engine(models["target"], told, 1)


def test_rejection_at_temperature_zero_is_greedy(models):
    plain = tokens(engine(models["target"], "none", 1))
    assert tokens(engine(models["target"], models["draft"], acceptance="rejection", gamma=5)) == plain

"""Log-probabilities of answers and prompts against those of the unpatched model, whoever drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.errors import InvalidRequest
from actors.messages import TokenLogprobs
from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation
from paceline_testing.tiny_models import save_tiny_model

K = 5
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash", "fir")]
LONG = [(7 * place * place + 11) % 256 for place in range(700)]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "everything": {
        "temperature": 1.3, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.2, "logit_bias": ((34, 3.0), (44, -2.0)),
    },
    "constrained": {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": r"[a-f]{3,9}-(north|south){1,5}"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A target, and a draft model that is right now and then."""
    shape = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "max_positions": 1024}
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    return save_tiny_model(target, "llama", 5, layers=2, **shape), save_tiny_model(draft, "llama", 5, layers=1, **shape)


def engine(models: tuple[Path, Path], drafters: tuple[str, ...], **options: Any) -> LocalEngine:
    return LocalEngine(
        str(models[0]), draft_model=str(models[1]), drafters=drafters, device="cpu", kv_cache_tokens=8192, **options
    )


@pytest.fixture(scope="module")
def of_transformers(models):
    """Log-probabilities of all tokens behind each token of a text, float64 [n, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(models[0]).eval()

    def logprobs(token_ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1).numpy()

    return logprobs


def check(found: TokenLogprobs | None, wanted: np.ndarray, tokens: list[int], k: int = K) -> None:
    """wanted: [n, vocab], of the places of the n tokens."""
    assert found is not None
    assert len(found) == len(tokens)
    if not tokens:
        return
    assert found.k == k
    np.testing.assert_allclose(found.chosen, wanted[np.arange(len(tokens)), tokens], atol=1e-4)
    ids, values = found.token_ids.reshape(-1, k), found.logprobs.reshape(-1, k)
    np.testing.assert_allclose(values, -np.sort(-wanted, axis=-1)[:, :k], atol=1e-4)
    np.testing.assert_allclose(values, np.take_along_axis(wanted, ids, -1), atol=1e-4)


def check_answer(answer: Generation, of_transformers: Any) -> None:
    wanted = of_transformers(answer.prompt_token_ids + answer.token_ids)
    first = len(answer.prompt_token_ids) - 1
    check(answer.logprobs, wanted[first : first + len(answer.token_ids)], answer.token_ids)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exact", ["default", "bitwise"])
def test_they_are_the_unpatched_models_with_and_without_drafts(models, drafts_pay, of_transformers, way, exact):
    local = engine(models, ("auto", "prompt_lookup", "ngram_table"), exact=exact)
    for drafters in (("none",), None):
        answers = local.generate(PROMPTS, max_new_tokens=24, logprobs=K, drafters=drafters, **WAYS[way])
        for answer in answers:
            check_answer(answer, of_transformers)
    assert sum(sum(answer.accepted_tokens.values()) for answer in answers) > 0
    assert any(count > 1 for answer in answers for count in answer.round_tokens)


def test_they_are_of_the_raw_logits_under_rejection(models, drafts_pay, of_transformers):
    config = ClusterConfig.model_validate({"speculation": {"acceptance": "rejection"}})
    local = engine(models, ("draft_model",), config=config)
    answers = local.generate(PROMPTS, max_new_tokens=24, logprobs=K, temperature=0.8, top_k=30, seed=1)
    for answer in answers:
        check_answer(answer, of_transformers)
    assert sum(sum(answer.accepted_tokens.values()) for answer in answers) > 0


@pytest.mark.parametrize("exact", ["default", "bitwise"])
def test_prompts_are_scored_whole_in_parts_and_beside_others(models, of_transformers, exact):
    local = engine(models, ("auto",), exact=exact)
    local.generate([LONG], max_new_tokens=1)  # its blocks are in the prefix cache
    plain = local.generate([LONG], max_new_tokens=4)
    answers = local.generate([LONG, PROMPTS[0], LONG[:1]], max_new_tokens=4, prompt_logprobs=2, logprobs=0)
    for answer in answers:
        prompt = answer.prompt_token_ids
        check(answer.prompt_logprobs, of_transformers(prompt)[:-1], prompt[1:], 2)
        assert answer.logprobs is not None
        assert answer.logprobs.k == 0
    assert answers[0].token_ids == plain[0].token_ids
    assert local.generate([LONG], max_new_tokens=1)[0].prompt_logprobs is None


def test_a_target_that_loses_a_prompt_scores_it_anew(models, of_transformers, monkeypatch):
    local = engine(models, ("none",))
    rounds, verify = 0, local.target.verify

    def forget_once(batch: Any, masks: Any = None) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds == 3:  # of the three rounds of the prompt
            local.target.clear()
        return verify(batch, masks)

    monkeypatch.setattr(local.target, "verify", forget_once)
    (answer,) = local.generate([LONG], max_new_tokens=2, prompt_logprobs=1)
    assert rounds > 4
    check(answer.prompt_logprobs, of_transformers(LONG)[:-1], LONG[1:], 1)


def test_free_requests_get_none(models):
    local = engine(models, ("auto",))
    asked, free = {"max_new_tokens": 6, "logprobs": 1}, {"max_new_tokens": 6}
    assert local.generate(PROMPTS, **free)[0].logprobs is None
    assert [a.token_ids for a in local.generate(PROMPTS, **asked)] == [
        a.token_ids for a in local.generate(PROMPTS, **free)
    ]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("count", [-1, 21])
def test_more_than_twenty_are_refused(models, field, count):
    local = engine(models, ("none",))
    with pytest.raises(InvalidRequest, match=f"{field} is {count}"):
        local.generate(PROMPTS[:1], **{field: count})

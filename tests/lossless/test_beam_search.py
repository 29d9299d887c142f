"""Beam search on an engine's model finds what `transformers` finds on the unpatched one, and the engine stays whole."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.errors import InvalidRequest
from cluster.offline.engine import LocalEngine
from paceline_testing.tiny_models import save_tiny_model

EOS = 256
STOPS = (EOS, *range(96, 128))  # many, so that beams end by one
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash")]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {
        kind: save_tiny_model(root / kind, kind, 5, layers=2, sliding_window=6, max_positions=256)
        for kind in ("llama", "gemma3", "gpt2")
    }


def engine(directory) -> LocalEngine:
    return LocalEngine(str(directory), draft_model="none", drafters=("suffix",), device="cpu", kv_cache_tokens=4096)


@lru_cache(maxsize=4)
def unpatched(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference(directory, prompt, num_beams, length_penalty, count, stops=None) -> tuple[list[int], float]:
    ids = torch.tensor([prompt])
    output = unpatched(directory).generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=num_beams, length_penalty=length_penalty,
        max_new_tokens=count, do_sample=False, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
        eos_token_id=stops,
    )  # fmt: skip
    return output.sequences[0, len(prompt) :].tolist(), float(output.sequences_scores[0])


WAYS = (2, 1.0, ()), (4, 0.0, STOPS), (5, -1.0, STOPS)


@pytest.mark.parametrize(
    ("kind", "num_beams", "length_penalty", "stops"),
    [
        *(("llama", *way) for way in WAYS),
        *((kind, *WAYS[1]) for kind in ("gemma3", "gpt2")),
        *(pytest.param(kind, *way, marks=pytest.mark.slow) for kind in ("gemma3", "gpt2") for way in WAYS[::2]),
    ],
)
def test_tokens_and_scores_are_those_of_transformers(model_dirs, kind, num_beams, length_penalty, stops):
    model_dir = model_dirs[kind]
    local = engine(model_dir)
    greedy = local.generate(PROMPTS, max_new_tokens=12)
    found = local.beam_search(
        PROMPTS, num_beams=num_beams, length_penalty=length_penalty, max_new_tokens=12, stop_token_ids=stops
    )
    for prompt, result in zip(PROMPTS, found, strict=True):
        tokens, score = reference(model_dir, prompt, num_beams, length_penalty, 12, list(stops) or EOS)
        stopped = tokens[-1] in (EOS, *stops)
        assert result.finish_reason == ("stop" if stopped else "length")
        assert result.token_ids == (tokens[:-1] if stopped else tokens)
        assert result.score == pytest.approx(score, rel=1e-4)
    if length_penalty < 0:
        assert "stop" in {result.finish_reason for result in found}
    assert [result.token_ids for result in found] != [generation.token_ids for generation in greedy]
    again = local.generate(PROMPTS, max_new_tokens=12)  # the engine attends as before
    assert [generation.token_ids for generation in again] == [generation.token_ids for generation in greedy]


@pytest.mark.slow
def test_the_demo_model_finds_the_beams_of_transformers(smollm2_dir):
    prompt = list(range(2000, 2012))
    found = engine(smollm2_dir).beam_search([prompt], num_beams=3, length_penalty=0.8, max_new_tokens=10)[0]
    tokens, score = reference(smollm2_dir, prompt, 3, 0.8, 10)
    assert (found.token_ids, found.finish_reason) == (tokens, "length")
    assert found.score == pytest.approx(score, rel=1e-3)


def test_limits_are_named_before_anything_is_computed(model_dirs):
    local = engine(model_dirs["llama"])
    with pytest.raises(InvalidRequest, match=r"num_beams is 1; it must be from 2 to 64"):
        local.beam_search(PROMPTS, num_beams=1)
    with pytest.raises(InvalidRequest, match=r"length_penalty is NaN; it must be from -10 to 10"):
        local.beam_search(PROMPTS, length_penalty=float("nan"))

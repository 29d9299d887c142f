"""`LocalEngine` on a target with a recurrent state: whatever drafts, its answers are those of the unpatched model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.drafters.registry import DRAFTER_NAMES
from actors.errors import ModelError
from actors.models.quiet import quiet_transformers
from actors.models.random_model import random_model
from actors.models.tiny_config import config_of_type, tiny_config
from cluster.offline.engine import LocalEngine
from paceline_testing.tiny_models import (
    BYTE_VOCAB_SIZE,
    END_OF_TURN,
    PADDING,
    make_byte_tokenizer,
    save_eagle_head,
    save_tiny_model,
    tiny_eagle_tensors,
)

KIND = "qwen3_next"
NEW_TOKENS = 24
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash", "fir")] + [[65]]
DRAFTERS = tuple(name for name in DRAFTER_NAMES if name not in ("none", "auto"))  # MTP heads are in test_mtp.py


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp(KIND)
    config = tiny_config(config_of_type(KIND))
    config.vocab_size, config.eos_token_id, config.pad_token_id = BYTE_VOCAB_SIZE, END_OF_TURN, PADDING
    config.tie_word_embeddings = False
    with quiet_transformers():
        random_model(config).save_pretrained(directory)
        make_byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def local(target, tmp_path_factory):
    draft = save_tiny_model(tmp_path_factory.mktemp("draft"), "llama", 5, layers=1)
    config = AutoConfig.from_pretrained(target)
    head = save_eagle_head(tmp_path_factory.mktemp("head"), config, tiny_eagle_tensors(config, "eagle", 9))
    return LocalEngine(
        str(target),
        draft_model=str(draft),
        eagle_head=head,
        drafters=DRAFTERS,
        batch_size=8,
        device="cpu",
        kv_cache_tokens=1024,
        branch=3,
    )


def test_greedy_tokens_are_those_of_transformers(target, drafts_pay, local):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=PADDING
        )
        tokens = output[0, len(prompt) :].tolist()
        wanted.append(tokens[: tokens.index(END_OF_TURN)] if END_OF_TURN in tokens else tokens)
    predictions = [[token if at % 7 else token ^ 1 for at, token in enumerate(tokens)] for tokens in wanted]
    for _ in range(2):  # the second time the drafters have seen the answers
        generations = local.generate(PROMPTS, max_new_tokens=NEW_TOKENS, predictions=predictions)
        assert [generation.token_ids for generation in generations] == wanted
    assert sum(sum(generation.accepted_tokens.values()) for generation in generations) > 0


def test_sampled_tokens_are_those_without_drafts_and_alone(drafts_pay, local):
    options = {
        "max_new_tokens": NEW_TOKENS,
        "temperature": 0.9,
        "seed": 7,
        "ignore_eos": True,
        "frequency_penalty": 0.3,
    }
    plain = [
        local.generate([prompt], drafters=(), **options | {"seed": 7 + at})[0] for at, prompt in enumerate(PROMPTS)
    ]
    predictions = [generation.token_ids for generation in plain]
    drafted = local.generate(PROMPTS, predictions=predictions, **options)
    assert [generation.token_ids for generation in drafted] == predictions
    assert local.core.counters.drafted_tokens["eagle"] > 0
    assert sum(sum(generation.accepted_tokens.values()) for generation in drafted) > 0


def test_beam_search_runs_on_the_same_model(local, target):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    ids = torch.tensor([PROMPTS[0]])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, num_beams=2, do_sample=False, pad_token_id=PADDING
    )[0, ids.shape[1] :]
    beam = local.beam_search([PROMPTS[0]], max_new_tokens=8, num_beams=2)[0]
    assert beam.token_ids == [token for token in wanted.tolist() if token != END_OF_TURN]


def test_bitwise_exactness_is_refused(target):
    with pytest.raises(ModelError, match=f"{KIND} has a recurrent state; exact 'bitwise' needs a model without"):
        LocalEngine(str(target), exact="bitwise", drafters=("none",), device="cpu")

"""Models that attend in a method of their own have the logits of the unpatched model, far from the beginning, too."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from actors.engine.attention.own_attention import _with_positions, _with_rounded_biases
from actors.engine.batch import SequenceRows
from actors.engine.block_pool import BlockPool
from actors.engine.model_runner import ModelRunner
from actors.engine.sequence import Sequence
from actors.messages import SamplingParams, SequenceStart
from actors.models.random_model import random_model
from actors.models.tiny_config import VOCAB_SIZE, config_of_type, tiny_config

NONE = np.empty(0, np.int32)
DRAFT, PARENTS = np.array([5, 9, 6], np.int32), np.array([-1, -1, 0], np.int32)


@cache
def model_of(kind: str) -> PreTrainedModel:
    config = tiny_config(config_of_type(kind.split()[0]))
    if kind.startswith("falcon "):  # six heads: slopes are no powers of two
        config.alibi, config.num_attention_heads, config.num_kv_heads, config.hidden_size = True, 6, 6, 96
        config.multi_query, config.new_decoder_architecture = kind != "falcon alibi", False
    if kind == "mpt":
        config.max_seq_len = 1024
    return random_model(config)


def gap(kind: str, runner: ModelRunner, length: int, chunk: int) -> float:
    """The largest difference of logits of a draft tree behind a text that is computed in two parts."""
    text = np.random.default_rng(0).integers(3, VOCAB_SIZE, length).astype(np.int32)
    sequence = Sequence(1, SequenceStart(SamplingParams(1), length), BlockPool(256, 4))
    sequence.extend(text)
    assert sequence.reserve(length + len(DRAFT))
    runner.run([SequenceRows(sequence, chunk, NONE, NONE)], [1])
    sequence.computed(chunk, NONE, NONE)
    logits = runner.run([SequenceRows(sequence, length - chunk, DRAFT, PARENTS)], [1 + len(DRAFT)])
    expected = []
    for path in ([], [5], [9], [5, 6]):
        with torch.inference_mode():
            ids = torch.tensor([[*text.tolist(), *path]])
            expected.append(model_of(kind)(input_ids=ids, use_cache=False).logits[0, -1])
    return float((logits.cpu() - torch.stack(expected)).abs().max())


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon alibi", "falcon alibi, one key head"])
def test_positions_beyond_one_number_are_weighed(kind):
    runner = ModelRunner(copy.deepcopy(model_of(kind)), 1024)
    assert gap(kind, runner, 530, 500) < 2e-3  # their spread is 4


@pytest.mark.parametrize(
    "kind", ["bloom", "llama4_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("falcon", "gpt_neo"))]
)
def test_logits_are_right_by_the_tree_kernel(triton_device, kind):
    runner = ModelRunner(copy.deepcopy(model_of(kind)).to(triton_device), 1024, attention="triton_tree", is_eager=True)
    assert gap(kind, runner, 14, 9) < 2e-3


@pytest.mark.parametrize("kind", ["gptj", "bloom"])
def test_it_is_bitwise_the_same_in_any_chunks(kind):
    runner = ModelRunner(copy.deepcopy(model_of(kind)), 1024, "bitwise")
    text = np.arange(3, 33, dtype=np.int32)
    rows = []
    for chunk in (30, 7):
        sequence = Sequence(1, SequenceStart(SamplingParams(1), 30), BlockPool(64, 4))
        sequence.extend(text)
        assert sequence.reserve(30)
        while sequence.num_pending:
            count = min(chunk, sequence.num_pending)
            logits = runner.run([SequenceRows(sequence, count, NONE, NONE)], [1])
            sequence.computed(count, NONE, NONE)
        rows.append(logits)
    assert torch.equal(*rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_are_exact_in_half_precision(dtype):
    positions = torch.arange(0, 40_000, 7)[None]
    tokens = torch.zeros(1, 2, positions.shape[1], 8, dtype=dtype)
    query, key = _with_positions(tokens, tokens, positions, torch.tensor([0.5, 0.25]))
    scores = (query.double() * key.double()).sum(-1)
    assert torch.equal(scores, torch.stack([positions[0] * 0.5, positions[0] * 0.25])[None].double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_of_falcon_are_rounded_as_there_in_half_precision(dtype):
    positions = torch.arange(2048)[None]
    tokens = torch.zeros(1, 6, 2048, 8, dtype=dtype)
    query, key = _with_rounded_biases(tokens, tokens, positions)
    biases = build_alibi_tensor(torch.ones_like(positions), 6, torch.float32)[:, 0].double()
    assert torch.equal((query.double() * key.double()).sum(-1)[0], biases)

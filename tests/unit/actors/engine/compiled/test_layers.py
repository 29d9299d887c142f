"""Compiled models against themselves uncompiled; products that are shared; parts that cannot be compiled."""

from __future__ import annotations

import copy
import logging
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from actors.engine import model_runner
from actors.engine.attention.interface import ATTENTION_NAME
from actors.engine.batch import SequenceRows
from actors.engine.block_pool import BlockPool
from actors.engine.compiled.layers import compile_model, inductor
from actors.engine.compiled.merged_linears import LinearSlice, merge_linears, share_products
from actors.engine.decoder_layers import decoder_layers
from actors.engine.model_runner import ModelRunner
from actors.engine.sequence import Sequence
from actors.messages import SamplingParams, SequenceStart, no_tokens
from actors.models.random_model import random_model
from actors.models.tiny_config import config_of_type, tiny_config
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model

VOCAB, BLOCK = 61, 4
PRODUCTS_OF_A_LAYER = {"llama": 4, "qwen3": 4, "gemma3": 4}


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch):
    """Those of a GPU model: the CPU's own kernels cannot be traced."""
    monkeypatch.setattr(model_runner, "replace_linears", lambda model: False)
    monkeypatch.setattr(model_runner, "replace_norms", lambda model: None)


class Shared:
    """Compiles nothing; counts the products of each graph."""

    def __init__(self) -> None:
        self.products: list[int] = []

    def __call__(self, graph, inputs):
        share_products(graph.graph)
        graph.recompile()
        found = graph.graph.find_nodes(op="call_function", target=nn.functional.linear)
        self.products.append(len(list(found)))
        return aot_eager(graph, inputs)


def ready(kind: str):
    model = make_tiny_model(kind, seed=3, vocab_size=VOCAB, layers=3, sliding_window=6)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def logits_of(model) -> torch.Tensor:
    """Of a prompt and of decoding rows with drafts behind it, with 1, 3, 6 and 11 rows."""
    runner, pool = ModelRunner(model, 80 * BLOCK, is_eager=True), BlockPool(80, BLOCK)
    found = []
    for seq_id, tree in ((1, 0), (2, 2), (3, 5), (4, 10)):
        sequence = Sequence(seq_id, SequenceStart(SamplingParams(seed=0, temperature=0.0), 6), pool)
        sequence.extend(np.arange(seq_id, seq_id + 6, dtype=np.int32))
        sequence.reserve(20)
        runner.run([SequenceRows(sequence, 5, no_tokens(), no_tokens())], [1])
        sequence.computed(5, no_tokens(), no_tokens())
        tokens = np.arange(tree, dtype=np.int32)
        rows = SequenceRows(sequence, 1, tokens, (tokens - 1) // 2)
        found.append(runner.run([rows], [1 + tree]))
    return torch.cat(found)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "qwen3" else ()) for kind in TINY_KINDS]
)  # its parts are those of gemma3, too
def test_every_kind_of_model_is_traced_whole_and_computes_the_same(kind, caplog):
    model, backend = ready(kind), Shared()
    expected = logits_of(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        compile_model(model, backend)
        found = logits_of(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not caplog.records
    if kind in PRODUCTS_OF_A_LAYER:
        assert max(backend.products) == PRODUCTS_OF_A_LAYER[kind]
    # Few graphs: one row, more rows; Gemma has layers of two types.
    assert len(backend.products) <= 10


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++, which is not on the PATH")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # gemma3 has layers of two types, which are compiled separately
def test_what_torch_compiles_computes_the_same_but_for_rounding(kind, caplog):
    model = ready(kind)
    expected = logits_of(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        compile_model(model, inductor)
        found = logits_of(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not [record for record in caplog.records if record.name.startswith("actors")]


def test_merged_linears_share_their_memory_and_say_the_same():
    model = ready("llama")
    before = copy.deepcopy(model)
    merge_linears(model, decoder_layers(model))
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        assert {type(module) for module in group} == {LinearSlice}
        assert len({module.weight.untyped_storage().data_ptr() for module in group}) == 1
        assert sum(module.weight.nbytes for module in group) == group[0].weight.untyped_storage().nbytes()
    assert type(attention.o_proj) is type(mlp.down_proj) is nn.Linear
    torch.testing.assert_close(logits_of(model), logits_of(before), rtol=0, atol=0)


def test_linears_that_are_shared_or_watched_or_called_twice_stay():
    model = ready("llama")
    first, second = model.model.layers[:2]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    first.self_attn.k_proj.register_forward_hook(lambda *_: None)
    merge_linears(model, decoder_layers(model))
    kinds = Counter(type(module) for layer in (first, second) for module in (layer.mlp.gate_proj, layer.mlp.up_proj))
    assert kinds == {nn.Linear: 4}
    assert type(first.self_attn.k_proj) is nn.Linear
    assert type(first.self_attn.q_proj) is type(first.self_attn.v_proj) is LinearSlice


def test_a_part_that_cannot_be_traced_runs_as_it_was_and_one_line_says_so(caplog, monkeypatch):
    model = ready("llama")
    expected = logits_of(copy.deepcopy(model))
    norm = type(model.model.norm)
    plain = norm.forward

    def reads_the_host(self, hidden_states):
        if float(hidden_states.sum()) == 0.5:
            raise AssertionError
        return plain(self, hidden_states)

    monkeypatch.setattr(norm, "forward", reads_the_host)
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        compile_model(model, Shared())
        found = logits_of(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("actors")]
    assert len(lines) == 2  # the layer, which has such norms, and the last norm
    assert all("runs eagerly: it cannot be compiled" in line for line in lines)


def test_layers_that_pass_no_arguments_on_stay_as_they_are_and_one_line_says_so(caplog):
    model, backend = random_model(tiny_config(config_of_type("nemotron"))), Shared()
    expected = logits_of(model)  # hooks the plan through
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        compile_model(model, backend)
        found = logits_of(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("actors")]
    assert "is not compiled: NemotronDecoderLayer passes no arguments on" in line
    assert not backend.products


def test_a_model_that_is_compiled_already_stays_as_it_is(caplog):
    model, backend = ready("llama"), Shared()
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        compile_model(model, backend)
        forwards = [layer.forward for layer in decoder_layers(model)]
        compile_model(model, backend)
    assert [layer.forward for layer in decoder_layers(model)] == forwards
    assert not caplog.records

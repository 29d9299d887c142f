"""Layers of a rank are traced whole; operators of several ranks tell the shapes they give."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.engine import model_runner
from actors.engine.compiled.layers import compile_model
from actors.engine.compiled.merged_linears import LinearSlice
from actors.engine.model_runner import ModelRunner
from actors.engine.rank_group import leave_group
from actors.models.collectives import all_reduce, gather_columns
from actors.models.shards import EmbeddingShard, SummedRows

VOCAB = 197


@pytest.fixture
def lone_rank_of_two():
    """A process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    leave_group()


def test_layers_of_a_rank_are_traced_whole_with_merged_linears(lone_rank_of_two, monkeypatch, caplog):
    monkeypatch.setattr(model_runner, "replace_linears", lambda model: False)
    monkeypatch.setattr(model_runner, "replace_norms", lambda model: None)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        layer.self_attn.o_proj = SummedRows(layer.self_attn.o_proj, None, splits_input=False)
        layer.mlp.down_proj = SummedRows(layer.mlp.down_proj, None, splits_input=False)
    model.model.embed_tokens = EmbeddingShard(nn.Embedding(98, 32), VOCAB)
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return aot_eager(graph, inputs)

    with caplog.at_level(logging.WARNING), torch.inference_mode():
        ModelRunner(model, 16)
        compile_model(model, backend)
        ModelRunner(model, 16)  # which runs it once
    torch._dynamo.reset()  # what was found to vary here would vary in other tests' graphs
    assert not caplog.records
    sums = [targets.count(torch.ops.paceline.all_reduce) for targets in graphs]
    assert sorted(sums)[-2:] == [1, 2]  # the embeddings, and one graph for both layers
    assert len([module for module in model.modules() if isinstance(module, LinearSlice)]) == 2 * 5


def test_operators_tell_the_compiler_the_shapes_they_give(lone_rank_of_two):
    part = torch.randn(1, 3, 5).transpose(1, 2)
    for found, fake in (
        (all_reduce(part), torch.ops.paceline.all_reduce(part.to("meta"))),
        (gather_columns(part, 5), torch.ops.paceline.gather_columns(part.to("meta"), 5)),
    ):
        assert (found.shape, found.stride(), found.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_sums_through_symmetric_memory_are_asked_of_torch_in_its_own_terms():
    for operator, schema in (
        (
            "one_shot_all_reduce_copy",
            "(Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name) -> Tensor",
        ),
        ("multimem_all_reduce_", "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)"),
    ):
        assert str(getattr(torch.ops.symm_mem, operator).default._schema) == f"symm_mem::{operator}{schema}"

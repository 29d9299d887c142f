"""RMS norms in one pass against those of `transformers`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from actors.engine.cpu_kernels.rms_norm import RmsNorm, replace_norms
from actors.engine.cpu_kernels.threads import has_openmp

pytestmark = pytest.mark.skipif(not has_openmp(), reason="torch has no OpenMP runtime that exports GOMP_parallel here")


def llama_norm(width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(width, generator=torch.Generator().manual_seed(width)).to(dtype)
    return norm.requires_grad_(False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.integers(0, 9), width=st.sampled_from([1, 7, 64, 576]), magnitude=st.sampled_from([0.0, 1e-4, 1.0, 1e4]))
def test_outputs_are_those_of_the_model_to_within_rounding(rows, width, magnitude):
    norm = llama_norm(width)
    inputs = magnitude * torch.randn(1, rows, width, generator=torch.Generator().manual_seed(rows))
    assert torch.allclose(RmsNorm(norm.weight, 1e-5)(inputs), norm(inputs), rtol=1e-6, atol=0.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.integers(1, 9), width=st.sampled_from([1, 7, 64, 576]), magnitude=st.sampled_from([1e-4, 1.0, 1e4]))
def test_in_bfloat16_outputs_are_those_of_the_model_but_for_the_last_bit_of_a_few(rows, width, magnitude):
    norm = llama_norm(width, torch.bfloat16)
    inputs = magnitude * torch.randn(1, rows, width, generator=torch.Generator().manual_seed(rows))
    found, expected = RmsNorm(norm.weight, 1e-5)(inputs.bfloat16()), norm(inputs.bfloat16())
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), rtol=2.0**-7, atol=0.0)
    assert (found != expected).sum() <= 1 + found.numel() // 1000


def test_the_bits_of_a_row_depend_neither_on_other_rows_nor_on_threads():
    norm, inputs = RmsNorm(llama_norm(200).weight, 1e-5), torch.randn(7, 200)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = norm(inputs)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(norm(inputs[row : row + 1])[0], together[row]) for row in range(7))


def test_only_norms_that_give_the_same_are_replaced():
    class OtherRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1e-4

    hooked = llama_norm(32)
    hooked.register_forward_hook(lambda *_: None)
    gemma = Gemma3RMSNorm(32)
    gemma.weight.data.fill_(0.5)
    norms = {
        "llama": llama_norm(32),
        "narrow": llama_norm(32, torch.bfloat16),
        "gemma": gemma.requires_grad_(False),
        "float16": llama_norm(32, torch.float16),
        "other": OtherRMSNorm(32).requires_grad_(False),
        "other narrow": OtherRMSNorm(576).bfloat16().requires_grad_(False),
        "hooked": hooked,
        "meta": llama_norm(32).to("meta"),
    }
    model = nn.ModuleDict(norms)
    replace_norms(model)
    assert {name for name, module in model.items() if type(module) is RmsNorm} == {"llama", "narrow"}
    assert all(model[name] is module for name, module in norms.items() if name not in ("llama", "narrow"))

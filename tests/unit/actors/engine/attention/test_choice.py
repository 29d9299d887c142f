"""Which attention a device gets."""

from __future__ import annotations

import sys

import pytest
import torch

from actors.engine.attention.choice import choose_attention

CUDA = torch.device("cuda")


def test_a_cpu_attends_padded():
    assert choose_attention(torch.device("cpu")) == "padded"


@pytest.mark.parametrize(
    ("capability", "attention"), [((7, 5), "padded"), ((8, 0), "triton_tree"), ((9, 0), "triton_tree")]
)
def test_a_gpu_attends_by_triton_from_ampere_on(monkeypatch, capability, attention):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_attention(CUDA) == attention


def test_a_gpu_without_triton_attends_padded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_attention(CUDA) == "padded"

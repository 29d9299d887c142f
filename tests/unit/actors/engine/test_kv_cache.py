"""The cache's moves, against copies that are made one after the other."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine import model_runner
from actors.engine.kv_cache import KvCache, LayerShape, check_device
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from paceline_testing.tiny_models import make_tiny_model

SLOTS = 24
MOVES = st.lists(
    st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)), max_size=5, unique_by=lambda pair: pair[1]
    ),
    max_size=8,
)


def filled() -> KvCache:
    """Two layers of a kind, and one whose keys are of the others' values' kind."""
    shapes = [LayerShape(1, 2, 3, torch.float32)] * 2 + [LayerShape(1, 3, 3, torch.float32)]
    cache = KvCache(SLOTS, torch.device("cpu"), shapes)
    for layer in range(3):
        key, value = cache.layer(layer)
        assert (key.shape[1:], value.shape[1:]) == ((1, shapes[layer].key_dim), (1, shapes[layer].value_dim))
        key.copy_(torch.randn(key.shape))
        value.copy_(torch.randn(value.shape))
    return cache


@given(MOVES)
def test_moves_are_done_as_if_each_were_done_when_it_was_asked_for(moves):
    cache = filled()
    layers = [cache.layer(layer) for layer in range(3)]
    wanted = [tensor.clone() for pair in layers for tensor in pair]
    for move in moves:
        source, destination = (list(slots) for slots in (zip(*move, strict=True) if move else ((), ())))
        for tensor in wanted:
            tensor[destination] = tensor[source].clone()
        cache.move(np.array([source, destination], np.int64))
    cache.settle()
    cache.settle()
    for tensor, same in zip([tensor for pair in layers for tensor in pair], wanted, strict=True):
        assert torch.equal(tensor, same)


def test_moves_for_whose_copies_there_is_no_memory_wait_and_have_changed_nothing(monkeypatch):
    cache = filled()
    layers = [tensor for layer in range(3) for tensor in cache.layer(layer)]
    before = [tensor.clone() for tensor in layers]
    moves = np.array([[5, 9], [3, 5]], np.int64)  # one is read where the other is written
    cache.move(moves)
    index_select, calls = torch.Tensor.index_select, []

    def without_memory(*given):
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("injected")
        return index_select(*given)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.settle()
    assert all(torch.equal(tensor, was) for tensor, was in zip(layers, before, strict=True))
    assert cache.waiting_moves.tolist() == moves.tolist()
    cache.settle()
    assert all(torch.equal(tensor[[3, 5]], was[[5, 9]]) for tensor, was in zip(layers, before, strict=True))
    assert not cache.waiting_moves.size


def test_blocks_are_gathered_in_order():
    cache = filled()
    for layer, blocks in ((0, [3, 1]), (2, [5, 5, 0, 2, 4]), (0, [2])):
        slots = [block * 4 + offset for block in blocks for offset in range(4)]
        gathered = cache.gather(layer, torch.tensor(blocks, dtype=torch.int32), 4)
        for found, tensor in zip(gathered, cache.layer(layer), strict=True):
            assert torch.equal(found, tensor[slots])


def test_an_engine_whose_device_has_failed_for_good_says_so_when_it_is_cleared(monkeypatch):
    asked = []

    def synchronize(device):
        asked.append(device)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    check_device(torch.device("cpu"))
    assert not asked
    engine = TargetEngine(make_tiny_model("llama"), EngineOptions(8, 4))
    engine.clear()
    engine._runner.device = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.clear()
    assert asked == [torch.device("cuda", 0)]


@pytest.mark.parametrize(("device", "stays"), [("cuda", False), ("cpu", True)])
def test_attention_of_cudnn_is_switched_off_on_cuda(monkeypatch, device, stays):
    class Enough(Exception):
        pass

    def check_layers(*_):
        raise Enough

    config = SimpleNamespace(get_text_config=lambda: None)
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(device))]), config=config)
    monkeypatch.setattr(model_runner, "check_layers", check_layers)
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with pytest.raises(Enough):
            model_runner.ModelRunner(model, 8, attention="padded")
        assert torch.backends.cuda.cudnn_sdp_enabled() is stays
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)

"""The cache's moves, against copies that are made one after the other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.kv_cache import KvCache, LayerShape

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
        cache.move(dict(zip(destination, source, strict=True)))
    cache.settle()
    cache.settle()
    for tensor, same in zip([tensor for pair in layers for tensor in pair], wanted, strict=True):
        assert torch.equal(tensor, same)

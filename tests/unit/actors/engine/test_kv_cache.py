"""The cache's moves, against copies that are made one after the other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.kv_cache import KvCache

SLOTS = 24
MOVES = st.lists(
    st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)), max_size=5, unique_by=lambda pair: pair[1]
    ),
    max_size=8,
)


def filled() -> KvCache:
    cache = KvCache(SLOTS, torch.device("cpu"))
    for layer in range(2):
        key, value = cache.layer(layer, torch.zeros(1, 1, 2), torch.zeros(1, 1, 3))
        key.copy_(torch.randn(key.shape))
        value.copy_(torch.randn(value.shape))
    return cache


@given(MOVES)
def test_moves_are_done_as_if_each_were_done_when_it_was_asked_for(moves):
    cache = filled()
    layers = [cache.layer(layer, torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)) for layer in range(2)]
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

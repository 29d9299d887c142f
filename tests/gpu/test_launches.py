"""What a round asks of a device stays within what it asks today; see `launches`."""

import numpy as np
import torch

from tests.gpu.launches import LAYERS, counted, engine_of, round_of


def cost(sequences: int, *, sampled: bool = False, nodes: int = 7):
    few, many = (round_of("8B", layers, sequences=sequences, nodes=nodes, sampled=sampled).counts for layers in LAYERS)
    a_layer = (many["kernels"] - few["kernels"]) / (LAYERS[1] - LAYERS[0])
    return a_layer, few["kernels"] - LAYERS[0] * a_layer, few


def test_kernels_of_a_layer():
    assert cost(1)[0] <= 42


def test_a_round_asks_for_the_same_whatever_the_number_of_sequences():
    few, many = cost(8, sampled=True), cost(32, sampled=True)
    assert few == many
    assert few[0] <= 46


def test_a_copy_and_a_kernel_more_are_seen():
    engine = engine_of("8B", 2, 8)
    with counted() as mode, torch.inference_mode():
        hidden = torch.from_numpy(np.zeros(4, np.float32)).to(engine.model.device)
        (hidden + 1).cpu()
        float(hidden.sum())
    assert mode.counts == {"copies up": 1, "kernels": 2, "copies back": 1, "waits": 1}

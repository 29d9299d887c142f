"""What a round asks of a device stays within what it asks today; see `launches`."""

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from actors.engine.rank_group import leave_group
from tests.gpu.launches import LAYERS, counted, engine_of, round_of

ONE_COPY_EACH_WAY = {"copies up": 1, "copies back": 1, "waits": 0}


def cost(sequences: int, *, shape: str = "8B", sampled: bool = False, nodes: int = 7, **case):
    few, many = (
        round_of(shape, layers, sequences=sequences, nodes=nodes, sampled=sampled, **case).counts for layers in LAYERS
    )
    a_layer = (many["kernels"] - few["kernels"]) / (LAYERS[1] - LAYERS[0])
    return a_layer, few["kernels"] - LAYERS[0] * a_layer, few


def test_kernels_of_a_layer():
    assert cost(1)[0] <= 42


def test_a_round_asks_for_the_same_whatever_the_number_of_sequences():
    few, many = cost(8, sampled=True), cost(32, sampled=True)
    assert few == many
    assert few[0] <= 46
    assert few[1] <= 28


@pytest.mark.parametrize(("context", "launches"), [(64, 1), (2048, 2)])
def test_attention_of_a_layer_is_one_launch_and_one_more_for_splits_whatever_the_number_of_sequences(context, launches):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    for sequences in (1, 8):
        case = {"sequences": sequences, "nodes": 7, "sampled": False, "context": context, "attention": "triton_tree"}
        few, many = (round_of("8B", layers, **case) for layers in LAYERS)
        kernels = many.kernels - few.kernels
        added = LAYERS[1] - LAYERS[0]
        assert kernels["tree_attend"] + kernels["tree_combine"] == launches * added
        assert kernels["index_copy_"] == kernels["scaled_dot_product_attention"] == 0
        assert kernels.total() <= (37 + launches) * added
        assert {name: many.counts[name] for name in ("copies up", "copies back", "waits")} == ONE_COPY_EACH_WAY


def test_a_copy_and_a_kernel_more_are_seen():
    engine = engine_of("8B", 2, 8)
    with counted() as mode, torch.inference_mode():
        hidden = torch.from_numpy(np.zeros(4, np.float32)).to(engine.model.device)
        (hidden + 1).cpu()
        float(hidden.sum())
    assert mode.counts == {"copies up": 1, "kernels": 2, "copies back": 1, "waits": 1}


def test_outside_the_layers_a_round_costs_the_same_whatever_it_holds():
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    case = {"context": 2048, "attention": "triton_tree"}
    for sampled, kernels in ((False, 24), (True, 27)):
        for sequences, nodes in ((1, 7), (8, 31), (32, 7)):
            _, outside, few = cost(sequences, sampled=sampled, nodes=nodes, **case)
            assert outside <= kernels
            assert {name: few[name] for name in ONE_COPY_EACH_WAY} == ONE_COPY_EACH_WAY


@pytest.mark.parametrize("sampled", [False, True])
def test_compiled_layers_are_twelve_launches_and_the_rest_of_a_round_is_as_many(sampled):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    case = {"sampled": sampled, "context": 2048, "attention": "triton_tree", "compiled": True}
    a_layer, outside, few = cost(8, **case)
    assert a_layer <= 12
    assert outside <= 12
    assert {name: few[name] for name in ONE_COPY_EACH_WAY} == ONE_COPY_EACH_WAY
    assert cost(1, nodes=31, **case)[:2] == (a_layer, outside)


@pytest.fixture
def no_group_stays():
    yield
    leave_group()


@pytest.mark.usefixtures("no_group_stays")
@pytest.mark.parametrize("sampled", [False, True])
def test_a_compiled_layer_of_a_rank_is_fourteen_launches_of_which_two_add_up_over_the_ranks(sampled):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    case = {"shape": "70B/8", "sampled": sampled, "context": 2048, "attention": "triton_tree", "compiled": True}
    a_layer, outside, few = cost(8, **case)
    assert a_layer <= 14
    assert outside <= 16
    assert {name: few[name] for name in ONE_COPY_EACH_WAY} == ONE_COPY_EACH_WAY


def test_a_kernel_more_in_a_compiled_layer_is_seen(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    case = {"sequences": 1, "nodes": 0, "sampled": False, "attention": "triton_tree", "compiled": True}
    usual = round_of("8B", 2, **case).counts["kernels"]
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x.sort(dim=-1).values))
    assert round_of("8B", 2, **case).counts["kernels"] >= usual + 2

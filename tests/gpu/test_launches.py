"""What a round asks of a device stays within its limits; see `launches`.

Rounds accept nodes, which are moved in the cache, and are asked for successors, as by `auto`.
"""

import json
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from actors.eagle.head_outputs import HeadOutputs
from actors.engine.attention.prompt_chunks import CHUNK_ROWS
from actors.engine.device_rounds import DeviceRounds
from actors.engine.host_copy import HostCopy
from actors.engine.model_runner import ModelRunner
from actors.engine.rank_group import leave_group
from tests.gpu import launches
from tests.gpu.launches import (
    CASES,
    LAYERS,
    SHAPES,
    counted,
    engine_of,
    head_round_of,
    prompt_round_of,
    round_of,
    row_of,
)

ONE_COPY_EACH_WAY = {"copies up": 1, "copies back": 1, "waits": 0, "copies a layer": 0}
MOST_OUTSIDE = 20
MOST_IN_A_COMPILED_LAYER = {"8B": 12, "70B/8": 14}  # two of a rank add up over the ranks
ON_DEVICE = {"context": 2048, "attention": "triton_tree"}

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed; its wheels are for Linux"
)


@pytest.fixture(scope="module", autouse=True)
def no_group_stays():
    yield
    engine_of.cache_clear()
    leave_group()


@lru_cache
def usual_row(shape: str, sequences: int, sampled: bool, nodes: int, compiled: bool) -> dict:
    """Of an engine as it is, on a device."""
    return row_of(shape, sequences, sampled, nodes, compiled=compiled, **ON_DEVICE)


def check(row: dict) -> None:
    """Raises AssertionError where a limit is exceeded."""
    most = MOST_IN_A_COMPILED_LAYER[row["shape"]] if row["compiled"] else row["unpatched"] + 4
    assert row["kernels a layer"] <= most
    assert row["kernels outside"] <= MOST_OUTSIDE
    assert {name: row[name] for name in ONE_COPY_EACH_WAY} == ONE_COPY_EACH_WAY


SIZES = (1, False, 7), (32, False, 31), (32, True, 31)


def of_layers(compiled: bool) -> list:
    """All cases. Rounds ask for the same whatever they hold, so that some of a shape stand for the others. Compiled
    ones are slow: each takes ten seconds."""
    quick = set() if compiled else {(shape, *size) for shape in SHAPES for size in SIZES}
    return [pytest.param(*case, compiled, marks=[] if case in quick else pytest.mark.slow) for case in CASES]


@needs_triton
@pytest.mark.parametrize(
    ("shape", "sequences", "sampled", "nodes", "compiled"), [*of_layers(compiled=False), *of_layers(compiled=True)]
)
def test_launches_and_copies_of_a_round_are_within_their_limits(shape, sequences, sampled, nodes, compiled):
    row = usual_row(shape, sequences, sampled, nodes, compiled)
    check(row | {"compiled": compiled})
    assert row["kernels a layer"] >= 10


@needs_triton
def test_through_a_pinned_buffer_results_come_back_in_one_copy(monkeypatch):
    plain, waits = HostCopy.__init__, []
    monkeypatch.setattr(HostCopy, "__init__", lambda self, device: plain(self, device, lambda: waits.append(device)))
    engine_of.cache_clear()
    row = row_of("8B", 8, True, 7, **ON_DEVICE)
    engine_of.cache_clear()
    check(row | {"compiled": False})
    assert waits


@needs_triton
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_round_asks_for_the_same_whatever_it_holds(shape, sampled, compiled):
    few, many = (usual_row(shape, *size, compiled) for size in ((1, sampled, 7), (32, sampled, 31)))
    assert few | {"sequences": 32, "nodes": 31} == many


@needs_triton
@pytest.mark.parametrize(("context", "number"), [(64, 1), (2048, 2)])
def test_attention_of_a_layer_is_one_launch_and_one_more_for_splits(context, number):
    for sequences in (1, 8):
        case = {"sequences": sequences, "nodes": 7, "sampled": False, "context": context, "attention": "triton_tree"}
        few, many = (round_of("8B", layers, **case) for layers in LAYERS)
        kernels = many.kernels - few.kernels
        added = LAYERS[1] - LAYERS[0]
        assert kernels["tree_attend"] + kernels["tree_combine"] == number * added
        assert kernels["index_copy_"] == kernels["scaled_dot_product_attention"] == 0


@needs_triton
def test_accepted_nodes_are_moved_in_two_launches_for_all_layers_and_sequences():
    case = {"sequences": 8, "nodes": 7, "sampled": False, **ON_DEVICE}
    moving, still = (round_of("8B", 2, accepts=accepts, **case).kernels for accepts in (True, False))
    assert moving - still == {"index_select": 1, "index_copy_": 1}


@needs_triton
@pytest.mark.parametrize(("shape", "number"), [("8B", 2), ("70B/8", 4)])
def test_successors_are_two_launches_and_two_more_of_ranks(shape, number):
    case = {"sequences": 8, "nodes": 7, "sampled": False, **ON_DEVICE}
    asked, not_asked = (round_of(shape, 2, successors=count, **case).kernels for count in (8, 0))
    assert (asked - not_asked).total() == number
    assert asked["gather_columns"] == 0, "whole rows of logits"


@needs_triton
def test_sampled_rounds_of_ranks_gather_no_logits():
    case = {"sequences": 8, "nodes": 7, **ON_DEVICE}
    sampled, greedy = (round_of("70B/8", 2, sampled=sampled, **case).kernels for sampled in (True, False))
    assert sampled["gather_columns"] == greedy["gather_columns"] == 0
    assert (sampled["gather_ranks"], greedy["gather_ranks"]) == (3, 2)  # one of them for the successors


def test_on_the_host_a_layer_costs_as_many_kernels_whatever_the_number_of_sequences():
    few, many = (row_of("8B", sequences, True, 7) for sequences in (2, 8))
    # One more than on a device: what is not finite is replaced by operators of its own.
    assert few["kernels a layer"] == many["kernels a layer"] <= few["unpatched"] + 5


def test_a_copy_and_a_kernel_more_are_seen():
    engine = engine_of("8B", 2)
    with counted() as mode, torch.inference_mode():
        hidden = torch.from_numpy(np.zeros(4, np.float32)).to(engine.model.device)
        (hidden + 1).cpu()
        float(hidden.sum())
    assert mode.counts == {"copies up": 1, "kernels": 2, "copies back": 1, "waits": 1}


def to_device(hidden):
    return torch.zeros(1).to(hidden.device)


def to_host(hidden):
    return hidden.flatten()[:1].cpu()


def wait(hidden):
    return hidden.flatten()[0].item()


def kernel(hidden):
    return hidden + 1


@needs_triton
@pytest.mark.parametrize("plant", [to_device, to_host, wait], ids=lambda plant: plant.__name__)
def test_a_copy_or_wait_more_in_a_round_exceeds_a_limit(monkeypatch, plant):
    plain = DeviceRounds._launch

    def planted(self, inputs, shape):
        plant(inputs.token_ids)
        return plain(self, inputs, shape)

    monkeypatch.setattr(DeviceRounds, "_launch", planted)
    row = row_of("8B", 1, False, 7, **ON_DEVICE)
    with pytest.raises(AssertionError):
        check(row | {"compiled": False})


@needs_triton
@pytest.mark.parametrize(
    ("shape", "prompts", "chunk", "compiled"),
    [
        ("8B", 1, CHUNK_ROWS, False),
        ("8B", 1, 4096, False),
        ("8B", 4, 512, False),
        pytest.param("8B", 2, 512, True, marks=pytest.mark.slow),
        ("70B/8", 2, 512, False),
    ],
)
def test_prompt_chunks_take_no_copy_and_no_wait_more_and_five_launches_a_layer(shape, prompts, chunk, compiled):
    """Query, keys and values of the chunks are gathered, attention, and its result is put back."""
    few, many = (prompt_round_of(shape, n, prompts=prompts, chunk=chunk, compiled=compiled) for n in LAYERS)
    added = LAYERS[1] - LAYERS[0]
    assert many.counts - few.counts == {"kernels": many.kernels.total() - few.kernels.total()}
    assert few.counts["copies up"] == few.counts["copies back"] == 1
    assert few.counts["waits"] == 0
    kernels = many.kernels - few.kernels
    assert kernels["_varlen_attn"] == kernels["index_copy_"] == kernels["tree_attend"] == added
    assert kernels["index_select"] == 3 * added
    assert kernels["scaled_dot_product_attention"] == 0


@needs_triton
def test_few_prompt_rows_are_no_chunk():
    assert prompt_round_of("8B", 2, prompts=2, chunk=CHUNK_ROWS - 1).kernels["_varlen_attn"] == 0


@needs_triton
@pytest.mark.parametrize("plant", [to_device, to_host, wait], ids=lambda plant: plant.__name__)
def test_a_copy_or_wait_more_with_chunks_is_seen(monkeypatch, plant):
    from actors.engine.attention.varlen import VarlenPlan

    plain = VarlenPlan.attend

    def planted(self, layer, query, *rest):
        plant(query)
        return plain(self, layer, query, *rest)

    monkeypatch.setattr(VarlenPlan, "attend", planted)
    counts = prompt_round_of("8B", 2, prompts=1, chunk=CHUNK_ROWS).counts
    assert sum(counts[name] for name in ("copies up", "copies back", "waits")) == 2 + 2


def head_levels(shape: str, sequences: int) -> dict:
    """Kernels a level of a head's trees, and copies and waits of all its drafts."""
    few, many = (head_round_of(shape, sequences=sequences, depth=depth).counts for depth in (3, 7))
    others = [{name: count for name, count in counts.items() if name != "kernels"} for counts in (few, many)]
    assert others[0] == others[1]
    return {"kernels a level": (many["kernels"] - few["kernels"]) / 4} | others[0]


@needs_triton
@pytest.mark.parametrize(
    ("sequences", "shape", "kernels"),
    [
        (1, "8B", 65),
        pytest.param(1, "70B/8", 80, marks=pytest.mark.slow),
        pytest.param(8, "8B", 65, marks=pytest.mark.slow),
        (8, "70B/8", 80),
    ],
)
def test_drafts_of_a_head_are_one_copy_each_way_and_as_many_launches_a_level(shape, kernels, sequences):
    """Those of a rank also exchange embeddings and the likeliest tokens."""
    levels = head_levels(shape, sequences)
    assert levels.pop("kernels a level") <= kernels
    assert levels == {"copies up": 1, "copies back": 1}


@needs_triton
@pytest.mark.parametrize("plant", [to_device, to_host, wait], ids=lambda plant: plant.__name__)
def test_a_copy_or_wait_more_in_a_level_is_seen(monkeypatch, plant):
    plain = HeadOutputs.likeliest

    def planted(self, hidden, k):
        plant(hidden)
        return plain(self, hidden, k)

    monkeypatch.setattr(HeadOutputs, "likeliest", planted)
    counts = head_round_of("8B", sequences=1, depth=3).counts
    assert sum(counts[name] for name in ("copies up", "copies back", "waits")) == 2 + 4


@needs_triton
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_kernels_more_in_a_round_exceed_the_limit(monkeypatch, compiled):
    usual = usual_row("70B/8", 1, True, 7, compiled)
    plain = DeviceRounds._launch

    def planted(self, inputs, shape):
        for _ in range(MOST_OUTSIDE + 1 - int(usual["kernels outside"])):
            kernel(inputs.token_ids)
        return plain(self, inputs, shape)

    monkeypatch.setattr(DeviceRounds, "_launch", planted)
    row = row_of("70B/8", 1, True, 7, compiled=compiled, **ON_DEVICE)
    with pytest.raises(AssertionError):
        check(row | {"compiled": compiled})
    assert row["kernels a layer"] == usual["kernels a layer"]


@needs_triton
def test_a_copy_for_each_layer_is_seen(monkeypatch):
    plain = ModelRunner._run

    def planted(self, *arguments):
        for _ in self.model.model.layers:
            to_device(arguments[0])
        return plain(self, *arguments)

    monkeypatch.setattr(ModelRunner, "_run", planted)
    row = row_of("8B", 1, False, 7, **ON_DEVICE)
    assert row["copies a layer"] == 1


@needs_triton
@pytest.mark.slow  # compiles a layer
def test_a_kernel_more_in_a_compiled_layer_exceeds_the_limit(monkeypatch):
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x.sort(dim=-1).values))
    engine_of.cache_clear()
    row = row_of("8B", 1, False, 7, compiled=True, **ON_DEVICE)
    engine_of.cache_clear()
    with pytest.raises(AssertionError):
        check(row | {"compiled": True})


@needs_triton
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_the_command_prints_the_table_as_json(capsys, monkeypatch, compiled):
    assert len(CASES) == 24
    monkeypatch.setattr(launches, "CASES", CASES[::13])  # all are checked above
    launches.main(["--json", "--attention", "triton_tree", "--context", "2048", *["--compiled"] * compiled])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["shape"], row["sequences"], row["sampled"], row["nodes"]) for row in rows] == CASES[::13]
    for row in rows:
        check(row | {"compiled": compiled})

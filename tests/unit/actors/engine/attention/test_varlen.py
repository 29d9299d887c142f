"""Prompt chunks attend as padded attention does.

torch's kernel for them runs on GPUs alone. Elsewhere what it documents stands in for it, and the function itself is
called on `meta` tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from actors.engine import model_runner
from actors.engine.attention import prompt_chunks
from actors.engine.attention.choice import has_varlen_kernel
from actors.engine.attention.interface import AttentionPlan, Scoring
from actors.engine.attention.prompt_chunks import PackedChunks, pack_chunks
from actors.engine.batch import PackedBatch
from actors.engine.device_inputs import Shape
from actors.engine.kv_cache import KvCache
from actors.engine.model_runner import ModelRunner
from actors.engine.recorded_launches import RecordedLaunches
from paceline_testing.attention_cases import Case
from paceline_testing.forests import Forest, forest_of
from paceline_testing.random_forests import forests
from paceline_testing.tiny_models import make_tiny_model
from paceline_testing.varlen_contract import varlen_attn
from tests.unit.actors.engine.attention.test_triton_tree import BRANCHED, greedy_rounds, tiny_llama

PLAIN = Scoring(0.3, None, None)
HALF = {"heads": (2, 1), "dims": (8, 8), "dtype": torch.float16}
# Known tokens, how many of them are computed, draft tree, its first node to compute
CHUNK, CHUNK_WITH_CONTEXT, TREE, LAST_TOKEN = (9, 0, [], 0), (21, 9, [], 0), (14, 13, BRANCHED, 0), (7, 6, [], 0)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Few rows make a chunk, because the interpreter is slow."""
    monkeypatch.setattr(prompt_chunks, "CHUNK_ROWS", 8)


@pytest.fixture
def calls(monkeypatch, triton_device) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of torch's kernel. What stands in for it checks them all, and attends where the kernel cannot: without a
    GPU, and in float32."""
    from actors.engine.attention import varlen

    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    kernel = varlen.varlen_attn

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(((query, *args), kwargs))
        attended = varlen_attn(query, *args, **kwargs)
        has_kernel = has_varlen_kernel(query.device) and query.dtype != torch.float32
        return kernel(query, *args, **kwargs) if has_kernel else attended

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    return made


def plan_of(case: Case) -> Callable[[KvCache], AttentionPlan]:
    from actors.engine.attention.varlen import VarlenPlan

    inputs = case.inputs()
    assert inputs.chunks is not None
    return lambda kv: VarlenPlan(inputs.rows, kv, inputs.block_size, inputs.max_context, inputs.chunks)


def with_chunk(forest: Forest) -> bool:
    return pack_chunks(forest.batch) is not None


@settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    forest=forests(max_known=40).filter(with_chunk),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2)]),
    dims=st.sampled_from([8, 24]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    window=st.sampled_from([None, 1, 2, 9, 30]),
)
def test_any_batch_with_chunks_attends_as_padded_attention_does(
    triton_device, calls, forest, heads, dims, dtype, window
):
    calls.clear()
    case = Case(forest, Scoring(dims**-0.5, window, None), triton_device, heads, (dims, dims), dtype)
    case.check(plan_of(case))
    assert len(calls) == 1


@pytest.mark.parametrize("window", [None, 5])
def test_chunks_trees_and_single_rows_share_a_round(triton_device, calls, window):
    forest = forest_of([TREE, CHUNK, LAST_TOKEN, CHUNK_WITH_CONTEXT], block_size=4)
    case = Case(forest, Scoring(0.3, window, None), triton_device, **HALF)
    case.check(plan_of(case))
    (query, keys, values, row_starts, key_starts, *most), how = calls[0]
    assert query.shape == (21, 2, 8)
    assert keys.shape == values.shape == (30, 1, 8)
    assert row_starts.tolist() == [0, 9, 21]
    assert key_starts.tolist() == [0, 9, 30]
    assert most == [12, 21]
    assert how == {"scale": 0.3, "window_size": (4 if window else -1, 0), "enable_gqa": True}


def test_contexts_that_end_at_borders_of_blocks(triton_device, calls):
    forest = forest_of([(known, known - 10, [], 0) for known in (15, 16, 17, 31, 32, 33)], block_size=16)
    case = Case(forest, PLAIN, triton_device, **HALF)
    case.check(plan_of(case))
    assert calls[0][0][4].diff().tolist() == [15, 16, 17, 31, 32, 33]


def test_decoding_beside_chunks_is_split_by_the_contexts_that_decode_alone(triton_device, calls, monkeypatch):
    """A chunk in a long context makes no more splits for the others; a long context that decodes does for itself."""
    contexts = []
    combine = torch.ops.paceline.tree_combine

    def tree_combine(parts, *rest):
        contexts.append(len(parts) * rest[-2])  # splits, and keys of each
        return combine(parts, *rest)

    monkeypatch.setattr(torch.ops.paceline, "tree_combine", tree_combine)
    for known in (30, 1100):
        case = Case(forest_of([(known, known - 1, BRANCHED, 0), (1200, 1190, [], 0)]), PLAIN, triton_device, **HALF)
        case.check(plan_of(case))
    assert contexts == [1024, 4096]


@pytest.mark.parametrize(
    ("scoring", "how"),
    [
        (Scoring(0.3, None, 2.0), {}),
        (Scoring(0.3, 5, None, torch.linspace(-2.0, 3.0, 2)), {}),
        (Scoring(0.3, -7, None), {}),
        (PLAIN, {"dtype": torch.float32}),
        (PLAIN, {"dims": (12, 12)}),
        (PLAIN, {"dims": (16, 8)}),
        (PLAIN, {"dims": (16, 8), "shares_values": True}),
        (PLAIN, {"dims": (264, 264)}),
    ],
    ids=["soft cap", "sinks", "chunks of positions", "float32", "head of 12", "other values", "latents", "head of 264"],
)
def test_what_the_kernel_does_not_compute_is_left_to_the_tree_kernel(triton_device, calls, scoring, how):
    if scoring.sinks is not None:
        scoring = replace(scoring, sinks=scoring.sinks.to(triton_device))
    case = Case(forest_of([TREE, CHUNK_WITH_CONTEXT]), scoring, triton_device, **(HALF | how))
    case.check(plan_of(case))
    assert not calls


def test_no_more_is_gathered_than_the_limit(triton_device, calls, monkeypatch):
    from actors.engine.attention import varlen

    case = Case(forest_of([TREE, CHUNK, CHUNK_WITH_CONTEXT]), PLAIN, triton_device, **HALF)
    num_bytes = (9 + 21) * 2 * 8 * 2
    for most, number in ((num_bytes - 1, 0), (num_bytes, 1)):
        monkeypatch.setattr(varlen, "_MOST_GATHERED_BYTES", most)
        case.check(plan_of(case))
        assert len(calls) == number


def numbers(chunks: PackedChunks | None) -> tuple[int, ...] | None:
    return None if chunks is None else chunks[1:]


def test_a_chunk_has_many_rows_and_no_tree_that_branches():
    chain = list(range(-1, 11))
    assert numbers(pack_chunks(forest_of([TREE, (30, 29, [], 0)]).batch)) is None
    assert numbers(pack_chunks(forest_of([(16, 9, [], 0), (5, 4, [], 0)]).batch)) is None, "seven rows"
    assert numbers(pack_chunks(forest_of([(16, 8, [], 0)]).batch)) == (1, 8, 16, 8, 16, 0)
    assert numbers(pack_chunks(forest_of([(20, 2, BRANCHED, 0)]).batch)) is None
    assert numbers(pack_chunks(forest_of([(6, 5, chain, 0), TREE]).batch)) == (1, 13, 18, 13, 18, 21)


@pytest.mark.parametrize("name", ["rows", "key_slots", "row_starts", "key_starts"])
def test_one_wrong_index_is_seen(triton_device, calls, name):
    case = Case(forest_of([TREE, CHUNK_WITH_CONTEXT, CHUNK]), PLAIN, triton_device, **HALF)
    wrong = plan_of(case)

    def shifted(kv: KvCache) -> AttentionPlan:
        plan: Any = wrong(kv)
        getattr(plan._chunks, name)[1] ^= 1
        return plan

    with pytest.raises(AssertionError):
        case.check(shifted)


def test_torch_s_own_function_takes_these_calls():
    """On `meta` tensors, which have shapes and types and no numbers."""
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    meta = torch.device("meta")
    for window in (None, 5):
        for heads in ((2, 1), (2, 2)):
            case = Case(
                forest_of([TREE, CHUNK, CHUNK_WITH_CONTEXT]),
                Scoring(0.3, window, None), meta, heads, (16, 16), torch.bfloat16,
            )  # fmt: skip
            plan = plan_of(case)(case.cache(case.dtype))
            attended = plan.attend(0, case.query, case.keys, case.values, case.scoring)
            assert attended.is_meta
            assert attended.shape == case.query.shape
            assert attended.dtype == torch.bfloat16


@pytest.fixture
def in_float32(monkeypatch, calls, triton_device):
    """Engines on this device find chunks, and the stand-in computes float32, so that tokens can be compared."""
    from actors.engine.attention import varlen

    monkeypatch.setattr(model_runner, "has_varlen_kernel", lambda device: True)
    monkeypatch.setattr(varlen, "_DTYPES", (torch.float32,))


def test_the_engine_says_the_same_tokens_with_chunks(triton_device, calls, in_float32):
    padded = greedy_rounds(tiny_llama(), triton_device, "padded", rounds=3)
    assert not calls
    assert greedy_rounds(tiny_llama(), triton_device, "triton_tree", rounds=3) == padded
    assert calls


def test_rounds_of_many_rows_without_a_chunk_are_laid_out_once(triton_device, in_float32):
    runner = ModelRunner(make_tiny_model("llama", vocab_size=61, hidden_size=32).to(triton_device), 64, "default",
                         attention="triton_tree")  # fmt: skip
    shape = Shape(rows=16, sequences=4, words=1, max_context=64, block_size=4, logits=4)
    packed = []

    def pack() -> PackedBatch:
        packed.append(forest_of([CHUNK, LAST_TOKEN]).batch)
        return packed[-1]

    assert runner.send_round(shape, lambda *_: None, [], pack, most_rows=7).chunks is None
    assert not packed
    assert runner.send_round(shape, lambda *_: None, [], pack, most_rows=9).chunks.most_rows == 9
    assert len(packed) == 1


def test_launches_of_chunks_are_not_recorded(triton_device, in_float32, monkeypatch):
    class Refusing:
        def record(self, launch):
            raise AssertionError("recorded")

    runner = ModelRunner(make_tiny_model("llama", vocab_size=61, hidden_size=32).to(triton_device), 64, "default",
                         attention="triton_tree")  # fmt: skip
    monkeypatch.setattr(runner, "_launches", RecordedLaunches(Refusing()))
    batch = forest_of([(16, 4, [], 0)]).batch
    for _ in range(4):
        inputs = runner.send(batch, np.array([11]), 1)
        runner.launch(inputs, None, lambda inputs=inputs: runner.compute(inputs))
    assert not runner.launches._recorded
    assert not runner.launches._uses

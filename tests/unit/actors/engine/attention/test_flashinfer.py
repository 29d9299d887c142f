"""Attention by FlashInfer against padded attention. FlashInfer needs a GPU: what its source says stands in for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.build import build_draft_engine, build_target_engine
from actors.engine.attention.flashinfer import FlashInfer, FlashInferPlan
from actors.engine.attention.interface import AttentionPlan, Scoring
from actors.engine.attention.visibility import visible_bits
from actors.engine.kv_cache import KvCache
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.models.source import ModelSource
from actors.options import DraftOptions, TargetOptions
from paceline_testing.attention_cases import Case
from paceline_testing.flashinfer_contract import BatchPrefillWithPagedKVCacheWrapper
from paceline_testing.forests import Forest, forest_of
from paceline_testing.random_forests import forests
from paceline_testing.tiny_models import make_tiny_model
from tests.unit.actors.engine.attention.test_triton_tree import BRANCHED, gemma2, gpt_oss, greedy_rounds, tiny_llama

CPU = torch.device("cpu")
PLAIN = Scoring(0.3, None, None)
HALF = {"heads": (2, 1), "dims": (8, 8), "dtype": torch.float16}
TREE, CHUNK = (14, 13, BRANCHED, 0), (21, 9, [], 0)


@pytest.fixture
def installed(monkeypatch):
    """FlashInfer's package, with the stand-in in it."""
    package = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr("actors.engine.attention.flashinfer._WORKSPACE_BYTES", 1 << 10)


def plan_of(case: Case, flashinfer: FlashInfer | None = None) -> Callable[[KvCache], AttentionPlan]:
    wrappers = flashinfer or FlashInfer(CPU)
    return lambda kv: FlashInferPlan(wrappers, case.forest.batch, case.inputs().rows.slots, kv)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    forest=forests(max_nodes=80),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    dims=st.sampled_from([(8, 8), (24, 16)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    window=st.sampled_from([None, 1, 2, 9, 30, -3, -20]),
    softcap=st.sampled_from([None, 2.0]),
)
def test_any_batch_attends_as_padded_attention_does(installed, forest, heads, dims, dtype, window, softcap):
    case = Case(forest, Scoring(dims[0] ** -0.5, window, softcap), CPU, heads, dims, dtype)
    case.check(plan_of(case))


@given(forests(max_nodes=150), st.sampled_from([None, 1, 2, 7, 40, -6, -30]))
def test_the_bits_of_a_mask_are_what_each_row_sees(forest, window):
    bits, starts = visible_bits(forest.batch, window)
    assert starts.dtype == np.int32
    for index in range(len(forest.parts)):
        visible = forest.visible(index, window)
        own = np.unpackbits(bits[starts[index] : starts[index + 1]], bitorder="little")
        assert (own[: visible.size].reshape(visible.shape) == visible).all()
        assert not own[visible.size :].any()
    assert starts[-1] == len(bits)


def test_contexts_that_end_at_borders_of_blocks(installed):
    forest = forest_of([(known, known - 3, [], 0) for known in (15, 16, 17, 31, 32, 33)], block_size=16)
    Case(forest, PLAIN, CPU, **HALF).check(plan_of(Case(forest, PLAIN, CPU, **HALF)))


def test_forwards_and_kinds_of_layers_share_wrappers_and_disturb_none(installed):
    """Rounds with and without a tree, layers with and without a window, each planned once a forward."""
    flashinfer = FlashInfer(CPU)
    scorings = PLAIN, Scoring(0.3, 5, None)
    made: list[Forest] = [forest_of([TREE, CHUNK]), forest_of([CHUNK]), forest_of([CHUNK, TREE, TREE])]
    for forest in (*made, *made):
        cases = [Case(forest, scoring, CPU, **HALF) for scoring in scorings]
        kv = cases[0].cache(torch.float16)
        plan = plan_of(cases[0], flashinfer)(kv)
        for case in (*cases, *cases):
            wanted, _ = case.wanted()
            got = plan.attend(0, case.query, case.keys, case.values, case.scoring)[: len(wanted)]
            torch.testing.assert_close(got.float(), wanted, atol=4e-3, rtol=4e-3)
    assert len(flashinfer._wrappers) == 4


@pytest.mark.parametrize(("window", "wrong"), [(None, 1), (5, 1), (5, 20)])
def test_one_wrong_bit_is_seen(installed, monkeypatch, window, wrong):
    def with_error(batch, window):
        bits, starts = visible_bits(batch, window)
        bits[starts[1] + wrong] ^= 2
        return bits, starts

    case = Case(forest_of([CHUNK, TREE]), Scoring(0.3, window, None), CPU, **HALF)
    case.check(plan_of(case))
    monkeypatch.setattr("actors.engine.attention.flashinfer.visible_bits", with_error)
    with pytest.raises(AssertionError):
        case.check(plan_of(case))


@pytest.mark.parametrize(
    ("scoring", "how", "what"),
    [
        (Scoring(0.3, None, None, torch.zeros(2)), {}, "attention sinks"),
        (PLAIN, {"dims": (16, 8), "shares_values": True}, "latent attention"),
        (PLAIN, {"dtype": torch.float32}, "dtype float32"),
    ],
)
def test_layers_that_it_does_not_compute_are_refused(installed, scoring, how, what):
    case = Case(forest_of([TREE]), scoring, CPU, **(HALF | how))
    with pytest.raises(ModelError, match=f"attention is 'flashinfer' and the model has {what}.*choose 'triton_tree'"):
        case.check(plan_of(case))


def test_the_engine_says_the_same_tokens(installed, triton_device, monkeypatch):
    """Sliding windows and a soft cap, prompts in chunks, and trees. The stand-in computes float32 for this."""
    monkeypatch.setattr("actors.engine.attention.flashinfer._DTYPES", (torch.float32,))
    padded = greedy_rounds(gemma2(), triton_device, "padded")
    assert greedy_rounds(gemma2(), triton_device, "flashinfer") == padded


def test_an_engine_of_a_model_with_sinks_says_so_in_its_first_round(installed, triton_device):
    with pytest.raises(ModelError, match="sinks"):
        greedy_rounds(gpt_oss(), triton_device, "flashinfer", rounds=1)


def test_without_the_package_one_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    message = (
        r"attention is 'flashinfer', which cannot be imported \(.*\): pip install 'paceline\[flashinfer\]', or choose"
    )
    with pytest.raises(ModelError, match=message):
        TargetEngine(tiny_llama(), EngineOptions(64, 4, attention="flashinfer"))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (build_target_engine, TargetOptions(attention="flashinfer")),
        (build_draft_engine, DraftOptions(attention="flashinfer")),
    ],
)
def test_a_missing_package_is_found_before_a_model_is_loaded(monkeypatch, tmp_path, make, options):
    make_tiny_model("llama", layers=1, hidden_size=16, heads=2).config.save_pretrained(tmp_path)  # no weights
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr("actors.build.choose_device", lambda device: "cuda")
    with pytest.raises(ModelError, match=r"paceline\[flashinfer\]"):
        make(ModelSource("t", "t", tmp_path), options)

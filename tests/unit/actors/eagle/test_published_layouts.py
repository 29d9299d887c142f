"""Heads in the layouts of published checkpoints (`published_heads`), against the papers' forward in plain torch.

Covers `actors.eagle.head_layout` and `actors.eagle.head_loading`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.eagle.eagle_drafter import EagleDrafter
from actors.eagle.head_loading import load_eagle_head
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.options import AttentionBackend, EagleOptions
from paceline_testing.drafting import paths_of
from paceline_testing.published_heads import (
    LAYERS,
    TARGET_SIZE,
    VOCAB,
    Paper,
    Published,
    as_wide_as_its_features,
    eagle,
    eagle3,
    eagle31,
    for_larger_target,
    norm_before_fc,
    normed,
    speculators,
    whole_vocabulary,
)
from paceline_testing.tiny_models import make_tiny_model

TEXT = [5, 9, 13, 2, 40, 7, 7, 23, 51, 8, 30]


@pytest.fixture(scope="module")
def target():
    return make_tiny_model("llama", 3, VOCAB, LAYERS, TARGET_SIZE, 4, 2)


# Each layout with the layers whose inputs it reads, as indices of `output_hidden_states`.
LAYOUTS: dict[str, tuple[Callable[[], Published], tuple[int, ...]]] = {
    "EAGLE-1 with a bias, .bin": (lambda: eagle(file="pytorch_model.bin"), ()),
    "EAGLE-2 without a bias": (lambda: eagle(bias=False), ()),
    "EAGLE-1 of two layers": (lambda: eagle(layers=2), ()),
    "EAGLE-3": (eagle3, (2, 3, 3)),
    "EAGLE-3 for a larger target": (for_larger_target, (2, 3, 3)),
    "EAGLE-3 of two layers": (lambda: eagle3("layers.0.", layers=2), (2, 3, 3)),
    "EAGLE-3 with layers by their outputs": (lambda: eagle3(eagle_aux_hidden_state_layer_ids=[1, 3, 5]), (2, 4, 6)),
    "EAGLE-3 with layers by their inputs": (lambda: eagle3(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), (2, 4, 5)),
    "EAGLE-3 with two layers in eagle_config": (
        lambda: eagle3(
            num_features=2, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4], "use_aux_hidden_state": True}
        ),
        (0, 4),
    ),
    "speculators": (speculators, (2, 3, 3)),
    "speculators, residual of the feature itself": (lambda: speculators(norm_before_residual=False), (2, 3, 3)),
    "EAGLE-3.1": (eagle31, (2, 3, 3)),
    "EAGLE-3 with a norm over all features": (norm_before_fc, (2, 3, 3)),
    "EAGLE-3 with more tokens than the target": (lambda: whole_vocabulary(VOCAB + 3), (2, 3, 3)),
    "EAGLE-3 with fewer tokens than the target": (lambda: whole_vocabulary(VOCAB - 3), (2, 3, 3)),
}  # fmt: skip


def engine_with(
    head_path: Path, target: Any, depth: int, attention: AttentionBackend = "padded", device: str = "cpu"
) -> TargetEngine:
    model = make_tiny_model("llama", 3, VOCAB, LAYERS, TARGET_SIZE, 4, 2).to(device)
    options = EngineOptions(64, 4, is_eager=device != "cpu")  # compiling would take longer than the test
    engine = TargetEngine(model, options)
    head = load_eagle_head(head_path, target.config, device=device)
    engine.attach_head(
        EagleDrafter(model, head, options.num_slots, EagleOptions(depth=depth, top_k=1), attention=attention)
    )
    return engine


def first_drafts(engine: TargetEngine, tokens: list[int], num_nodes: int) -> tuple[list[int], list[int]]:
    """The text with the target's next token, and the head's chain behind it."""
    item = VerifyItem(
        SequenceDelta(1, 0, np.array(tokens, np.int32)),
        len(tokens),
        begin=SequenceStart(SamplingParams(seed=1, temperature=0.0), len(tokens)),
        head_nodes=num_nodes,
    )
    result = engine.verify(VerifyBatch(1, [item]))
    path = max(paths_of(result.drafts[0]), key=len)
    return [*tokens, result.verdicts[0].next_token], list(path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_features_and_drafts_are_those_of_the_paper(tmp_path, target, name):
    make, states = LAYOUTS[name]
    published = make()
    paper = Paper(published, target, states)
    engine = engine_with(published.save(tmp_path / "head"), target, depth=4)
    with torch.no_grad():
        tokens, drafts = first_drafts(engine, TEXT, 5)
        assert drafts == paper.draft(tokens, 5)
        head = engine.eagle_head._head
        following = torch.tensor([TEXT[1:]])
        features = paper.features(TEXT[:-1])
        embedded = engine.eagle_head._embedding(following)
        if published.is_eagle3:
            states_of = target.model(torch.tensor([TEXT[:-1]]), output_hidden_states=True).hidden_states
            if max(states) < LAYERS:
                raw = torch.cat([states_of[index] for index in states], dim=-1)
                torch.testing.assert_close(head.fused(raw)[0], features, rtol=1e-4, atol=1e-5)
        head.config._attn_implementation = "sdpa"
        got = head(embedded, features[None], torch.arange(len(features))[None])[0]
        wanted = paper.outputs(features, TEXT[1:])
        if published.config.get("norm_output"):
            wanted = normed(wanted, paper.tensors["norm.weight"])
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["EAGLE-1 of two layers", "EAGLE-3 for a larger target", "EAGLE-3.1"])
def test_trees_that_grow_on_the_device_are_those_of_the_paper(tmp_path, target, triton_device, name):
    make, states = LAYOUTS[name]
    path, device = make().save(tmp_path / "head"), str(triton_device)
    engine = engine_with(path, target, depth=3, attention="triton_tree", device=device)
    with torch.no_grad():
        tokens, drafts = first_drafts(engine, TEXT, 4)
        assert drafts == Paper(make(), target, states).draft(tokens, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eagle3(size=16), r"hidden_size is 16; the target's hidden_size is 32"),
        (lambda: eagle3(target_hidden_size=48), r"target_hidden_size is 48; the target's hidden_size is 32"),
        (lambda: eagle3(size=16, target_hidden_size=32), r"so the checkpoint needs the key 'embed_tokens.weight'"),
        (as_wide_as_its_features, r"3 features of size 32 are as wide as hidden_size, 96"),
        (lambda: eagle3(parallel_drafting=True), r"parallel_drafting is True, which is not implemented for EAGLE-3"),
        (lambda: eagle3(logit_scale=0.5), r"logit_scale is 0.5, which is not implemented"),
        (lambda: eagle3(quantization_config={"quant_method": "fp8"}), r"quantization_config is .* not implemented"),
        (lambda: eagle3(eagle_config={"use_mtp_layernorm": True}), r"eagle_config.use_mtp_layernorm is True"),
        (lambda: eagle3(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state is False"),
        (lambda: eagle3(use_sliding_window=True), r"use_sliding_window is True, which is not implemented"),
        (lambda: eagle3(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), r"is \[2, 4, 9\]; the target has 6 layers"),
        (lambda: eagle3(eagle_aux_hidden_state_layer_ids=["a"]), r"must be a list of integers"),
        (lambda: speculators(mystery=3), r"mystery is 3, which is not implemented"),
        (lambda: eagle3(fc_norm=True), r"key 'fc_norm.0.weight' of shape \[32\] is missing"),
        (lambda: eagle3(norm_before_fc=True), r"key 'input_norm.weight' of shape \[96\] is missing"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(tmp_path, target, make, message):
    with pytest.raises(ModelError, match=message):
        load_eagle_head(make().save(tmp_path / "head"), target.config)


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids"]
)
def test_flags_of_eagle3_are_refused_in_older_heads(tmp_path, target, flag):
    head = eagle()
    head.config[flag] = [1, 2, 3] if flag.startswith("eagle") else True
    with pytest.raises(ModelError, match=rf"{flag} is .*, which is not implemented for EAGLE-1 and -2 heads"):
        load_eagle_head(head.save(tmp_path / "head"), target.config)


def test_older_heads_may_say_that_they_read_no_inner_layers(tmp_path, target):
    head = eagle()
    head.config["use_aux_hidden_state"] = False
    assert load_eagle_head(head.save(tmp_path / "head"), target.config).kind == "eagle"

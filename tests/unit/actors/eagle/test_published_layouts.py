"""Heads in the layouts of published checkpoints (`published_heads`), against the papers' forward in plain torch.

Covers `actors.eagle.head_layout` and `actors.eagle.head_loading`.
"""

import copy
import logging
import re
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
    normed,
    speculators,
)
from paceline_testing.published_layouts import LAYOUTS, modelopt
from paceline_testing.tiny_models import make_tiny_model

TEXT = [5, 9, 13, 2, 40, 7, 7, 23, 51, 8, 30]


@pytest.fixture(scope="module")
def target():
    return make_tiny_model("llama", 3, VOCAB, LAYERS, TARGET_SIZE, 4, 2)


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
        (
            lambda: eagle3(eagle_aux_hidden_state_layer_ids=[2, 2, 2]),
            r"config.json: eagle_aux_hidden_state_layer_ids is \[2, 2, 2\]; it may count layers whose outputs are read"
            r".* of the target's 6 layers.* write \[3, 3, 3\] if outputs are meant, or 'speculators_model_type'",
        ),
        (lambda: eagle3(eagle_aux_hidden_state_layer_ids=["a"]), r"`int`, got `str` - at `\$.eagle_aux_hidden_state"),
        (lambda: speculators(mystery=3), r"mystery is 3, which is not implemented"),
        (lambda: eagle3(fc_norm=True), r"key 'fc_norm.0.weight' of shape \[32\] is missing"),
        (lambda: eagle3(norm_before_fc=True), r"key 'input_norm.weight' of shape \[96\] is missing"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(tmp_path, target, make, message):
    with pytest.raises(ModelError, match=message):
        load_eagle_head(make().save(tmp_path / "head"), target.config)


IDS = "eagle_aux_hidden_state_layer_ids"
DEEP = 36  # layers of gpt-oss-120b and Qwen3-8B


@pytest.mark.parametrize(
    ("config", "layers", "told"),
    [
        ({}, (2, 18, 33), "features: inputs of layers [2, 18, 33] (the default)"),
        ({IDS: [1, 17, 32]}, (2, 18, 33), f"features: outputs of layers [1, 17, 32] ({IDS} begins with 1)"),
        ({IDS: [2, 18, 33]}, (2, 18, 33), f"features: inputs of layers [2, 18, 33] ({IDS} does not begin with 1)"),
        ({IDS: [24, 30, 36]}, (24, 30, 36), f"features: inputs of layers [24, 30, 36] ({IDS} does not begin with 1)"),
        ({IDS: [3, 18, 33]}, (3, 18, 33), f"features: inputs of layers [3, 18, 33] ({IDS} does not begin with 1)"),
        (
            {IDS: [2, 17, 32], "speculators_model_type": "eagle3"}, (2, 17, 32),
            f"features: inputs of layers [2, 17, 32] ({IDS} is in the speculators format)",
        ),
        (
            {IDS: [1, 17, 32], "speculators_model_type": "eagle3"}, (2, 18, 33),
            f"features: outputs of layers [1, 17, 32] ({IDS} begins with 1)",
        ),
    ],
)  # fmt: skip
def test_which_layers_are_read_and_why_is_logged(tmp_path, target, caplog, config, layers, told):
    deep = copy.deepcopy(target.config)
    deep.num_hidden_layers = DEEP
    with caplog.at_level(logging.INFO, "actors.eagle.head_layout"):
        head = load_eagle_head(eagle3(**config).save(tmp_path / "head"), deep)
    assert head.layout.feature_layers == layers
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path / 'head' / 'config.json'}: {told}"]


@pytest.mark.parametrize("num_layers", [28, 32, DEEP, 61, 80])
def test_a_list_that_may_count_inputs_or_outputs_is_refused(tmp_path, target, num_layers):
    deep = copy.deepcopy(target.config)
    deep.num_hidden_layers = num_layers
    ids = [2, num_layers // 2 - 1, num_layers - 4]
    for head in (eagle3(**{IDS: ids}), eagle3(eagle_config={IDS: ids})):
        with pytest.raises(ModelError, match=rf"{IDS} is {re.escape(repr(ids))}; it may count"):
            load_eagle_head(head.save(tmp_path / "head"), deep)
    for others in ([2, num_layers // 2, num_layers - 3], [2, num_layers // 2, num_layers - 4], ids[:2]):
        head = eagle3(**{IDS: others}, num_features=len(others))
        assert load_eagle_head(head.save(tmp_path / "head"), deep).layout.feature_layers == tuple(others)


def in_layer(**config: Any) -> Published:
    head = speculators()
    head.config["transformer_layer_config"] |= config
    return head


def with_config(head: Published, **config: Any) -> Published:
    head.config |= config
    return head


def with_modelopt(**config: Any) -> Published:
    head = modelopt()
    head.config["eagle_config"] |= config
    return head


def without(head: Published, key: str) -> Published:
    del head.config[key]
    return head


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **values}


LAYER = "transformer_layer_config"
WITHOUT_EFFECT: dict[str, Callable[[], Published]] = {
    # They belong beside transformer_layer_config, or into it.
    rf"{LAYER}.norm_before_residual is False": lambda: in_layer(norm_before_residual=False),
    rf"{LAYER}.norm_output is True": lambda: in_layer(norm_output=True),
    rf"{LAYER}.eagle_aux_hidden_state_layer_ids is \[1": lambda: in_layer(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
    rf"{LAYER}.eagle_config is": lambda: in_layer(eagle_config={"use_last_layernorm": True}),
    rf"{LAYER}.target_hidden_size is 99": lambda: in_layer(target_hidden_size=99),
    rf"{LAYER}.draft_vocab_size is 9": lambda: in_layer(draft_vocab_size=9),
    r"rope_theta is 3.0": lambda: speculators(rope_theta=3.0),
    # Other layouts and layers.
    r"speculators_model_type is 'peagle'": lambda: speculators(speculators_model_type="peagle"),
    r"speculators_model_type is 'dflash'": lambda: speculators(speculators_model_type="dflash"),
    r"speculators_config.algorithm is 'peagle'": lambda: speculators(speculators_config={"algorithm": "peagle"}),
    r"speculators_config.algorithm is 'hass'": lambda: with_config(eagle(), speculators_config={"algorithm": "hass"}),
    r"architectures is \['PEagle": lambda: eagle3(architectures=["PEagleLlamaForCausalLM"]),
    r"config.json: model_type is 'gemma2'": lambda: eagle3(model_type="gemma2"),
    rf"{LAYER}.model_type is 'gemma2'": lambda: in_layer(model_type="gemma2"),
    r"layer_types is \['full_attention', 'slid": lambda: eagle3(layer_types=["full_attention", "sliding_attention"]),
    r"rope_parameters.partial_rotary_factor is 0.5": lambda: eagle3(rope_parameters=rope(partial_rotary_factor=0.5)),
    rf"{LAYER}.rope_scaling.partial_rotary": lambda: in_layer(rope_scaling=rope(partial_rotary_factor=0.5)),
    # Not even where they are false.
    r"causal is False": lambda: eagle3(causal=False),
    r"use_rope is 0": lambda: eagle3(use_rope=0),
    # Programs differ in its default.
    r"norm_before_residual is missing": lambda: without(speculators(), "norm_before_residual"),
    # What ModelOpt can say beyond EAGLE-3 as published.
    r"eagle_config.use_mtp_layernorm is True": lambda: with_modelopt(use_mtp_layernorm=True),
    r"eagle_config.use_last_layernorm is False": lambda: with_modelopt(use_last_layernorm=False),
    r"eagle_config.next_layer_regular is False": lambda: with_modelopt(next_layer_regular=False),
    r"eagle_config.use_input_layernorm_in_first_layer is F": (
        lambda: with_modelopt(use_input_layernorm_in_first_layer=False)
    ),
    r"eagle_config.parallel_draft_step is 2": lambda: with_modelopt(parallel_draft_step=2),
    r"eagle_config.eh_proj_before_attn is False": lambda: with_modelopt(eh_proj_before_attn=False),
    r"norm_output is True, and eagle_config.norm_output is F": (
        lambda: with_config(with_modelopt(norm_output=False), norm_output=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WITHOUT_EFFECT)
def test_what_would_be_passed_over_is_refused_by_name(tmp_path, target, message):
    with pytest.raises(ModelError, match=message):
        load_eagle_head(WITHOUT_EFFECT[message]().save(tmp_path / "head"), target.config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_before_residual", "false"),
        ("hidden_act", "nonesuch"),
        ("draft_vocab_size", "x"),
        ("draft_vocab_size", [3]),
        ("draft_vocab_size", 0),
        ("eagle_config", "x"),
        ("eagle_config", ["a"]),
        ("eagle_config", {"norm_before_fc": 1}),
        (LAYER, "x"),
        ("eagle_aux_hidden_state_layer_ids", 5),
        ("eagle_aux_hidden_state_layer_ids", "1,2,3"),
        ("eagle_aux_hidden_state_layer_ids", [True, 2, 3]),
        ("layer_types", 5),
        ("architectures", "LlamaForCausalLM"),
        ("model_type", ["llama"]),
        ("rope_scaling", "linear"),
        ("rope_parameters", 5),
        ("speculators_config", "x"),
        ("target_hidden_size", "x"),
        ("num_hidden_layers", "one"),
        ("rms_norm_eps", "x"),
    ],
)
def test_values_of_other_types_are_refused_by_name(tmp_path, target, key, value):
    with pytest.raises(ModelError, match=rf"config.json: .*{key}"):
        load_eagle_head(with_config(eagle3(), **{key: value}).save(tmp_path / "head"), target.config)


@pytest.mark.parametrize(
    "config", [{"num_attention_heads": 0}, {"intermediate_size": -1}, {"rope_scaling": {"rope_type": "nonesuch"}}]
)
def test_shapes_that_no_layer_has_are_refused(tmp_path, target, config):
    with pytest.raises(ModelError, match=r"config.json: cannot be used"):
        load_eagle_head(with_config(eagle3(), **config).save(tmp_path / "head"), target.config)


def test_what_older_versions_of_transformers_wrote_is_passed_over(tmp_path, target):
    written = {"do_sample": False, "length_penalty": 1.0, "pruned_heads": {}, "add_cross_attention": False}
    written |= {"use_sliding_window": False, "sliding_window": 4096, "layer_types": ["full_attention"]}
    assert load_eagle_head(eagle3(**written).save(tmp_path / "head"), target.config).kind == "eagle3"


def test_what_a_head_has_from_a_target_with_experts_is_passed_over(tmp_path, target):
    """As heads of AngelSlim and SpecForge for Qwen3-30B-A3B, Qwen3-Next and Qwen3.5 have it."""
    copied = {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001}
    copied |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    names = {"architectures": ["Eagle3LLamaforCausalLM"], "target_model_type": "qwen3_moe", "use_mrope": False}
    head = eagle3(**copied, **names, rope_parameters=rope(mrope_section=[2, 1, 1], mrope_interleaved=True))
    assert load_eagle_head(head.save(tmp_path / "dense"), target.config).kind == "eagle3"
    del head.shapes["midlayer.mlp.up_proj.weight"]
    head.shapes["midlayer.mlp.experts.0.up_proj.weight"] = (64, TARGET_SIZE)
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight"):
        load_eagle_head(head.save(tmp_path / "sparse"), target.config)


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

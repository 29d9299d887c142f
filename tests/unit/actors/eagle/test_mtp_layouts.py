"""MTP heads in checkpoints with the published names, against the published forward in plain torch.

Covers `actors.eagle.mtp_layout`, `actors.eagle.mtp_loading` and `actors.eagle.mtp_head`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM

from actors.eagle.eagle_drafter import EagleDrafter
from actors.eagle.mtp_loading import check_mtp_head, load_mtp_head
from actors.engine.hidden_state_drafter import HeadRows
from actors.errors import ModelError
from actors.models.quiet import quiet_transformers
from actors.models.source import ModelSource
from actors.options import AttentionBackend, EagleOptions
from paceline_testing import mtp_checkpoints
from paceline_testing.drafting import paths_of
from paceline_testing.head_trees import likeliest_tree
from paceline_testing.mtp_checkpoints import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LATENT,
    LAYERS,
    NOPE,
    ROPE,
    SIZE,
    VALUE,
    VOCAB,
    MtpCheckpoint,
)
from paceline_testing.plain_rotation import rotated
from tests.gpu.launches import counted

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "mimo")
TEXT = [5, 9, 13, 2, 40, 7, 7, 23, 51, 8, 30]
FOLLOWING = 17
AFTER = f"model.layers.{LAYERS}."


@cache
def checkpoint(family: str) -> MtpCheckpoint:
    made: MtpCheckpoint = getattr(mtp_checkpoints, family)()
    return made


def head_of(path: Path, **options: str):
    with quiet_transformers():
        return load_mtp_head(ModelSource("tiny", "tiny", path), AutoConfig.from_pretrained(path), **options)


def target_of(path: Path) -> Any:
    """The unpatched model."""
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


# The published forward, in plain torch, over whole texts.


class Plain:
    """A head's forward, computed anew for every token."""

    def __init__(self, family: str, target: Any, tensors: dict[str, Tensor] | None = None) -> None:
        self.family, self.target = family, target
        self.config = target.config
        self.is_qwen = family.startswith("qwen")
        self.tensors = checkpoint(family).tensors() if tensors is None else tensors
        prefix = {"mimo": "model.mtp_layers.0."}.get(family, "mtp.layers.0." if self.is_qwen else AFTER)
        self.w = {key.removeprefix(prefix): value for key, value in self.tensors.items()}

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        weight = 1 + weight if self.is_qwen else weight
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def attention(self, x: Tensor) -> Tensor:
        return self.latent_attention(x) if self.family == "deepseek_v3" else self.grouped_attention(x)

    def latent_attention(self, x: Tensor) -> Tensor:
        w, rows = {key.removeprefix("self_attn."): value for key, value in self.w.items()}, len(x)
        latent = self.normed(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"])
        query = (latent @ w["q_b_proj.weight"].T).view(rows, HEADS, NOPE + ROPE)
        latent, turned = (x @ w["kv_a_proj_with_mqa.weight"].T).split([LATENT, ROPE], dim=-1)
        expanded = self.normed(latent, w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T
        key, value = expanded.view(rows, HEADS, NOPE + VALUE).split([NOPE, VALUE], dim=-1)

        def in_pairs(part: Tensor) -> Tensor:  # dimensions 2 i and 2 i + 1 turn together
            return rotated(torch.cat([part[..., ::2], part[..., 1::2]], dim=-1))

        query = torch.cat([query[..., :NOPE], in_pairs(query[..., NOPE:])], dim=-1)
        key = torch.cat([key, in_pairs(turned[:, None]).expand(-1, HEADS, -1)], dim=-1)
        return attended(query, key, value) @ w["o_proj.weight"].T

    def grouped_attention(self, x: Tensor) -> Tensor:
        w = {key.removeprefix("self_attn."): value for key, value in self.w.items()}

        def projected(name: str, heads: int) -> Tensor:
            product = x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", torch.zeros(()))
            return product.view(len(x), heads, -1)

        query, key, value = projected("q", HEADS), projected("k", KV_HEADS), projected("v", KV_HEADS)
        gate = None
        if self.is_qwen:
            query, gate = query.split(HEAD_DIM, dim=-1)
        if "q_norm.weight" in w:
            query, key = self.normed(query, w["q_norm.weight"]), self.normed(key, w["k_norm.weight"])
        turned = int(HEAD_DIM * {"glm4_moe": 0.5, "mimo": 1.0}.get(self.family, 0.25))
        query, key = (torch.cat([rotated(part[..., :turned]), part[..., turned:]], dim=-1) for part in (query, key))
        shared = HEADS // KV_HEADS
        mixed = attended(query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1))
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate.reshape(len(x), -1))
        return mixed @ w["o_proj.weight"].T

    def mlp(self, x: Tensor) -> Tensor:
        if "mlp.gate.weight" not in self.w:
            return gated(x, partial(self.expert, "mlp."))
        scores = x @ self.w["mlp.gate.weight"].T
        if self.is_qwen:
            scores = scores.softmax(-1)
            chosen = scores.topk(2).indices
        else:
            scores = scores.sigmoid()
            allowed = scores + self.w["mlp.gate.e_score_correction_bias"]
            groups = allowed.view(len(x), self.config.n_group, -1)
            best = groups.topk(2).values.sum(-1).topk(self.config.topk_group).indices
            outside = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, best, False)
            allowed = groups.masked_fill(outside[..., None], 0.0).flatten(1)
            chosen = allowed.topk(2).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        if not self.is_qwen:
            weights = weights * self.config.routed_scaling_factor
        every = torch.stack([gated(x, partial(self.one_of_experts, index)) for index in range(EXPERTS)], dim=1)
        output = (every.gather(1, chosen[..., None].expand(-1, -1, SIZE)) * weights[..., None]).sum(1)
        shared = gated(x, partial(self.expert, "mlp.shared_expert." if self.is_qwen else "mlp.shared_experts."))
        if self.is_qwen:
            shared = shared * torch.sigmoid(x @ self.w["mlp.shared_expert_gate.weight"].T)
        return output + shared

    def expert(self, prefix: str, part: str) -> Tensor:
        return self.w[f"{prefix}{part}_proj.weight"]

    def one_of_experts(self, index: int, part: str) -> Tensor:
        if "mlp.experts.down_proj" not in self.w:
            return self.expert(f"mlp.experts.{index}.", part)
        if part == "down":
            return self.w["mlp.experts.down_proj"][index]
        gate, up = self.w["mlp.experts.gate_up_proj"][index].chunk(2)
        return gate if part == "gate" else up

    def outputs(self, features: Tensor, following: list[int]) -> Tensor:
        """[rows, h]. features [rows, h]; following: the token after each row's."""
        table = self.w.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        embedded = table[following]
        if self.family == "mimo":
            parts = (features, "hidden_layernorm"), (embedded, "token_layernorm")
            names = "input_proj", "final_layernorm"
        elif self.is_qwen:
            parts = (embedded, "mtp.pre_fc_norm_embedding"), (features, "mtp.pre_fc_norm_hidden")
            names = "mtp.fc", "mtp.norm"
        else:
            parts = (embedded, "enorm"), (features, "hnorm")
            names = "eh_proj", "shared_head.norm"
        x = torch.cat([self.normed(part, self.w[f"{name}.weight"]) for part, name in parts], dim=-1)
        x = x @ self.w[f"{names[0]}.weight"].T
        x = x + self.attention(self.normed(x, self.w["input_layernorm.weight"]))
        x = x + self.mlp(self.normed(x, self.w["post_attention_layernorm.weight"]))
        return self.normed(x, self.w[f"{names[1]}.weight"])

    def tree(self, depth: int, top_k: int, max_nodes: int) -> dict[tuple[int, ...], float]:
        """Paths behind TEXT and FOLLOWING, with their probabilities."""
        base = self.target.model(torch.tensor([TEXT])).last_hidden_state[0]
        output_layer = self.w.get("shared_head.head.weight", self.target.get_output_embeddings().weight)

        def expand(path: tuple[int, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            features = torch.cat([base, *(output[None] for output in outputs)])
            output = self.outputs(features, [*TEXT[1:], FOLLOWING, *path])[-1]
            return output, (output @ output_layer.T).log_softmax(-1)

        return likeliest_tree(expand, depth, top_k, max_nodes)


def gated(x: Tensor, weight: Callable[[str], Tensor]) -> Tensor:
    return (silu(x @ weight("gate").T) * (x @ weight("up").T)) @ weight("down").T


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All [rows, heads, dim] -> [rows, heads * dim]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", scores, value).flatten(1)


@torch.no_grad()
def drafted(
    target: Any, head: Any, depth: int, top_k: int, max_nodes: int, attention: AttentionBackend = "padded"
) -> dict[tuple[int, ...], float]:
    """Paths behind TEXT and FOLLOWING, with their probabilities, from features that the drafter taps itself. head: on
    the target's device."""
    options = EagleOptions(depth=depth, top_k=top_k)
    drafter = EagleDrafter(target, head, 64, options, attention=attention)
    drafter.tap.open()
    target(torch.tensor([TEXT], device=target.device))
    rows = np.arange(len(TEXT))
    tree = drafter.propose([HeadRows(0, np.array([*TEXT[1:], FOLLOWING]), rows, rows, max_nodes)])[0]
    assert tree.is_valid(VOCAB)
    return dict(zip(paths_of(tree), tree.confidence.tolist(), strict=True))


@pytest.mark.parametrize(
    ("family", "depth", "top_k", "nodes"), [*((family, 2, 3, 12) for family in FAMILIES), ("mimo", 5, 1, 6)]
)
def test_chains_and_trees_are_those_of_the_published_forward(tmp_path, family, depth, top_k, nodes):
    path = checkpoint(family).save(tmp_path)
    target = target_of(path)
    with torch.no_grad():
        wanted = Plain(family, target).tree(depth, top_k, nodes)
    got = drafted(target, head_of(path), depth, top_k, nodes)
    assert len(got) == nodes
    assert got == pytest.approx(wanted, rel=2e-3, abs=1e-7)


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo"])
def test_trees_that_grow_on_the_device_are_those_of_the_published_forward(tmp_path, triton_device, family):
    path = checkpoint(family).save(tmp_path)
    target = target_of(path)
    with torch.no_grad():
        wanted = Plain(family, target).tree(2, 2, 6)
    head = head_of(path, device=str(triton_device))
    got = drafted(target.to(triton_device), head, 2, 2, 6, attention="triton_tree")
    assert got == pytest.approx(wanted, rel=2e-3, abs=1e-7)


@pytest.mark.parametrize(("family", "launches"), [("mimo", 96), ("deepseek_v3", 161)])
def test_on_a_device_a_level_is_launches_that_wait_for_nothing(tmp_path, family, launches):
    """Two texts go on with trees, on `meta` tensors."""
    path = checkpoint(family).save_knowing(tmp_path)
    target, counts = target_of(path).bfloat16().to("meta"), []
    for depth in (1, 2):
        options = EagleOptions(depth=depth, top_k=3)
        drafter = EagleDrafter(target, head_of(path, dtype="bfloat16").to("meta"), 64, options, "triton_tree")
        asked = [HeadRows(31, np.array([1]), np.array([text]), np.arange(32) + 32 * text, 12) for text in range(2)]
        for _ in range(2):  # constants go up the first time
            drafter.tap.open()
            target.model(torch.zeros((1, 2), dtype=torch.int64, device="meta"))
            with counted() as mode, torch.inference_mode():
                drafter.propose(asked)
        counts.append(mode.counts)
        assert (mode.counts["copies up"], mode.counts["copies back"]) == (1, 1)
        assert mode.counts.keys() == {"copies up", "copies back", "kernels"}
    assert counts[1]["kernels"] - counts[0]["kernels"] <= launches


def test_copies_of_the_targets_embeddings_and_output_layer_are_shared(tmp_path):
    made = checkpoint("glm4_moe")
    path = made.save(tmp_path / "plain")
    own = head_of(path)
    of_target = load_file(path / "model.safetensors")
    tensors = made.tensors()
    assert torch.equal(own.embed_tokens.weight, tensors[f"{AFTER}embed_tokens.weight"])
    assert torch.equal(own.lm_head.weight, tensors[f"{AFTER}shared_head.head.weight"])
    copies = {
        f"{AFTER}embed_tokens.weight": of_target["model.embed_tokens.weight"].clone(),
        f"{AFTER}shared_head.head.weight": of_target["lm_head.weight"].clone(),
    }
    shared = head_of(made.save(tmp_path / "shared", tensors | copies))
    assert shared.embed_tokens is None
    assert shared.lm_head is None
    without = head_of(made.save(tmp_path / "without", {key: tensors[key] for key in tensors.keys() - copies.keys()}))
    assert without.embed_tokens is None
    assert without.lm_head is None


def test_a_head_in_several_files_and_in_16_bits_is_read_in_the_targets_dtype(tmp_path):
    made = checkpoint("qwen3_5")
    path = made.save(tmp_path)
    tensors = {key: value.bfloat16() for key, value in load_file(path / "model.safetensors").items()}
    ordered = sorted(tensors)
    for number, keys in enumerate((ordered[::2], ordered[1::2]), 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in keys}, path / name, metadata={"format": "pt"})
    (path / "model.safetensors").unlink()
    for dtype in ("float32", "bfloat16"):
        head = head_of(path, dtype=dtype)
        assert {parameter.dtype for parameter in head.parameters()} == {getattr(torch, dtype)}
        assert torch.equal(head.projection.weight, tensors["mtp.fc.weight"].to(getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("glm4_moe", AFTER, f"model.layers.{LAYERS + 1}."),
        ("qwen3_5", "mtp.layers.0.", "mtp.layers.1."),
        ("mimo", "model.mtp_layers.0.", "model.mtp_layers.1."),
    ],
)
def test_the_first_of_several_heads_drafts_all_depths(tmp_path, family, first, second):
    made = checkpoint(family)
    more = {key.replace(first, second): value for key, value in made.tensors(8).items() if key.startswith(first)}
    head = head_of(made.save(tmp_path, made.tensors() | more, num_nextn_predict_layers=2))
    norm = head.block.layers[0].input_layernorm.weight
    assert torch.equal(norm, made.tensors()[f"{first}input_layernorm.weight"])


def test_a_model_of_pictures_and_text_has_the_head_of_its_text_model(tmp_path):
    """As Qwen3.5 is published: the text's configuration is a part of config.json."""
    path = checkpoint("qwen3_5").save(tmp_path)
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    assert torch.equal(head_of(path).projection.weight, checkpoint("qwen3_5").tensors()["mtp.fc.weight"])


BLOCK = 16


def in_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, their scales by block, and the numbers that they stand for."""
    blocks = weight.view(weight.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(weight.shape), scales, (codes.float() * scales[:, None, :, None]).view(weight.shape)


FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}


def test_a_head_in_fp8_is_widened_on_a_cpu(tmp_path):
    """As DeepSeek-V3 is published. The target itself is whole here."""
    made = checkpoint("deepseek_v3")
    stored, whole = dict(made.tensors()), dict(made.tensors())
    for name, weight in made.tensors().items():
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in name:
            stored[name], stored[f"{name}_scale_inv"], whole[name] = in_fp8(weight)
    head = head_of(made.save(tmp_path / "fp8", stored, quantization_config=FP8))
    target = target_of(made.save(tmp_path / "whole", whole))
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    got = drafted(target, head, 2, 2, 6)
    with torch.no_grad():
        assert got == pytest.approx(Plain("deepseek_v3", target, whole).tree(2, 2, 6), rel=2e-3, abs=1e-7)


@pytest.mark.parametrize("name", [f"{AFTER}eh_proj.weight", f"{AFTER}shared_head.head.weight"])
def test_fp8_outside_of_the_decoder_layer_is_refused(tmp_path, name):
    """Without their scales, such weights would be some hundred times too large."""
    scales = torch.ones(2, 4)
    tensors = {**checkpoint("deepseek_v3").tensors(), f"{name}_scale_inv": scales}
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    path = checkpoint("deepseek_v3").save(tmp_path, tensors, quantization_config=FP8)
    with pytest.raises(ModelError, match=rf"key '{name}_scale_inv': an MTP head may have fp8 in its decoder layer"):
        head_of(path)


def test_a_whole_head_beside_a_quantized_target_is_read(tmp_path):
    path = checkpoint("mimo").save(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 16})
    assert head_of(path).projection.weight.dtype == torch.float32


def changed(family: str, add: dict[str, tuple[int, ...]] | None = None, drop: str = "", **flags: Any) -> Callable:
    """Saves a family's checkpoint with tensors added, replaced or left out, and flags in config.json."""

    def save(path: Path) -> Path:
        tensors = checkpoint(family).tensors() | {key: torch.ones(shape) for key, shape in (add or {}).items()}
        tensors.pop(drop, None)
        return checkpoint(family).save(path, tensors, **flags)

    return save


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (changed("mimo", drop="model.mtp_layers.0.input_proj.weight"),
         rf"'tiny': the checkpoint has no MTP head, .* '{AFTER}eh_proj.weight', 'mtp.fc.weight', 'model.mtp_layers"),
        (changed("deepseek_v3", drop=f"{AFTER}enorm.weight"),
         rf"key '{AFTER}enorm.weight' of shape \[{SIZE}\] of the MTP head is missing"),
        (changed("deepseek_v3", drop=f"{AFTER}mlp.experts.3.up_proj.weight"),
         rf"key '{AFTER}mlp.experts.3.up_proj.weight' of shape \[16, {SIZE}\] of the MTP head is missing"),
        (changed("qwen3_next", drop="mtp.norm.weight"), r"key 'mtp.norm.weight' of shape \[32\] of .* is missing"),
        (changed("qwen3_next", {"mtp.fc.bias": (SIZE,)}),
         r"key 'mtp.fc.bias' of shape \[32\] is unknown in MTP heads of the Qwen3-Next layout"),
        (changed("qwen3_5", {"mtp.emb.weight": (SIZE,)}), r"key 'mtp.emb.weight' of shape \[32\] is unknown"),
        (changed("glm4_moe", {f"{AFTER}self_attn.sinks": (HEADS,)}),
         r"sinks' of shape \[4\] is unknown in MTP heads of the DeepSeek-V3 layout"),
        (changed("mimo", {"model.mtp_layers.0.input_proj.weight": (SIZE, SIZE)}),
         r"input_proj.weight' has shape \[32, 32\]; expected \[32, 64\]"),
        (changed("qwen3_5_moe", {"mtp.layers.0.mlp.experts.down_proj": (4, SIZE, 16)}),
         r"experts.down_proj' has shape \[4, 32, 16\]; expected \[8, 32, 16\]"),
        (changed("qwen3_5", mtp_use_dedicated_embeddings=True),
         r"config.json: mtp_use_dedicated_embeddings is True, which is not implemented for MTP heads"),
        (changed("qwen3_5", text_config={"mtp_layer_types": ["linear_attention"]}),
         r"text_config.mtp_layer_types is \['linear_attention'\], which is not implemented"),
        (changed("mimo", use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * LAYERS),
         r"layers have sliding windows of 8 tokens, which are not implemented for MTP heads"),
        (changed("mimo", {"model.mtp_layers.0.mlp.up_proj.qweight": (4,)}, quantization_config={"quant_method": "awq"}),
         r"MTP head is quantized with awq, as key 'model.mtp_layers.0.mlp.up_proj.qweight' says"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(tmp_path, save, message):
    with pytest.raises(ModelError, match=message):
        head_of(save(tmp_path))


def test_a_cluster_finds_out_before_it_starts_anything(tmp_path):
    source = ModelSource("tiny", "tiny", checkpoint("qwen3_5").save(tmp_path))
    config = AutoConfig.from_pretrained(tmp_path)
    check_mtp_head(source, config)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    save_file({key: value for key, value in tensors.items() if key != "mtp.fc.weight"}, weights)
    with pytest.raises(ModelError, match="the checkpoint has no MTP head"):
        check_mtp_head(source, config)
    weights.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"model.safetensors: cannot be read"):
        check_mtp_head(source, config)
    weights.unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: MTP heads are read from safetensors alone"):
        check_mtp_head(source, config)

"""Tiny random checkpoints with an MTP head, whose tensors are named and shaped by the lists of published ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.models.quiet import quiet_transformers
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

VOCAB, SIZE, HEADS, EXPERTS, INNER, EXPERT_INNER = BYTE_VOCAB_SIZE, 32, 4, 8, 48, 16
NOPE, ROPE, VALUE, LATENT, QUERY_LATENT = 8, 16, 16, 16, 32  # of latent attention
KV_HEADS, HEAD_DIM = 2, 16  # of all others
LAYERS = 4

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class MtpCheckpoint:
    """A family's target and the published names of its head's tensors."""

    config: PretrainedConfig
    shapes: Shapes
    flags: dict[str, Any]  # that published files of config.json have for the head
    has_offset_norms: bool = False  # norms multiply with 1 + weight

    def tensors(self, seed: int = 7) -> dict[str, torch.Tensor]:
        """The head's."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, shape in sorted(self.shapes.items()):
            fan_in = shape[-1] if len(shape) > 1 else 1
            made[name] = torch.randn(shape, generator=generator) / math.sqrt(fan_in)
            if len(shape) == 1:
                made[name] *= 0.1
                if not (self.has_offset_norms or name.endswith("bias")):
                    made[name] += 1.0
        return made

    def save(self, directory: Path, tensors: dict[str, torch.Tensor] | None = None, **flags: Any) -> Path:
        """Write target and head into one model directory, with a tokenizer of bytes. tensors: in place of the head's
        own. flags: more of config.json."""
        return self._save(directory, self._target(), self.tensors() if tensors is None else tensors, flags)

    def save_knowing(self, directory: Path) -> Path:
        """Write a target that looks at nothing but its last token, with a head that knows what it says."""
        import torch

        tensors, target = self.tensors(), self._target()
        for name, tensor in [*tensors.items(), *target.named_parameters()]:
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                tensor.data.zero_()
            elif tensor.ndim == 1 and name in tensors:
                tensor.fill_(0.0 if self.has_offset_norms or name.endswith("bias") else 1.0)
        for name in [name for name in tensors if "embed_tokens" in name or "shared_head.head" in name]:
            del tensors[name]
        nothing, own = torch.zeros(SIZE, SIZE), torch.eye(SIZE)
        for name in tensors:
            if name.endswith(("eh_proj.weight", ".fc.weight")):
                tensors[name] = torch.cat([own, nothing], dim=1)
            elif name.endswith("input_proj.weight"):
                tensors[name] = torch.cat([nothing, own], dim=1)
        return self._save(directory, target, tensors, {})

    def _target(self) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        with quiet_transformers():
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1:
                    spread = 1 / math.sqrt(parameter.shape[-1])
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            model.get_output_embeddings().weight.mul_(4.0)
        return model

    def _save(
        self, directory: Path, target: PreTrainedModel, tensors: dict[str, torch.Tensor], flags: dict[str, Any]
    ) -> Path:
        from safetensors.torch import load_file, save_file

        with quiet_transformers():
            target.save_pretrained(directory)
            make_byte_tokenizer().save_pretrained(directory)
        path = directory / "model.safetensors"
        save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
        written = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(written | self.flags | flags))
        return directory


def _norms(prefix: str, *names: str, size: int = SIZE) -> Shapes:
    return {f"{prefix}{name}.weight": (size,) for name in names}


def _gated_mlp(prefix: str, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, SIZE),
        f"{prefix}up_proj.weight": (inner, SIZE),
        f"{prefix}down_proj.weight": (SIZE, inner),
    }


def _experts(prefix: str, shared: str) -> Shapes:
    shapes: Shapes = {f"{prefix}gate.weight": (EXPERTS, SIZE)}
    for index in range(EXPERTS):
        shapes |= _gated_mlp(f"{prefix}experts.{index}.", EXPERT_INNER)
    return shapes | _gated_mlp(f"{prefix}{shared}.", EXPERT_INNER)


def _attention(prefix: str, *, biases: Iterable[str] = (), query_parts: int = 1) -> Shapes:
    rows = {"q_proj": query_parts * HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    shapes: Shapes = {f"{prefix}{name}.weight": (count, SIZE) for name, count in rows.items()}
    shapes |= {f"{prefix}{name}.bias": (rows[name],) for name in biases}
    return shapes | {f"{prefix}o_proj.weight": (SIZE, HEADS * HEAD_DIM)}


def _of_one_more_layer() -> Shapes:
    """What DeepSeek-V3 and GLM-4.5 have beside the decoder layer."""
    layer = f"model.layers.{LAYERS}."
    return {
        **_norms(layer, "enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm"),
        f"{layer}eh_proj.weight": (SIZE, 2 * SIZE),
        f"{layer}embed_tokens.weight": (VOCAB, SIZE),
        f"{layer}shared_head.head.weight": (VOCAB, SIZE),
    }


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_ROUTED: dict[str, Any] = {"moe_intermediate_size": EXPERT_INNER, "num_experts_per_tok": 2}
_LINEAR: dict[str, Any] = {
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2,
}  # fmt: skip


def deepseek_v3() -> MtpCheckpoint:
    from transformers import DeepseekV3Config

    layer = f"model.layers.{LAYERS}."
    attention = {
        f"{layer}self_attn.q_a_proj.weight": (QUERY_LATENT, SIZE),
        f"{layer}self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), QUERY_LATENT),
        f"{layer}self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROPE, SIZE),
        f"{layer}self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
        f"{layer}self_attn.o_proj.weight": (SIZE, HEADS * VALUE),
        **_norms(f"{layer}self_attn.", "q_a_layernorm", size=QUERY_LATENT),
        **_norms(f"{layer}self_attn.", "kv_a_layernorm", size=LATENT),
    }
    experts = _experts(f"{layer}mlp.", "shared_experts") | {f"{layer}mlp.gate.e_score_correction_bias": (EXPERTS,)}
    config = DeepseekV3Config(
        **_COMMON, **_ROUTED, num_key_value_heads=HEADS, n_routed_experts=EXPERTS, n_shared_experts=1, n_group=2,
        topk_group=1, kv_lora_rank=LATENT, q_lora_rank=QUERY_LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
        v_head_dim=VALUE, first_k_dense_replace=1,
    )  # fmt: skip
    return MtpCheckpoint(config, _of_one_more_layer() | attention | experts, {"num_nextn_predict_layers": 1})


def glm4_moe() -> MtpCheckpoint:
    from transformers import Glm4MoeConfig

    layer = f"model.layers.{LAYERS}."
    attention = _attention(f"{layer}self_attn.", biases=("q_proj", "k_proj", "v_proj"))
    attention |= _norms(f"{layer}self_attn.", "q_norm", "k_norm", size=HEAD_DIM)
    experts = _experts(f"{layer}mlp.", "shared_experts") | {f"{layer}mlp.gate.e_score_correction_bias": (EXPERTS,)}
    config = Glm4MoeConfig(
        **_COMMON, **_ROUTED, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, n_routed_experts=EXPERTS,
        n_shared_experts=1, use_qk_norm=True, attention_bias=True, first_k_dense_replace=1,
    )  # fmt: skip
    return MtpCheckpoint(config, _of_one_more_layer() | attention | experts, {"num_nextn_predict_layers": 1})


def _qwen_shapes(mlp: Shapes) -> Shapes:
    layer = "mtp.layers.0."
    return {
        **_norms("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        "mtp.fc.weight": (SIZE, 2 * SIZE),
        **_norms(layer, "input_layernorm", "post_attention_layernorm"),
        **_attention(f"{layer}self_attn.", query_parts=2),
        **_norms(f"{layer}self_attn.", "q_norm", "k_norm", size=HEAD_DIM),
        **{f"{layer}mlp.{name}": shape for name, shape in mlp.items()},
    }


def qwen3_next() -> MtpCheckpoint:
    from transformers import Qwen3NextConfig

    mlp = _experts("", "shared_expert") | {"shared_expert_gate.weight": (1, SIZE)}
    config = Qwen3NextConfig(
        **_COMMON, **_ROUTED, **_LINEAR, num_experts=EXPERTS, shared_expert_intermediate_size=EXPERT_INNER
    )
    return MtpCheckpoint(config, _qwen_shapes(mlp), {"num_nextn_predict_layers": 1}, has_offset_norms=True)


_QWEN3_5_FLAGS = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


def qwen3_5() -> MtpCheckpoint:
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**_COMMON, **_LINEAR)
    return MtpCheckpoint(config, _qwen_shapes(_gated_mlp("", INNER)), _QWEN3_5_FLAGS, has_offset_norms=True)


def qwen3_5_moe() -> MtpCheckpoint:
    """With all experts in one tensor."""
    from transformers import Qwen3_5MoeTextConfig

    mlp = {
        "gate.weight": (EXPERTS, SIZE),
        "experts.gate_up_proj": (EXPERTS, 2 * EXPERT_INNER, SIZE),
        "experts.down_proj": (EXPERTS, SIZE, EXPERT_INNER),
        **_gated_mlp("shared_expert.", EXPERT_INNER),
        "shared_expert_gate.weight": (1, SIZE),
    }
    config = Qwen3_5MoeTextConfig(
        **{key: value for key, value in _COMMON.items() if key != "intermediate_size"}, **_ROUTED, **_LINEAR,
        num_experts=EXPERTS, shared_expert_intermediate_size=EXPERT_INNER,
    )  # fmt: skip
    return MtpCheckpoint(config, _qwen_shapes(mlp), _QWEN3_5_FLAGS, has_offset_norms=True)


def mimo() -> MtpCheckpoint:
    """A Qwen2 target, which MiMo is but for its head."""
    from transformers import Qwen2Config

    layer = "model.mtp_layers.0."
    shapes = {
        **_norms(layer, "token_layernorm", "hidden_layernorm", "final_layernorm"),
        **_norms(layer, "input_layernorm", "post_attention_layernorm"),
        f"{layer}input_proj.weight": (SIZE, 2 * SIZE),
        **_attention(f"{layer}self_attn.", biases=("q_proj", "k_proj", "v_proj")),
        **_gated_mlp(f"{layer}mlp.", INNER),
    }
    # Qwen2 has no head_dim of its own.
    config = Qwen2Config(**_COMMON, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM)
    return MtpCheckpoint(config, shapes, {"num_nextn_predict_layers": 1})

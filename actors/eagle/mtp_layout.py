"""Where checkpoints keep their multi-token prediction (MTP) head, and what of config.json changes it.

A head has norms of the next token's embedding and of the target's feature, a projection of the two to one row, a
decoder layer of the target's family, and a norm of its output. These layouts are read:

- DeepSeek-V3 and GLM-4.5 (GLM-4-MoE): one more entry of `model.layers`, which holds all of it, often with copies of
  the target's embeddings and output layer (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2);
- Qwen3-Next and Qwen3.5: `mtp.*`;
- MiMo: `model.mtp_layers.*`, which projects the feature before the embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from actors.errors import ModelError

# Keys of config.json with these in their names speak of the head.
_OF_HEADS = ("mtp", "nextn")
# Those that do not change what the head computes: the checkpoint says how many layers it has.
_DESCRIPTIVE = {"mtp_loss_scaling_factor", "mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers"}


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Published names of a head's tensors."""

    name: str
    embedding_norm: str
    feature_norm: str
    projection: str  # [h, 2h]
    output_norm: str
    block: str  # prefix of the decoder layer
    prefix: str  # of the names of the head's tensors
    other_blocks: str | None = None  # prefix of the decoder layers of further heads, too
    projects_feature_first: bool = False  # columns of `projection`: feature before embedding
    embeddings: str | None = None  # of a copy of the target's embeddings, which may be missing
    output_layer: str | None = None  # of a copy of the target's output layer, which may be missing

    @property
    def own(self) -> tuple[str, ...]:
        """Tensors that every head has beside its decoder layer."""
        return self.embedding_norm, self.feature_norm, self.projection, self.output_norm

    def head_keys(self, keys: Collection[str]) -> list[str]:
        """Those of `keys` that belong to this head, known or not."""
        others = self.other_blocks
        return [
            key
            for key in keys
            if key.startswith(self.block)
            or (key.startswith(self.prefix) and not (others is not None and key.startswith(others)))
        ]

    def block_keys(self, keys: Collection[str]) -> list[str]:
        """Those of `keys` that belong to the decoder layer."""
        others = {*self.own, self.embeddings, self.output_layer}
        return [key for key in keys if key.startswith(self.block) and key not in others]


def layouts(num_layers: int) -> tuple[MtpLayout, ...]:
    """All layouts that are read, of a target with `num_layers` layers. If there are several heads, the first is read:
    it drafts all depths."""
    after, inner, mimo = f"model.layers.{num_layers}.", "mtp.layers.0.", "model.mtp_layers.0."
    return (
        MtpLayout(
            "DeepSeek-V3",
            embedding_norm=f"{after}enorm.weight",
            feature_norm=f"{after}hnorm.weight",
            projection=f"{after}eh_proj.weight",
            output_norm=f"{after}shared_head.norm.weight",
            block=after,
            prefix=after,
            embeddings=f"{after}embed_tokens.weight",
            output_layer=f"{after}shared_head.head.weight",
        ),
        MtpLayout(
            "Qwen3-Next",
            embedding_norm="mtp.pre_fc_norm_embedding.weight",
            feature_norm="mtp.pre_fc_norm_hidden.weight",
            projection="mtp.fc.weight",
            output_norm="mtp.norm.weight",
            block=inner,
            prefix="mtp.",
            other_blocks="mtp.layers.",
        ),
        MtpLayout(
            "MiMo",
            embedding_norm=f"{mimo}token_layernorm.weight",
            feature_norm=f"{mimo}hidden_layernorm.weight",
            projection=f"{mimo}input_proj.weight",
            output_norm=f"{mimo}final_layernorm.weight",
            block=mimo,
            prefix=mimo,
            projects_feature_first=True,
        ),
    )


def find_layout(model: str, num_layers: int, keys: Collection[str]) -> MtpLayout:
    """The layout of the head among the keys of a checkpoint. model: for errors. Raises ModelError if there is none."""
    known = layouts(num_layers)
    for layout in known:
        if layout.projection in keys:
            return layout
    named = ", ".join(repr(layout.projection) for layout in known)
    raise ModelError(f"model {model!r}: the checkpoint has no MTP head, which would have one of the keys {named}")


def check_flags(model: str, data: Mapping[str, Any]) -> None:
    """Raises ModelError for a key of config.json that says something of the head which is not implemented."""
    for place, values in (("", data), ("text_config.", data.get("text_config") or {})):
        for key, value in values.items():
            if any(part in key for part in _OF_HEADS) and key not in _DESCRIPTIVE and value not in (None, False):
                raise ModelError(
                    f"model {model!r}: config.json: {place}{key} is {value!r}, which is not implemented for MTP heads; "
                    "remove it only if it does not change what the head computes"
                )


def block_config(model: str, text: PretrainedConfig, *, has_experts: bool) -> PretrainedConfig:
    """Configuration of a model of the target's family whose only layer is that of the head, with one token. text: the
    target's. Raises ModelError for a target with sliding windows, which may be meant for the head as well."""
    types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) if types is None else None
    if window or "sliding_attention" in (types or ()):
        raise ModelError(
            f"model {model!r}: layers have sliding windows of {text.sliding_window} tokens, which are not implemented "
            "for MTP heads"
        )
    config = copy.deepcopy(text)
    vars(config).pop("quantization_config", None)
    changed = {
        "num_hidden_layers": 1,
        "vocab_size": 1,
        "tie_word_embeddings": False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    of_layer = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
    }
    changed |= {name: value for name, value in of_layer.items() if getattr(text, name, None) is not None}
    for name, value in changed.items():
        setattr(config, name, value)
    return config

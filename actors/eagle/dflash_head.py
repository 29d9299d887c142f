"""DFlash heads, which guess a block of tokens in one forward (Chen et al. 2026, arXiv:2602.06036).

The layers are those of Qwen3. At positions that the target has computed, keys and values are computed only from the
target's projected features, which are the same in every layer. The rows of a block (the last token and masks) attend to
these positions and to one another. The head uses the target's embeddings and output layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from actors.eagle.draft_head import MaskRows, OwnLayersHead
from actors.eagle.head_layout import check_vocabulary, checked_mask_token
from actors.eagle.head_settings import unknown_rotation
from actors.errors import ModelError

ARCHITECTURE = "DFlashDraftModel"
# Keys of config.json, other than those of Qwen3, that do not affect the head's outputs.
_DESCRIPTIVE = {"_name_or_path", "auto_map", "max_window_layers", "torch_dtype", "transformers_version"}
_OWN = {"block_size", "dflash_config", "num_target_layers", "rope_theta", "rope_scaling"}
_OF_BLOCK = {"block_size", "mask_token_id", "target_layer_ids"}  # keys of dflash_config
# What it may say of DFlash as published.
_PLAIN = {"causal": False, "projector_type": "dflash", "shift_label": False, "use_swa": False}
_MIN_BLOCK = 2  # the last token and one mask


@dataclass(frozen=True, slots=True)
class DFlashLayout:
    config: Qwen3Config  # of the layers
    masks: MaskRows
    feature_layers: tuple[int, ...]  # layers of the target whose inputs are read


class DFlashLayer(nn.Module):
    """A Qwen3 decoder layer whose attention reads the target's features where there are some."""

    def __init__(self, config: Qwen3Config, index: int) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        features: Tensor,
        drafted: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: dict[str, Any],
    ) -> Tensor:
        """hidden and features [batch, rows, h], drafted bool [batch, rows, 1] -> [batch, rows, h]. Of the other rows
        only keys and values matter."""
        attended = torch.where(drafted, self.input_layernorm(hidden), features)
        hidden = hidden + self.self_attn(attended, position_embeddings=rotary, **attention)[0]
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class DFlashHead(OwnLayersHead):
    """Row t has the target's feature of position t, or is a row of a block at position t. Outputs are normed."""

    def __init__(self, layout: DFlashLayout) -> None:
        super().__init__()
        self.masks, self._feature_layers = layout.masks, layout.feature_layers
        self.config = config = layout.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(layout.feature_layers) * size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps)
        self.layers = nn.ModuleList(DFlashLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(size, eps)
        self.embed_tokens = self.lm_head = self.draft_ids = None
        with torch.device("cpu"):  # not on the meta device, unlike the weights
            self.rotary_emb = Qwen3RotaryEmbedding(config)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._feature_layers

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, drafted: Tensor | None = None, **attention: Any
    ) -> Tensor:
        assert drafted is not None
        rotary = self.rotary_emb(embeddings, positions)
        attention.setdefault("attention_mask", None)
        context, hidden = self.hidden_norm(self.fc(features)), embeddings
        for layer in self.layers:
            hidden = layer(hidden, context, drafted[..., None], rotary, attention)
        output: Tensor = self.norm(hidden)
        return output

    def logits(self, hidden: Tensor, target_head: nn.Module) -> Tensor:
        logits: Tensor = target_head(hidden)
        return logits


def read_dflash_layout(file: Path, data: Mapping[str, Any], target: PretrainedConfig) -> DFlashLayout:
    """The layout of a head for a target (its text configuration). file: config.json, for errors; data: what it holds.
    Raises ModelError for what is not implemented, and for a head of another target."""
    block = data.get("dflash_config")
    if not isinstance(block, dict):
        raise ModelError(f"{file}: dflash_config is {block!r}; it must be an object")
    try:
        config = Qwen3Config.from_dict({key: data[key] for key in data.keys() - {"model_type", "dtype"}})
        Qwen3RotaryEmbedding(config)
    except Exception as error:
        raise ModelError(f"{file}: cannot be used: {' '.join(str(error).split())[:300]}") from None
    _refuse_unknown(file, data, block)
    _check_target(file, config, data.get("num_target_layers"), target)
    token = checked_mask_token(file, "dflash_config.mask_token_id", block.get("mask_token_id"), target.vocab_size)
    rows = data.get("block_size") or block.get("block_size")
    if not isinstance(rows, int) or rows < _MIN_BLOCK:
        raise ModelError(f"{file}: block_size is {rows!r}; it must be an integer of {_MIN_BLOCK} or more")
    layers = _feature_layers(file, block.get("target_layer_ids"), target.num_hidden_layers)
    return DFlashLayout(config, MaskRows(token, is_block=True, most=rows - 1), layers)


def _refuse_unknown(file: Path, data: Mapping[str, Any], block: Mapping[str, Any]) -> None:
    """Raises ModelError for a key that may change what the head computes. block: dflash_config"""
    known = set(Qwen3Config().to_dict()) | _DESCRIPTIVE | _OWN
    unknown = {key: data[key] for key in data.keys() - known if data[key] is not None}
    others = {key: block[key] for key in block.keys() - _OF_BLOCK if block[key] not in (None, _PLAIN.get(key))}
    unknown |= {f"dflash_config.{key}": value for key, value in others.items()}
    unknown |= dict(unknown_rotation(data))
    if data.get("use_sliding_window"):
        unknown["use_sliding_window"] = True
    if set(data.get("layer_types") or ()) - {"full_attention"}:
        unknown["layer_types"] = data["layer_types"]
    for key, value in unknown.items():
        raise ModelError(f"{file}: {key} is {value!r}, which is not implemented for DFlash heads")


def _check_target(file: Path, head: Qwen3Config, num_layers: Any, target: PretrainedConfig) -> None:
    """Raises ModelError for a head that was made for another target. num_layers: of its target; None: not told."""
    if head.hidden_size != target.hidden_size:
        raise ModelError(f"{file}: hidden_size is {head.hidden_size}; the target's hidden_size is {target.hidden_size}")
    if num_layers not in (None, target.num_hidden_layers):
        raise ModelError(f"{file}: num_target_layers is {num_layers!r}; the target has {target.num_hidden_layers}")
    check_vocabulary(file, head.vocab_size, target.vocab_size)


def _feature_layers(file: Path, ids: Any, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read. ids: layers whose outputs are read; num_layers: of the target."""
    is_list = isinstance(ids, list) and bool(ids)
    if not is_list or not all(type(index) is int and 0 <= index < num_layers - 1 for index in ids):
        raise ModelError(
            f"{file}: dflash_config.target_layer_ids is {ids!r}; the target has {num_layers} layers, and all but the "
            "last can be read"
        )
    return tuple(index + 1 for index in ids)

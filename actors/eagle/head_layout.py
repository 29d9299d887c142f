"""What a published head's config.json and the names of its tensors say of its shape.

Layouts that are read: EAGLE-1 and -2 (`layers.*`), EAGLE-3 (`midlayer.*`, also with the `target_hidden_size` of a
larger target), and the `speculators` format of EAGLE-3 (`layers.*` with a nested `transformer_layer_config`), with the
norms of EAGLE-3.1; P-EAGLE is EAGLE-3 with `mask_hidden` and the id of a mask token. A key of config.json that is not
known here may change what a head computes, so it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from actors.errors import ModelError

HeadKind = Literal["eagle", "eagle3"]

_MIN_TARGET_LAYERS = 3  # the default layers are 2, L / 2 and L - 3
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MOST_PADDING = 1024  # rows by which vocabularies of one tokenizer may differ

# Keys of config.json that do not change what a head computes, or that its tensors say better.
_DESCRIPTIVE = {
    "_name_or_path", "architectures", "attention_bias", "auto_map", "bias", "draft_vocab_size", "dtype",
    "embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init", "max_window_layers", "model_type",
    "qkv_bias", "rope_scaling", "rope_theta", "speculators_config", "speculators_model_type", "speculators_version",
    "torch_dtype", "transformer_layer_config", "transformers_version",
}  # fmt: skip
_FLAGS = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
_OTHERS = {"target_hidden_size", _LAYER_IDS, "eagle_config", "use_aux_hidden_state"}
MASK_HIDDEN = "mask_hidden"  # the tensor that tells P-EAGLE
_MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")
# Of P-EAGLE: that it is one, and how it was trained.
_PARALLEL = {*_MASK_TOKENS, "parallel_drafting", "num_depths", "down_sample_ratio", "down_sample_ratio_min"}
_SPECULATORS = (None, "eagle", "eagle3", "peagle")  # values of `speculators_model_type` that are read


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The shape of a head. h: its hidden size; f: that of the target's features."""

    kind: HeadKind
    config: LlamaConfig  # of its decoder layers
    feature_size: int  # f
    # EAGLE-3: layers of the target whose inputs are read; its number of layers stands for the last one's output.
    # None: the input of the target's output layer.
    feature_layers: tuple[int, ...] | None
    vocab_size: int | None = None  # columns of an own output layer; None: the target's is used
    has_own_embedding: bool = False
    has_bias: bool = False  # of `fc`
    norm_before_residual: bool = False  # the first layer adds to the normed feature
    norm_before_fc: bool = False  # one norm over all features
    fc_norm: bool = False  # a norm for each layer's feature (EAGLE-3.1)
    norm_output: bool = False  # the normed output is the next feature (EAGLE-3.1)
    mask_token: int | None = None  # P-EAGLE: the token of rows without a feature

    @property
    def fused_size(self) -> int:
        """Columns that `fc` reads."""
        if self.feature_layers is None:
            return self.config.hidden_size + self.feature_size
        return len(self.feature_layers) * self.feature_size

    @staticmethod
    def eagle3(config: LlamaConfig, num_target_layers: int, vocab_size: int) -> HeadLayout:
        """EAGLE-3 as first published, for a target of the same hidden size."""
        layers = _default_layers(num_target_layers)
        return HeadLayout("eagle3", config, config.hidden_size, layers, vocab_size=vocab_size)


def renamed(key: str) -> str:
    """The name in `EagleHead` of a published tensor."""
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


def read_layout(file: Path, data: Mapping[str, Any], target: PretrainedConfig, keys: Collection[str]) -> HeadLayout:
    """The layout of a head for a target (its text configuration). file: config.json, for errors; data: what it holds;
    keys: published names of the head's tensors. Raises ModelError for what is not implemented."""
    kind_of_file = data.get("speculators_model_type")
    if kind_of_file not in _SPECULATORS:
        raise ModelError(f"{file}: speculators_model_type is {kind_of_file!r}, which is not implemented")
    is_eagle3 = any(key.startswith("midlayer.") or key == "layers.0.hidden_norm.weight" for key in keys)
    kind: HeadKind = "eagle3" if is_eagle3 or kind_of_file in ("eagle3", "peagle") else "eagle"
    is_parallel = kind == "eagle3" and MASK_HIDDEN in keys
    nested = data.get("transformer_layer_config")
    shape = {**nested, "target_hidden_size": data.get("target_hidden_size")} if nested else dict(data)
    _refuse_unknown(file, kind, data, nested or {}, _PARALLEL if is_parallel else set())
    feature_size = shape.get("target_hidden_size") or shape.get("hidden_size")
    if feature_size != target.hidden_size:
        name = "target_hidden_size" if shape.get("target_hidden_size") else "hidden_size"
        raise ModelError(f"{file}: {name} is {feature_size!r}; the target's hidden_size is {target.hidden_size}")
    layout = HeadLayout(
        kind,
        _layer_config(file, shape),
        int(feature_size),
        feature_layers=None,
        has_own_embedding="embed_tokens.weight" in keys,
        has_bias="fc.bias" in keys,
    )
    size = layout.config.hidden_size
    if abs(layout.config.vocab_size - target.vocab_size) > _MOST_PADDING:
        limit = f"the target's is {target.vocab_size}, and padding explains {_MOST_PADDING} rows at most"
        raise ModelError(f"{file}: vocab_size is {layout.config.vocab_size}; {limit}")
    if size != target.hidden_size and not layout.has_own_embedding:
        raise ModelError(
            f"{file}: hidden_size is {size} and the target's {target.hidden_size}, so the checkpoint needs the key "
            "'embed_tokens.weight', which it lacks"
        )
    if kind == "eagle":
        return layout
    layout = replace(
        layout,
        feature_layers=_feature_layers(file, data, target.num_hidden_layers),
        vocab_size=int(data.get("draft_vocab_size") or layout.config.vocab_size),
        norm_before_residual=bool(data.get("norm_before_residual")),
        norm_before_fc=bool(data.get("norm_before_fc")),
        fc_norm=bool(data.get("fc_norm")),
        norm_output=bool(data.get("norm_output")),
    )
    if is_parallel:
        num_ids = layout.config.vocab_size if layout.has_own_embedding else target.vocab_size
        layout = replace(layout, mask_token=_mask_token(file, data, num_ids))
    elif kind_of_file == "peagle":
        raise ModelError(f"{file}: speculators_model_type is 'peagle'; the checkpoint lacks the key {MASK_HIDDEN!r}")
    if layout.fused_size == size:
        raise ModelError(
            f"{file}: {len(layout.feature_layers or ())} features of size {feature_size} are as wide as hidden_size, "
            f"{size}; they could not be told from the head's own outputs"
        )
    return layout


def _mask_token(file: Path, data: Mapping[str, Any], num_ids: int) -> int:
    """num_ids: rows of the embedding that is used."""
    found = {key: data[key] for key in _MASK_TOKENS if data.get(key) is not None}
    if not found:
        raise ModelError(
            f"{file}: the checkpoint has the key {MASK_HIDDEN!r}, so one of {', '.join(_MASK_TOKENS)} must be there"
        )
    if len(set(found.values())) > 1:
        raise ModelError(f"{file}: {' and '.join(found)} differ: {found}")
    key, token = next(iter(found.items()))
    return checked_mask_token(file, key, token, num_ids)


def checked_mask_token(file: Path, key: str, token: Any, num_ids: int) -> int:
    """The mask token that a key of config.json names. Raises ModelError unless it is an id below `num_ids`."""
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < num_ids:
        raise ModelError(f"{file}: {key} is {token!r}; it must be an id below {num_ids}")
    return token


def _refuse_unknown(
    file: Path, kind: HeadKind, data: Mapping[str, Any], nested: Mapping[str, Any], more: Collection[str]
) -> None:
    """Raises ModelError for a key that may change what the head computes. more: keys that are known as well."""
    known = set(LlamaConfig().to_dict()) | _DESCRIPTIVE | set(more)
    if kind == "eagle3":
        known |= _FLAGS | _OTHERS
    for place, values in (("", data), ("transformer_layer_config.", nested)):
        for key, value in values.items():
            is_unused = key == "sliding_window" and values.get("use_sliding_window") is False
            if key not in known and value not in (None, False) and not is_unused:
                raise ModelError(
                    f"{file}: {place}{key} is {value!r}, which is not implemented for {_name(kind)} heads; remove it "
                    "only if it does not change what the head computes"
                )
        if "sliding_attention" in (values.get("layer_types") or ()):
            raise ModelError(f"{file}: {place}layer_types has sliding windows, which are not implemented for heads")
    eagle_config = data.get("eagle_config") or {}
    for key in eagle_config.keys() - {_LAYER_IDS, "use_aux_hidden_state"}:
        raise ModelError(f"{file}: eagle_config.{key} is {eagle_config[key]!r}, which is not implemented")
    for values in (data, eagle_config):
        if kind == "eagle3" and values.get("use_aux_hidden_state") is False:
            raise ModelError(f"{file}: use_aux_hidden_state is False, which is not implemented for EAGLE-3 heads")


def _name(kind: HeadKind) -> str:
    return "EAGLE-3" if kind == "eagle3" else "EAGLE-1 and -2"


def _layer_config(file: Path, shape: Mapping[str, Any]) -> LlamaConfig:
    """The published heads are Llama layers whatever the target is."""
    kept = {key: value for key, value in shape.items() if key not in ("model_type", "architectures", "dtype")}
    try:
        config = LlamaConfig.from_dict(kept)
        config.attention_bias = False  # the tensors say which biases there are
        LlamaRotaryEmbedding(config)
    except Exception as error:
        raise ModelError(f"{file}: cannot be used: {' '.join(str(error).split())[:300]}") from None
    return config


def _default_layers(num_target_layers: int) -> tuple[int, ...]:
    return (2, num_target_layers // 2, num_target_layers - 3)


def _feature_layers(file: Path, data: Mapping[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read.

    Checkpoints count in two ways: layers whose inputs are read, as the default does, or layers whose outputs are read.
    Nobody reads the input of layer 1 in the first way, or the embeddings in the second, so a list that begins with 1
    counts outputs.
    """
    ids = data.get(_LAYER_IDS) or (data.get("eagle_config") or {}).get(_LAYER_IDS)
    if not ids:
        if num_target_layers < _MIN_TARGET_LAYERS:
            raise ModelError(
                f"{file}: the target has {num_target_layers} layers; EAGLE-3 reads the inputs of three, so at least "
                f"{_MIN_TARGET_LAYERS} are needed"
            )
        return _default_layers(num_target_layers)
    if not all(isinstance(index, int) for index in ids):
        raise ModelError(f"{file}: {_LAYER_IDS} is {ids!r}; it must be a list of integers")
    layers = tuple(index + 1 if ids[0] == 1 else index for index in ids)
    if min(layers) < 0 or max(layers) > num_target_layers:
        raise ModelError(f"{file}: {_LAYER_IDS} is {ids!r}; the target has {num_target_layers} layers")
    return layers

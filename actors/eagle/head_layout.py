"""What a published head's config.json and the names of its tensors say of its shape.

Layouts that are read: EAGLE-1 and -2 (`layers.*`), EAGLE-3 (`midlayer.*`, also with the `target_hidden_size` of a
larger target), and the `speculators` format of EAGLE-3 (`layers.*` with a nested `transformer_layer_config`), with the
norms of EAGLE-3.1; P-EAGLE is EAGLE-3 with `mask_hidden` and the id of a mask token. `head_settings` says which
values of config.json are read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from actors.eagle.head_settings import MASK_TOKENS, HeadKind, HeadSettings, check_settings, read_settings
from actors.errors import ModelError

logger = logging.getLogger(__name__)

_MIN_TARGET_LAYERS = 3  # the default layers are 2, L / 2 and L - 3
_MOST_PADDING = 1024  # rows by which vocabularies of one tokenizer may differ

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_HIDDEN = "mask_hidden"  # the tensor that tells P-EAGLE


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
    settings = read_settings(file, data)
    is_eagle3 = any(key.startswith("midlayer.") or key == "layers.0.hidden_norm.weight" for key in keys)
    kind: HeadKind = "eagle3" if is_eagle3 or settings.speculators_model_type in ("eagle3", "peagle") else "eagle"
    is_parallel = kind == "eagle3" and MASK_HIDDEN in keys
    check_settings(file, kind, data, settings, is_parallel)
    nested = data.get("transformer_layer_config")
    shape = {**nested, "target_hidden_size": data.get("target_hidden_size")} if nested else dict(data)
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
    check_vocabulary(file, layout.config.vocab_size, target.vocab_size)
    if size != target.hidden_size and not layout.has_own_embedding:
        raise ModelError(
            f"{file}: hidden_size is {size} and the target's {target.hidden_size}, so the checkpoint needs the key "
            "'embed_tokens.weight', which it lacks"
        )
    if kind == "eagle":
        return layout
    layout = replace(
        layout,
        feature_layers=_feature_layers(file, settings, target.num_hidden_layers),
        vocab_size=settings.draft_vocab_size or layout.config.vocab_size,
        norm_before_residual=bool(settings.norm_before_residual),
        norm_before_fc=bool(settings.norm_before_fc),
        fc_norm=bool(settings.fc_norm),
        norm_output=bool(settings.norm_output),
    )
    if is_parallel:
        num_ids = layout.config.vocab_size if layout.has_own_embedding else target.vocab_size
        layout = replace(layout, mask_token=_mask_token(file, data, num_ids))
    if layout.fused_size == size:
        raise ModelError(
            f"{file}: {len(layout.feature_layers or ())} features of size {feature_size} are as wide as hidden_size, "
            f"{size}; they could not be told from the head's own outputs"
        )
    return layout


def check_vocabulary(file: Path, vocab_size: int, of_target: int) -> None:
    """Raises ModelError for vocabularies of sizes that padding does not explain."""
    if abs(vocab_size - of_target) > _MOST_PADDING:
        limit = f"the target's is {of_target}, and padding explains {_MOST_PADDING} rows at most"
        raise ModelError(f"{file}: vocab_size is {vocab_size}; {limit}")


def _mask_token(file: Path, data: Mapping[str, Any], num_ids: int) -> int:
    """num_ids: rows of the embedding that is used."""
    found = {key: data[key] for key in MASK_TOKENS if data.get(key) is not None}
    if not found:
        raise ModelError(
            f"{file}: the checkpoint has the key {MASK_HIDDEN!r}, so one of {', '.join(MASK_TOKENS)} must be there"
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


def _layer_config(file: Path, shape: Mapping[str, Any]) -> LlamaConfig:
    """Published heads have Llama layers for any target."""
    kept = {key: value for key, value in shape.items() if key not in ("model_type", "architectures", "dtype")}
    try:
        config = LlamaConfig.from_dict(kept)
        config.attention_bias = False  # the tensors say which biases there are
        LlamaRotaryEmbedding(config)
        if config.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act is {config.hidden_act!r}, which transformers does not know")
    except Exception as error:
        raise ModelError(f"{file}: cannot be used: {' '.join(str(error).split())[:300]}") from None
    return config


def _default_layers(num_target_layers: int) -> tuple[int, ...]:
    return (2, num_target_layers // 2, num_target_layers - 3)


def _feature_layers(file: Path, settings: HeadSettings, num_target_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read.

    Checkpoints count in two ways: layers whose inputs are read, as the default and vLLM do, or layers whose outputs are
    read, as trainers for SGLang do. Nobody reads the input of layer 1, so a list that begins with 1 counts outputs; in
    other lists SGLang and vLLM count inputs. One of those is refused: its middle and last layer are the default ones by
    their outputs, so it may be meant either way, and wrong features cost drafts without any error. The `speculators`
    format tells the way: it counts as vLLM does, which it is written for.
    """
    ids = settings.eagle_aux_hidden_state_layer_ids
    if not ids:
        if num_target_layers < _MIN_TARGET_LAYERS:
            raise ModelError(
                f"{file}: the target has {num_target_layers} layers; EAGLE-3 reads the inputs of three, so at least "
                f"{_MIN_TARGET_LAYERS} are needed"
            )
        default = _default_layers(num_target_layers)
        logger.info("%s: features: inputs of layers %s (the default)", file, list(default))
        return default
    counts_outputs = ids[0] == 1
    layers = tuple(index + 1 if counts_outputs else index for index in ids)
    if min(layers) < 0 or max(layers) > num_target_layers:
        raise ModelError(f"{file}: {_LAYER_IDS} is {ids!r}; the target has {num_target_layers} layers")
    is_told = settings.speculators_model_type is not None
    first, middle, last = _default_layers(num_target_layers)
    if ids == [first, middle - 1, last - 1] and not is_told:
        inputs = [index + 1 for index in ids]
        raise ModelError(
            f"{file}: {_LAYER_IDS} is {ids!r}; it may count layers whose outputs are read, as {middle - 1} and "
            f"{last - 1} of the target's {num_target_layers} layers suggest, or those whose inputs are read, as its "
            f"first layer does: write {inputs!r} if outputs are meant, or 'speculators_model_type': 'eagle3' at the "
            "top of the file if inputs are"
        )
    kind = "outputs" if counts_outputs else "inputs"
    if counts_outputs:
        reason = "begins with 1"
    else:
        reason = "is in the speculators format" if is_told else "does not begin with 1"
    logger.info("%s: features: %s of layers %s (%s %s)", file, kind, ids, _LAYER_IDS, reason)
    return layers

"""Reads the multi-token prediction head of a target from the target's own checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from actors.eagle.mtp_head import MtpHead
from actors.eagle.mtp_layout import MtpLayout, block_config, check_flags, find_layout
from actors.errors import ModelError
from actors.models.loader import generation_problem
from actors.models.quiet import quiet_transformers
from actors.models.source import ModelSource
from actors.models.stored_quantization import stored_quantization, unify_dtype

_LAYER, _NORM = "model.layers.0.", "model.norm.weight"  # names in the model that holds the head's decoder layer
_EMBEDDINGS, _OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"  # of every model
_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)  # computed by the layer itself
_FP8_SCALES = "_scale_inv"  # ends the name of the scales of a weight in fp8
_QUANTIZED_ENDINGS = (_FP8_SCALES, "_scale", "_packed", ".qweight", ".absmax")


def check_mtp_head(source: ModelSource, target: PretrainedConfig) -> None:
    """Raises ModelError for a checkpoint without a head in a layout that is read. Reads no weights."""
    check_flags(source.spec, source.read_json("config.json"))
    with ExitStack() as opened:
        find_layout(source.spec, int(target.get_text_config().num_hidden_layers), StoredTensors(source, opened).keys)


def load_mtp_head(
    source: ModelSource, target: PretrainedConfig, dtype: str = "float32", device: str = "cpu"
) -> MtpHead:
    """Load the head that a target's checkpoint has beside it. target: the configuration of the checkpoint.

    Raises ModelError with file, key, shape and expected shape for a tensor that is missing, unknown or of another
    size, and for a checkpoint without a head or with one that is not implemented.
    """
    text = target.get_text_config()
    check_flags(source.spec, source.read_json("config.json"))
    with ExitStack() as opened:
        stored = StoredTensors(source, opened)
        layout = find_layout(source.spec, int(text.num_hidden_layers), stored.keys)
        names = [key for key in layout.head_keys(stored.keys) if not key.endswith(_IGNORED_ENDINGS)]
        block_names = layout.block_keys(names)
        has_experts = any(key.startswith(f"{layout.block}mlp.experts.") for key in block_names)
        config = block_config(source.spec, text, has_experts=has_experts)
        problem = generation_problem(config)
        if problem is not None:
            raise ModelError(f"model {source.spec!r}: {config.model_type}, the family of its MTP head, {problem}")
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        published = {_in_model(layout, key): key for key in (*block_names, layout.output_norm)}
        quantization = _quantization(source, target, layout, names)
        weights = [key for key in names if quantization is None or not key.endswith(_FP8_SCALES)]
        _check_keys(stored, layout, weights, _expected(kind, config, published, layout), int(config.hidden_size))
        if quantization is not None:
            config.quantization_config = quantization
        model = _load_block(source, kind, config, stored, published, dtype, device)
        head = MtpHead(model, projects_feature_first=layout.projects_feature_first)
        for part, key in (
            (head.embedding_norm, layout.embedding_norm),
            (head.feature_norm, layout.feature_norm),
            (head.projection, layout.projection),
        ):
            part.weight.data.copy_(stored.read(key))
        _add_own_vocabulary(head, stored, layout, model)
    return head.eval().requires_grad_(False)


class StoredTensors:
    """The tensors of a checkpoint, each of which is read when it is asked for."""

    def __init__(self, source: ModelSource, opened: ExitStack) -> None:
        """opened: closes the files. Raises ModelError unless the weights are safetensors that can be read."""
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in source.weight_files():
            if path.suffix != ".safetensors":
                raise ModelError(f"{path}: MTP heads are read from safetensors alone")
            try:
                file = opened.enter_context(safe_open(path, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), (path, file))
            except Exception as error:
                raise ModelError(f"{path}: cannot be read: {' '.join(str(error).split())[:300]}") from None

    @property
    def keys(self) -> Collection[str]:
        return self._files.keys()

    def file(self, key: str) -> Path:
        return self._files[key][0]

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._files[key][1].get_slice(key).get_shape())

    def read(self, key: str) -> Tensor:
        tensor: Tensor = self._files[key][1].get_tensor(key)
        return tensor


def _in_model(layout: MtpLayout, key: str) -> str:
    """The name of a published tensor in a checkpoint of the model that holds the decoder layer."""
    return _NORM if key == layout.output_norm else _LAYER + key.removeprefix(layout.block)


def _quantization(
    source: ModelSource, target: PretrainedConfig, layout: MtpLayout, names: Collection[str]
) -> dict[str, Any] | None:
    """How the decoder layer is quantized, as a `quantization_config` of a model with that layer alone; None: not at
    all, as in many checkpoints whose other layers are. Raises ModelError for other formats than fp8."""
    stored = stored_quantization(target)
    quantized = [key for key in names if key.endswith(_QUANTIZED_ENDINGS)]
    if stored is None or not quantized:
        return None
    method = stored.get("quant_method")
    if method != "fp8":
        raise ModelError(
            f"model {source.spec!r}: its MTP head is quantized with {method}, as key {quantized[0]!r} says; whole "
            "weights and fp8 are read"
        )
    read_whole = {*layout.own, layout.embeddings, layout.output_layer}
    for key in quantized:
        if key.removesuffix(_FP8_SCALES) in read_whole:
            raise ModelError(
                f"model {source.spec!r}: key {key!r}: an MTP head may have fp8 in its decoder layer alone; its norms, "
                "projection, embeddings and output layer are read whole"
            )
    whole = stored.get("modules_to_not_convert") or []
    return {**stored, "modules_to_not_convert": [name.replace(layout.block, _LAYER) for name in whole]}


def _expected(
    kind: type[PreTrainedModel], config: PretrainedConfig, published: Mapping[str, str], layout: MtpLayout
) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoder layer and the last norm, by published names."""
    with quiet_transformers(), torch.device("meta"):
        model = kind._from_config(config)
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in (_EMBEDDINGS, _OUTPUT_LAYER)}
    # Experts are published one by one, or together under the model's own names.
    others = revert_weight_conversion(model, {name: own[name] for name in own if name not in published})
    shapes = {name: own[name].shape for name in own if name in published}
    shapes |= {name: tensor.shape for name, tensor in others.items()}
    return {
        layout.output_norm if name == _NORM else layout.block + name.removeprefix(_LAYER): tuple(shape)
        for name, shape in shapes.items()
    }


def _check_keys(
    stored: StoredTensors,
    layout: MtpLayout,
    names: Collection[str],
    of_block: Mapping[str, tuple[int, ...]],
    size: int,
) -> None:
    """Raises ModelError. of_block: shapes of the decoder layer and the last norm. size: h."""
    norms = dict.fromkeys((layout.embedding_norm, layout.feature_norm), (size,))
    expected = {**of_block, **norms, layout.projection: (size, 2 * size)}
    place = stored.file(layout.projection)
    for key, shape in expected.items():
        if key not in names:
            raise ModelError(f"{place.parent}: key {key!r} of shape {list(shape)} of the MTP head is missing")
        if stored.shape(key) != shape:
            raise ModelError(
                f"{stored.file(key)}: key {key!r} has shape {list(stored.shape(key))}; expected {list(shape)}"
            )
    for key in names:
        if key not in expected and key not in (layout.embeddings, layout.output_layer):
            raise ModelError(
                f"{stored.file(key)}: key {key!r} of shape {list(stored.shape(key))} is unknown in MTP heads of "
                f"the {layout.name} layout"
            )


def _load_block(
    source: ModelSource,
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    stored: StoredTensors,
    published: Mapping[str, str],
    dtype: str,
    device: str,
) -> PreTrainedModel:
    """The model whose only layer is the head's. published: names in the checkpoint by those in the model's own."""
    weights = {name: stored.read(key) for name, key in published.items()}
    weights |= {name: torch.zeros(1, int(config.hidden_size)) for name in (_EMBEDDINGS, _OUTPUT_LAYER)}
    is_quantized = hasattr(config, "quantization_config")
    options: dict[str, Any] = {"device_map": {"": device}} if device != "cpu" or is_quantized else {}
    floats = getattr(torch, dtype)
    try:
        with quiet_transformers():
            model: PreTrainedModel = kind.from_pretrained(
                None, config=config, state_dict=weights, dtype=floats, **options
            )
    except Exception as error:
        problem = " ".join(str(error).split())[:300]
        raise ModelError(f"model {source.spec!r}: the MTP head cannot be loaded: {problem}") from error
    if is_quantized:
        unify_dtype(model, floats)
    return model


def _add_own_vocabulary(head: MtpHead, stored: StoredTensors, layout: MtpLayout, model: PreTrainedModel) -> None:
    """Give the head separate embeddings and a separate output layer if they are not copies of the target's."""
    embeddings = _own_weight(stored, layout.embeddings, _EMBEDDINGS)
    if embeddings is not None:
        head.embed_tokens = nn.Embedding.from_pretrained(embeddings.to(model.device, model.dtype))
    of_target = _OUTPUT_LAYER if _OUTPUT_LAYER in stored.keys else _EMBEDDINGS
    outputs = _own_weight(stored, layout.output_layer, of_target)
    if outputs is not None:
        head.lm_head = nn.Linear(*reversed(outputs.shape), bias=False, device="meta")
        head.lm_head.weight = nn.Parameter(outputs.to(model.device, model.dtype))


def _own_weight(stored: StoredTensors, key: str | None, of_target: str) -> Tensor | None:
    """The tensor `key`, unless it is missing or a copy of the target's."""
    if key is None or key not in stored.keys:
        return None
    own = stored.read(key)
    is_copy = of_target in stored.keys and torch.equal(own, stored.read(of_target))
    return None if is_copy else own

"""Sizes of a token's keys and values."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from actors.engine.kv_cache import LayerShape
from actors.engine.layer_checks import check_layers
from actors.engine.layer_shapes import layer_shapes
from actors.engine.model_runner import ModelRunner
from actors.engine.recurrent.mixer import has_mixers
from actors.engine.recurrent.recurrent_runner import RecurrentRunner


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values of one token in the engine's cache, on one rank; with an encoder, of a token of either
    side.

    From here on, a model without an encoder attends through that cache alone. With tensor parallelism all ranks call
    this at once. Raises ModelError for layers that the engine does not compute.
    """
    if model.config.is_encoder_decoder:
        return unpaged_kv_bytes_per_token(model)
    check_layers(model, "default", (RecurrentRunner if has_mixers(model) else ModelRunner).layer_types)
    return sum(map(_stored_bytes, layer_shapes(model)))


def _stored_bytes(shape: LayerShape) -> int:
    return shape.kv_heads * sum(shape.stored_dims) * shape.dtype.itemsize


@torch.inference_mode()
def unpaged_kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values of one token in the cache of transformers. Runs a forward of one token."""
    row = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    sides = {"decoder_input_ids": row} if model.config.is_encoder_decoder else {}
    cache = model(input_ids=row, use_cache=True, **sides).past_key_values
    layers = (cache.self_attention_cache if sides else cache).layers
    tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

"""The size of a head beside the target: read from a checkpoint, or assumed from the target's."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from actors.errors import InvalidRequest, ModelError
from actors.options import MTP_HEAD
from cluster.deploy.size.model_shape import ModelShape

ASSUMED = "assume"  # instead of a directory
_DRAFT_VOCABULARY = 32_000  # outputs of most published EAGLE-3 heads
_NOT_WEIGHTS = {"d2t", "t2d"}
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_MASK_HIDDEN = "mask_hidden"  # of P-EAGLE


def find_head(spec: str, target: ModelShape, field: str) -> ModelShape:
    """A head's directory, of which config.json and the headers of its safetensors are read, MTP_HEAD or ASSUMED.
    Raises InvalidRequest, or ModelError for files that cannot be read."""
    if spec == ASSUMED:
        return assumed_head(target)
    if spec == MTP_HEAD:
        return assumed_mtp_head(target)
    path = Path(spec).expanduser()
    if not (path / "config.json").is_file():
        raise InvalidRequest(field, spec, f"give a directory with a config.json, {MTP_HEAD} or {ASSUMED}")
    return _read_head(path, target)


def assumed_head(target: ModelShape) -> ModelShape:
    """An EAGLE-3 head of one decoder layer of the target's size, whose attention reads two hidden states, with a layer
    that joins three of the target's and an output layer of 32,000 tokens."""
    size = target.hidden_size
    outer = target.num_lookup_parameters or size * target.vocab_size
    inner = target.active_parameters - outer  # without the output layer
    attention = size * target.head_dim * (target.num_heads + 2 * target.num_kv_heads)
    own = inner / target.num_layers + attention + 3 * size * size + size * min(_DRAFT_VOCABULARY, target.vocab_size)
    return replace(
        target,
        name=f"an EAGLE-3 head of {target.name}'s width",
        num_layers=1,
        num_parameters=round(own),
        num_lookup_parameters=0,  # the target's embeddings
        num_expert_parameters=0,
        num_experts=0,
        experts_per_token=0,
    )


def assumed_mtp_head(target: ModelShape) -> ModelShape:
    """An MTP head: a layer of the target's, a layer that joins an embedding and a hidden state, and the target's output
    layer, which it reads again."""
    size = target.hidden_size
    output = size * target.vocab_size
    layers = target.num_parameters - target.num_lookup_parameters - output
    return replace(
        target,
        name=f"an MTP head of {target.name}",
        num_layers=1,
        num_parameters=round(layers / target.num_layers + 2 * size * size + output),
        num_lookup_parameters=0,
        num_expert_parameters=round(target.num_expert_parameters / target.num_layers),
    )


def _read_head(path: Path, target: ModelShape) -> ModelShape:
    from actors.models.source import ModelSource

    data = ModelSource(str(path), path.name, path).read_json("config.json")
    layer: dict[str, Any] = data.get("transformer_layer_config") or data
    sizes = _sizes(path)
    size, heads = layer.get("hidden_size"), layer.get("num_attention_heads")
    if not isinstance(size, int) or not isinstance(heads, int):
        raise ModelError(f"{path / 'config.json'}: it has no hidden_size or no num_attention_heads")
    # EAGLE-1, -2 and DFlash read the target's output layer.
    borrowed = 0 if _OUTPUT in sizes else size * target.vocab_size
    return ModelShape(
        name=path.resolve().name,
        num_layers=layer.get("num_hidden_layers") or 1,
        hidden_size=size,
        num_heads=heads,
        num_kv_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or size // heads,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
        num_parameters=sum(sizes.values()) + borrowed,
        num_lookup_parameters=sizes.get(_EMBEDDING, 0),
        is_parallel=_MASK_HIDDEN in sizes or "dflash_config" in data,
    )


def _sizes(path: Path) -> dict[str, int]:
    """Numbers in the checkpoint's tensors by name."""
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"EAGLE head {str(path)!r}: it has no .safetensors file")
    sizes: dict[str, int] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                names = set(opened.keys()) - _NOT_WEIGHTS
                sizes |= {name: prod(opened.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read: {' '.join(str(error).split())[:300]}") from None
    return sizes

"""The shape of a model that has a config.json here: counted in the model that `transformers` would make of it, without
memory for its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import InvalidRequest, ModelError
from actors.models.loader import load_config, max_model_len, refuse_encoder
from actors.models.quiet import quiet_transformers
from actors.models.source import ModelSource
from cluster.deploy.size.model_shape import ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ATTENDING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def read_model_shape(directory: Path, field: str) -> ModelShape:
    """Raises ModelError for a configuration that transformers cannot use, InvalidRequest for a kind of model whose
    cache or layers are none that the formulas are about."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    source = ModelSource(spec=str(directory), name=directory.resolve().name, path=directory)
    refuse_encoder(source, "sizing")
    config = load_config(source)
    text = config.get_text_config()
    _refuse_other_caches(text, directory, field)
    try:
        with init_empty_weights(), quiet_transformers():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model {str(directory)!r}: no model can be made of its config.json: {reason}") from None
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    is_tied = head is embeddings or bool(getattr(text, "tie_word_embeddings", False))
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    total = sum(sizes.values()) - (head.numel() if is_tied and head is not embeddings else 0)
    chosen = [
        _first_of(text, ("num_local_experts", "num_experts", "n_routed_experts")),
        text.to_dict().get("num_experts_per_tok"),
    ]
    in_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    has_experts = bool(in_experts and all(chosen))
    heads = text.num_attention_heads
    return ModelShape(
        name=source.name,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_context=max_model_len(text),
        num_parameters=total,
        num_lookup_parameters=0 if is_tied else embeddings.numel(),
        num_expert_parameters=in_experts if has_experts else 0,
        num_experts=int(chosen[0] or 0) if has_experts else 0,
        experts_per_token=int(chosen[1] or 0) if has_experts else 0,
    )


def _refuse_other_caches(text: PretrainedConfig, directory: Path, field: str) -> None:
    if getattr(text, "kv_lora_rank", None):
        raise InvalidRequest(field, str(directory), f"{text.model_type} compresses its KV cache, which is not modelled")
    other = set(getattr(text, "layer_types", None) or ()) - _ATTENDING_LAYERS
    if other:
        limit = f"{text.model_type} has layers without a KV cache ({', '.join(sorted(other))}), which are not modelled"
        raise InvalidRequest(field, str(directory), limit)


def _first_of(text: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := getattr(text, name, None))), None)

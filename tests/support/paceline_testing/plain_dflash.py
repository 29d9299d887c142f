"""A DFlash head as it is published, key by key, and its forward in plain torch. Nothing of Paceline is used."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline_testing.plain_rotation import rotated

EPS = 1e-6
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 8, 48


def dflash_config(hidden_size: int, vocab_size: int, mask: int, layer_ids: list[int], **more: Any) -> dict[str, Any]:
    """Two layers, blocks of 5 rows."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "auto_map": {"AutoModel": "dflash.Model"},
        "attention_bias": False, "block_size": 5,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": layer_ids},
        "dtype": "bfloat16", "head_dim": HEAD_DIM, "hidden_act": "silu", "hidden_size": hidden_size,
        "intermediate_size": INNER, "layer_types": ["full_attention"] * 2, "max_position_embeddings": 256,
        "max_window_layers": 2, "num_attention_heads": HEADS, "num_hidden_layers": 2, "num_key_value_heads": KV_HEADS,
        "num_target_layers": 6, "rms_norm_eps": EPS, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
        "vocab_size": vocab_size, **more,
    }  # fmt: skip


def dflash_tensors(size: int, num_features: int, seed: int = 5) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, num_features * size), "hidden_norm.weight": (size,), "norm.weight": (size,),
    }  # fmt: skip
    for index in range(2):
        layer = f"layers.{index}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (HEADS * HEAD_DIM, size),
            f"{layer}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, size),
            f"{layer}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, size),
            f"{layer}self_attn.o_proj.weight": (size, HEADS * HEAD_DIM),
            f"{layer}self_attn.q_norm.weight": (HEAD_DIM,),
            f"{layer}self_attn.k_norm.weight": (HEAD_DIM,),
            f"{layer}mlp.gate_proj.weight": (INNER, size),
            f"{layer}mlp.up_proj.weight": (INNER, size),
            f"{layer}mlp.down_proj.weight": (size, INNER),
            f"{layer}input_layernorm.weight": (size,),
            f"{layer}post_attention_layernorm.weight": (size,),
        }
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in sorted(shapes.items())}
    return {name: value + 1.0 if name.endswith("norm.weight") else value for name, value in made.items()}


def save_dflash(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def plain_block(w: dict[str, torch.Tensor], features: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Normed outputs [b, h] of a block of embeddings [b, h] after raw features of all positions before, [n, f]."""
    context, x = normed(features @ w["fc.weight"].T, w["hidden_norm.weight"]), block
    for index in range(2):
        own = {key.removeprefix(f"layers.{index}."): value for key, value in w.items()}
        read = normed(x, own["input_layernorm.weight"])
        seen = torch.cat([context, read])  # keys and values of the context come from the features as they are
        query = normed(
            (read @ own["self_attn.q_proj.weight"].T).view(len(x), HEADS, -1), own["self_attn.q_norm.weight"]
        )
        key = normed(
            (seen @ own["self_attn.k_proj.weight"].T).view(len(seen), KV_HEADS, -1), own["self_attn.k_norm.weight"]
        )
        value = (seen @ own["self_attn.v_proj.weight"].T).view(len(seen), KV_HEADS, -1)
        query = rotated(torch.cat([query.new_zeros(len(context), HEADS, HEAD_DIM), query]))[len(context) :]
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (rotated(key), value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD_DIM)  # every row of a block sees all of it
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(len(x), -1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        read = normed(x, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(read @ own["mlp.gate_proj.weight"].T)
        x = x + (gate * (read @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return normed(x, w["norm.weight"])


def plain_guesses(
    w: dict[str, torch.Tensor], target: Any, tokens: list[int], layer_ids: list[int], mask: int, count: int
) -> torch.Tensor:
    """Log-probabilities [count, V] of the `count` tokens after `tokens`, guessed in one forward."""
    # Entry i + 1 is the output of layer i, and entry 0 the embeddings.
    states = target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[index + 1][0] for index in layer_ids], dim=-1)
    block = target.get_input_embeddings()(torch.tensor([tokens[-1], *[mask] * count]))
    hidden = plain_block(w, features, block)[1:]
    return target.get_output_embeddings()(hidden).log_softmax(-1)

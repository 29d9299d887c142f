"""EAGLE heads in the layouts of published checkpoints, written key by key, and the papers' forward in plain torch.

Nothing here uses Paceline's writer of heads, or its forward.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from paceline_testing.plain_rotation import rotated

VOCAB, TARGET_SIZE, LAYERS, EPS = 61, 32, 6, 1e-5
Tensors = dict[str, torch.Tensor]


@dataclass
class Published:
    """A layout: its config.json, and the shapes of its tensors by their published names."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    draft_ids: list[int] = field(default_factory=list)  # of a reduced vocabulary
    file: str = "model.safetensors"

    @property
    def is_eagle3(self) -> bool:
        return "lm_head.weight" in self.shapes

    def tensors(self) -> Tensors:
        generator = torch.Generator().manual_seed(7)
        made = {}
        for name, shape in sorted(self.shapes.items()):
            made[name] = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
            if name.endswith("norm.weight") or ".fc_norm" in f".{name}":
                made[name] += 1.0
        if self.draft_ids:
            ids = torch.tensor(self.draft_ids)
            made["d2t"] = ids - torch.arange(len(ids))
            made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        return made

    def save(self, directory: Path) -> Path:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        if self.file.endswith(".bin"):
            torch.save(self.tensors(), directory / self.file)
        else:
            save_file(self.tensors(), directory / self.file)
        return directory


def layer_shapes(prefix: str, size: int, *, wide: int, norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Four heads, one of keys and values, an inner size of 48."""
    dim = size // 4
    return {
        f"{prefix}self_attn.q_proj.weight": (size, wide),
        f"{prefix}self_attn.k_proj.weight": (dim, wide),
        f"{prefix}self_attn.v_proj.weight": (dim, wide),
        f"{prefix}self_attn.o_proj.weight": (size, size),
        f"{prefix}mlp.gate_proj.weight": (48, size),
        f"{prefix}mlp.up_proj.weight": (48, size),
        f"{prefix}mlp.down_proj.weight": (size, 48),
        **{f"{prefix}{norm}.weight": (size,) for norm in norms},
    }


def llama_config(size: int, layers: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": layers, "rms_norm_eps": EPS,
        "hidden_act": "silu", "vocab_size": VOCAB, "max_position_embeddings": 256, "bos_token_id": 1,
        "torch_dtype": "float16", "transformers_version": "4.40.0", "use_cache": True, "pretraining_tp": 1, **more,
    }  # fmt: skip


def eagle(layers: int = 1, bias: bool = True, **more: Any) -> Published:
    size = TARGET_SIZE
    shapes = {"embed_tokens.weight": (VOCAB, size), "fc.weight": (size, 2 * size)}
    shapes |= {"fc.bias": (size,)} if bias else {}
    for index in range(layers):
        norms = ("post_attention_layernorm",) if index == 0 else ("input_layernorm", "post_attention_layernorm")
        shapes |= layer_shapes(f"layers.{index}.", size, wide=size, norms=norms)
    return Published(llama_config(size, layers), shapes, **more)


EAGLE3_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


def eagle3(
    prefix: str = "midlayer.",
    size: int = TARGET_SIZE,
    layers: int = 1,
    num_features: int = 3,
    target_size: int = TARGET_SIZE,
    **config: Any,
) -> Published:
    """draft_vocab_size is 23."""
    shapes = {
        "fc.weight": (size, num_features * target_size), "norm.weight": (size,), "lm_head.weight": (23, size),
        **layer_shapes(prefix, size, wide=2 * size, norms=EAGLE3_NORMS),
    }  # fmt: skip
    for index in range(1, layers):
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= layer_shapes(f"layers.{index}.", size, wide=size, norms=norms)
    ids = sorted(np.random.default_rng(3).permutation(VOCAB)[:23].tolist())
    return Published(llama_config(size, layers, draft_vocab_size=23, **config), shapes, ids)


def for_larger_target(target_size: int = TARGET_SIZE) -> Published:
    """As the head of a 70B target: narrower than the target, with an embedding of its own."""
    head = eagle3(size=16, target_size=target_size, target_hidden_size=target_size)
    head.shapes["embed_tokens.weight"] = (VOCAB, 16)
    return head


def speculators(**flags: Any) -> Published:
    """The nested configuration, which names the layer's shape apart from the head's own flags."""
    head = eagle3("layers.0.")
    head.shapes["embed_tokens.weight"] = (VOCAB, TARGET_SIZE)
    nested = {key: value for key, value in head.config.items() if key != "draft_vocab_size"}
    head.config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": nested, "draft_vocab_size": 23,
        "target_hidden_size": None, "norm_before_residual": True, "torch_dtype": "bfloat16", **flags,
    }  # fmt: skip
    return head


def eagle31(**flags: Any) -> Published:
    head = speculators(fc_norm=True, norm_output=True, **flags)
    head.shapes |= {f"fc_norm.{index}.weight": (TARGET_SIZE,) for index in range(3)}
    return head


def p_eagle(head: Published, mask: str = "ptd_token_id", token: int = 3, **config: Any) -> Published:
    """An EAGLE-3 head with the learnt feature of P-EAGLE, under one of the names of its mask token."""
    head.shapes["mask_hidden"] = (1, 1, head.shapes["fc.weight"][1])
    head.config |= {mask: token, **config}
    return head


def norm_before_fc() -> Published:
    head = speculators(norm_before_fc=True, norm_before_residual=False)
    head.shapes["input_norm.weight"] = (3 * TARGET_SIZE,)
    return head


def as_wide_as_its_features() -> Published:
    head = eagle3(size=96, target_hidden_size=TARGET_SIZE)
    head.shapes["embed_tokens.weight"] = (VOCAB, 96)
    return head


def whole_vocabulary(rows: int) -> Published:
    """The head's vocabulary is padded to another size than the target's."""
    head = eagle3(size=16, target_hidden_size=TARGET_SIZE)
    head.config |= {"vocab_size": rows, "draft_vocab_size": rows}
    head.shapes |= {"embed_tokens.weight": (rows, 16), "lm_head.weight": (rows, 16)}
    head.draft_ids = []
    return head


# The papers' forward, in plain torch, over whole texts.


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def attention(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    query = rotated((x @ w["self_attn.q_proj.weight"].T).view(len(x), 4, -1))
    key = rotated((x @ w["self_attn.k_proj.weight"].T).view(len(x), 1, -1))[:, 0]
    scores = torch.einsum("qhd,kd->hqk", query, key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf).softmax(-1)
    mixed = torch.einsum("hqk,kd->qhd", scores, x @ w["self_attn.v_proj.weight"].T)
    return mixed.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T


def mlp(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    gate = torch.nn.functional.silu(x @ w["mlp.gate_proj.weight"].T)
    return (gate * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


class Paper:
    """A layout's forward, computed anew for every token."""

    def __init__(self, published: Published, target: Any, states: tuple[int, ...]) -> None:
        self.is_eagle3 = published.is_eagle3
        self.flags = published.config | published.config.get("eagle_config", {})
        self.tensors, self.target, self.states = published.tensors(), target, states
        config = published.config.get("transformer_layer_config", published.config)
        self.num_layers = config["num_hidden_layers"]

    def layer(self, index: int) -> Tensors:
        prefix = f"layers.{index}."
        if not any(name.startswith(prefix) for name in self.tensors):
            prefix = "midlayer."
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}

    def features(self, tokens: list[int]) -> torch.Tensor:
        """What the head's layers begin with, [rows, h]; of EAGLE-1 and -2 the target's feature itself."""
        hidden = []

        def keep(module: Any, args: Any, output: Any) -> None:
            hidden.append((output if isinstance(output, torch.Tensor) else output[0])[0])

        hook = self.target.model.layers[-1].register_forward_hook(keep)
        output = self.target.model(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        if not self.is_eagle3:
            return output.last_hidden_state[0]
        inputs = [*(state[0] for state in output.hidden_states[:LAYERS]), hidden[0]]
        return self.fused(torch.cat([inputs[index] for index in self.states], dim=-1))

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """[rows, layers * f] -> [rows, h]."""
        if self.flags.get("fc_norm"):
            parts = features.split(TARGET_SIZE, dim=-1)
            parts = [normed(part, self.tensors[f"fc_norm.{index}.weight"]) for index, part in enumerate(parts)]
            features = torch.cat(parts, dim=-1)
        if self.flags.get("norm_before_fc"):
            features = normed(features, self.tensors["input_norm.weight"])
        return features @ self.tensors["fc.weight"].T

    def outputs(self, features: torch.Tensor, following: list[int]) -> torch.Tensor:
        """Hidden states before the last norm, [rows, h]. following: the token after each row's."""
        table = self.tensors.get("embed_tokens.weight")
        if table is None:
            table = self.target.get_input_embeddings().weight
        rows = [table[token] if token < len(table) else torch.zeros(table.shape[1]) for token in following]
        embedded, x = torch.stack(rows), features
        if not self.is_eagle3:
            bias = self.tensors.get("fc.bias", 0.0)
            x = torch.cat([embedded, features], dim=-1) @ self.tensors["fc.weight"].T + bias
        for index in range(self.num_layers):
            w = self.layer(index)
            if index > 0:
                x = x + attention(w, normed(x, w["input_layernorm.weight"]))
            elif self.is_eagle3:
                feature = normed(x, w["hidden_norm.weight"])
                wide = torch.cat([normed(embedded, w["input_layernorm.weight"]), feature], dim=-1)
                x = (feature if self.flags.get("norm_before_residual") else x) + attention(w, wide)
            else:
                x = x + attention(w, x)
            x = x + mlp(w, normed(x, w["post_attention_layernorm.weight"]))
        return x

    def draft(self, tokens: list[int], depth: int) -> list[int]:
        """The likeliest token after `tokens`, and after each draft."""
        features, path = self.features(tokens[:-1]), []
        for _ in range(depth):
            output = self.outputs(features, [*tokens[1:], *path])[-1:]
            after = normed(output, self.tensors["norm.weight"]) if self.is_eagle3 else output
            head = self.tensors.get("lm_head.weight")
            scores = (after @ (self.target.get_output_embeddings().weight if head is None else head)[:VOCAB].T)[0]
            column = int(scores.argmax())
            path.append(column + int(self.tensors["d2t"][column]) if "d2t" in self.tensors else column)
            features = torch.cat([features, after if self.flags.get("norm_output") else output])
        return path

    def guesses(self, tokens: list[int], count: int, mask: int) -> torch.Tensor:
        """Of P-EAGLE: log-probabilities [count, VOCAB] of the `count` tokens after `tokens`, from one forward."""
        learnt = self.tensors["mask_hidden"].reshape(1, -1).expand(count - 1, -1)
        features = torch.cat([self.features(tokens[:-1]), self.fused(learnt)])
        output = self.outputs(features, [*tokens[1:], *[mask] * (count - 1)])[-count:]
        scores = normed(output, self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"][:VOCAB].T
        found = torch.full((count, VOCAB), -math.inf)
        columns = torch.arange(scores.shape[1]) + self.tensors.get("d2t", torch.zeros(scores.shape[1])).long()
        found[:, columns] = scores.log_softmax(-1)
        return found

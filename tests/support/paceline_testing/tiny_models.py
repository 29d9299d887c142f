"""Tiny random models of several architectures: real code paths, milliseconds a forward, no download."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from actors.models.quiet import quiet_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TinyKind = Literal["llama", "qwen3", "gemma3", "gpt2"]
TINY_KINDS: tuple[TinyKind, ...] = get_args(TinyKind)
TinyEncoderDecoderKind = Literal["t5", "bart", "mbart", "pegasus"]
TINY_ENCODER_DECODER_KINDS: tuple[TinyEncoderDecoderKind, ...] = get_args(TinyEncoderDecoderKind)

BYTE_VOCAB_SIZE = 259  # 256 bytes, end of turn, start of turn, padding
END_OF_TURN, START_OF_TURN, PADDING = 256, 257, 258

_LOGIT_SPREAD = 4.0  # standard deviation of the logits: argmax margins far above rounding, softmax not one-hot
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    kind: TinyKind | TinyEncoderDecoderKind = "llama",
    seed: int = 0,
    vocab_size: int = 193,
    layers: int = 2,
    hidden_size: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 1024,
    sliding_window: int = 8,
    eos_token_id: int | None = None,
    forced_bos_token_id: int | None = None,
) -> PreTrainedModel:
    """A random model in float32 and eval mode, without gradients; the same seed gives the same weights.

    Query heads share key heads (llama, qwen3, gemma3), every other Gemma 3 layer sees `sliding_window` tokens only,
    GPT-2 has learned positions and biases. Those with an encoder have `layers` layers on either side, and their
    decoders begin with the last id of the vocabulary; T5 has no limit of positions, Pegasus computes its own. Weights
    are scaled by fan-in, not by the tiny default, so that context decides the argmax.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = _config(
        kind, vocab_size, layers, hidden_size, heads, kv_heads, max_positions, sliding_window, eos_token_id
    )
    with quiet_transformers():
        if config.is_encoder_decoder:
            model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:  # positions that are computed have none
                _randomise(name, parameter, generator, input_major=kind == "gpt2")
            if "out_proj.weight" in name:  # else what is attended to drowns the last token, and all tokens are the same
                parameter.mul_(0.3)
        head = model.get_output_embeddings()
        # Untied: an output layer tied to the embeddings would repeat the last token.
        spread = _LOGIT_SPREAD if kind == "t5" else _LOGIT_SPREAD / math.sqrt(hidden_size)  # T5 scales by itself
        head.weight = torch.nn.Parameter(torch.randn(head.weight.shape, generator=generator) * spread)
    model.generation_config.forced_bos_token_id = forced_bos_token_id
    model.eval()
    model.requires_grad_(False)
    return model


def save_tiny_model(
    directory: Path,
    kind: TinyKind | TinyEncoderDecoderKind = "llama",
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **shape: Any,
) -> Path:
    """Write `make_tiny_model(kind, seed, **shape)` with a tokenizer as a model directory.

    tokenizer None: that of bytes, with a chat template. There are as many ids as the tokenizer has unless `vocab_size`
    says more; the tokenizer's end of sequence is the model's unless `eos_token_id` says otherwise.
    """
    tokenizer = tokenizer or make_byte_tokenizer()
    shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **shape}
    if shape["vocab_size"] < len(tokenizer):
        raise ValueError(f"vocab_size is {shape['vocab_size']}; the tokenizer needs at least {len(tokenizer)}")
    with quiet_transformers():
        make_tiny_model(kind, seed, **shape).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return directory


def tiny_eagle_tensors(
    target: PretrainedConfig,
    kind: Literal["eagle", "eagle3"],
    seed: int = 0,
    draft_vocab_size: int | None = None,
    has_bias: bool = True,
) -> dict[str, torch.Tensor]:
    """Random weights of an EAGLE head for a target, under the names that published checkpoints have.

    draft_vocab_size: of an EAGLE-3 head, its columns stand for random tokens; None: for all. has_bias: of an EAGLE
    head's `fc`, which EAGLE-3 has none of.
    """
    import torch

    text = target.get_text_config()
    size, vocab, heads = text.hidden_size, text.vocab_size, text.num_attention_heads
    prefix, wide = ("midlayer.", 2 * size) if kind == "eagle3" else ("layers.0.", size)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, (3 if kind == "eagle3" else 2) * size),
        f"{prefix}self_attn.q_proj.weight": (size, wide),
        f"{prefix}self_attn.k_proj.weight": (size // heads, wide),
        f"{prefix}self_attn.v_proj.weight": (size // heads, wide),
        f"{prefix}self_attn.o_proj.weight": (size, size),
        f"{prefix}mlp.gate_proj.weight": (2 * size, size),
        f"{prefix}mlp.up_proj.weight": (2 * size, size),
        f"{prefix}mlp.down_proj.weight": (size, 2 * size),
        f"{prefix}post_attention_layernorm.weight": (size,),
    }
    if kind == "eagle3":
        shapes |= {f"{prefix}{name}.weight": (size,) for name in ("hidden_norm", "input_layernorm")}
        shapes |= {"norm.weight": (size,), "lm_head.weight": (draft_vocab_size or vocab, size)}
    elif has_bias:
        shapes["fc.bias"] = (size,)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    for name, tensor in sorted(tensors.items()):
        _randomise(name, tensor, generator, input_major=False)
    if draft_vocab_size is not None:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def save_knowing_target(directory: Path, model: PreTrainedModel) -> None:
    """Let a tiny Llama of hidden size 48 look at nothing but its last token, and write it with a head, in `head`, that
    knows what it says."""
    import torch

    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.norm.weight.fill_(1.0)
    model.save_pretrained(directory)
    tensors = tiny_eagle_tensors(model.config, "eagle", has_bias=False)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    tensors["fc.weight"] = torch.eye(48, 96)  # the next token's embedding, less its norm
    save_eagle_head(directory / "head", model.config, tensors)


def save_eagle_head(directory: Path, target: PretrainedConfig, tensors: dict[str, torch.Tensor]) -> Path:
    """Write the tensors of `tiny_eagle_tensors(target, ...)` as published heads are: config.json and safetensors."""
    from safetensors.torch import save_file

    text = target.get_text_config()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": text.hidden_size,
        "intermediate_size": 2 * text.hidden_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "vocab_size": text.vocab_size,
    }
    if "lm_head.weight" in tensors:
        config["draft_vocab_size"] = len(tensors["lm_head.weight"])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with one token per UTF-8 byte and three special tokens; every text survives a round trip."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>", "<|pad|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>", pad_token="<|pad|>"
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def _config(
    kind: TinyKind | TinyEncoderDecoderKind,
    vocab_size: int,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    max_positions: int,
    sliding_window: int,
    eos_token_id: int | None,
) -> PretrainedConfig:
    from transformers import (
        BartConfig,
        Gemma3TextConfig,
        GPT2Config,
        LlamaConfig,
        MBartConfig,
        PegasusConfig,
        Qwen3Config,
        T5Config,
    )

    tokens: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": eos_token_id}
    if kind in TINY_ENCODER_DECODER_KINDS:
        tokens |= {"pad_token_id": vocab_size - 1, "decoder_start_token_id": vocab_size - 1, "d_model": hidden_size}
        if kind == "t5":
            width = {"d_kv": hidden_size // heads, "d_ff": 2 * hidden_size}
            return T5Config(**tokens, **width, num_layers=layers, num_heads=heads)
        kinds: dict[str, type[PretrainedConfig]] = {"bart": BartConfig, "mbart": MBartConfig, "pegasus": PegasusConfig}
        sides: dict[str, Any] = {}
        for side in ("encoder", "decoder"):
            sides |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": 2 * hidden_size}
        return kinds[kind](**tokens, **sides, max_position_embeddings=max_positions, forced_eos_token_id=None)
    tokens |= {"pad_token_id": None, "tie_word_embeddings": False}
    if kind == "gpt2":
        return GPT2Config(n_positions=max_positions, n_embd=hidden_size, n_layer=layers, n_head=heads, **tokens)
    common: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": max_positions,
        **tokens,
    }
    if kind == "llama":
        return LlamaConfig(**common)
    if kind == "qwen3":
        return Qwen3Config(**common)
    if kind == "gemma3":
        return Gemma3TextConfig(
            **common,
            sliding_window=sliding_window,
            query_pre_attn_scalar=hidden_size // heads,
            layer_types=["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)],
        )
    raise ValueError(f"kind is {kind!r}; it must be one of {', '.join((*TINY_KINDS, *TINY_ENCODER_DECODER_KINDS))}")


def _randomise(name: str, parameter: torch.Tensor, generator: torch.Generator, input_major: bool) -> None:
    import torch

    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim == 1:  # norms stay near what they were, biases leave zero: both must count in a comparison
        parameter.add_(0.1 * noise)
    elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        parameter.copy_(noise)
    else:
        fan_in = parameter.shape[0 if input_major else 1]
        parameter.copy_(noise * (1.5 / math.sqrt(fan_in)))

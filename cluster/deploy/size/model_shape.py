"""The numbers of a model that decide its size and speed: well-known models, and models with a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ATTENDING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int  # tokens of prompt and output together
    num_parameters: int
    num_lookup_parameters: int  # input embeddings, looked up and not read whole; 0 if the output layer shares them
    num_expert_parameters: int = 0  # all experts in all layers
    num_experts: int = 0  # in a layer
    experts_per_token: int = 0

    def read_parameters(self, rows: int) -> float:
        """Parameters that a forward of `rows` rows reads. Rows choose experts evenly, so a share 1 - (1 - k/E)^rows of
        the experts is read."""
        dense = self.num_parameters - self.num_lookup_parameters - self.num_expert_parameters
        if not self.num_experts:
            return float(dense)
        unread = (1.0 - self.experts_per_token / self.num_experts) ** rows
        return dense + self.num_expert_parameters * (1.0 - unread)

    @property
    def active_parameters(self) -> float:
        """Parameters that one row is multiplied with."""
        return self.read_parameters(1)

    def kv_bytes_per_token(self, number_bytes: float) -> float:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * number_bytes


# name, layers, hidden size, heads, KV heads, head size, MLP size (of an expert), vocabulary, context, tied embeddings,
# experts, experts a token. All have grouped-query attention, gated MLPs, RMS norms and no biases.
_LLAMA_LIKE = """
smollm2          30   576    9    3  64   1536   49152   8192    1  0    0
llama-1b         16   2048   32   8  64   8192   128256  131072  1  0    0
llama-3b         28   3072   24   8  128  8192   128256  131072  1  0    0
llama-8b         32   4096   32   8  128  14336  128256  131072  0  0    0
llama-70b        80   8192   64   8  128  28672  128256  131072  0  0    0
llama-405b       126  16384  128  8  128  53248  128256  131072  0  0    0
mistral-7b       32   4096   32   8  128  14336  32768   32768   0  0    0
mixtral-8x7b     32   4096   32   8  128  14336  32000   32768   0  8    2
qwen3-0.6b       28   1024   16   8  128  3072   151936  40960   1  0    0
qwen3-1.7b       28   2048   16   8  128  6144   151936  40960   1  0    0
qwen3-4b         36   2560   32   8  128  9728   151936  40960   1  0    0
qwen3-8b         36   4096   32   8  128  12288  151936  40960   0  0    0
qwen3-14b        40   5120   40   8  128  17408  151936  40960   0  0    0
qwen3-32b        64   5120   64   8  128  25600  151936  40960   0  0    0
qwen3-30b-a3b    48   2048   32   4  128  768    151936  40960   0  128  8
qwen3-235b-a22b  94   4096   64   4  128  1536   151936  40960   0  128  8
"""


def _llama_like(row: str) -> ModelShape:
    name, *numbers = row.split()
    layers, hidden, heads, kv_heads, head_dim, mlp_size, vocab, context, is_tied, experts, chosen = map(int, numbers)
    embedding, mlp = vocab * hidden, 3 * hidden * mlp_size
    layer = 2 * hidden * head_dim * (heads + kv_heads) + 2 * hidden + (experts * hidden if experts else mlp)
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_context=context,
        num_parameters=layers * (layer + experts * mlp) + hidden + embedding * (1 if is_tied else 2),
        num_lookup_parameters=0 if is_tied else embedding,
        num_expert_parameters=layers * experts * mlp,
        num_experts=experts,
        experts_per_token=chosen,
    )


MODELS: Mapping[str, ModelShape] = {shape.name: shape for shape in map(_llama_like, _LLAMA_LIKE.strip().splitlines())}


def find_model(spec: str, field: str) -> ModelShape:
    """A known name, a model directory, or a config.json. Raises InvalidRequest, or ModelError for a configuration that
    cannot be used."""
    if (known := MODELS.get(spec.lower())) is not None:
        return known
    path = Path(spec).expanduser()
    if path.name == "config.json":
        path = path.parent
    if (path / "config.json").is_file():
        return read_model_shape(path, field)
    known_names = ", ".join(MODELS)
    limit = f"known models are {known_names}; of others give a directory with a config.json, weights are not needed"
    raise InvalidRequest(field, spec, limit)


def read_model_shape(directory: Path, field: str) -> ModelShape:
    """Count the model that `transformers` makes of the config.json, without memory for its weights.

    Raises ModelError for a configuration that transformers cannot use, InvalidRequest for a model whose layers or KV
    cache the formulas do not describe.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from actors.models.loader import load_config, max_model_len, refuse_encoder
    from actors.models.quiet import quiet_transformers
    from actors.models.source import ModelSource

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
    expert_names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((value for name in expert_names if (value := getattr(text, name, None))), 0)
    chosen = text.to_dict().get("num_experts_per_tok") or 0
    in_experts = sum(size for name, size in sizes.items() if ".experts." in name) if experts and chosen else 0
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
        num_parameters=sum(sizes.values()) - (head.numel() if is_tied and head is not embeddings else 0),
        num_lookup_parameters=0 if is_tied else embeddings.numel(),
        num_expert_parameters=in_experts,
        num_experts=experts if in_experts else 0,
        experts_per_token=chosen if in_experts else 0,
    )


def _refuse_other_caches(text: PretrainedConfig, directory: Path, field: str) -> None:
    if getattr(text, "kv_lora_rank", None):
        raise InvalidRequest(field, str(directory), f"{text.model_type} compresses its KV cache, which is not modelled")
    if other := set(getattr(text, "layer_types", None) or ()) - _ATTENDING_LAYERS:
        limit = f"{text.model_type} has layers without a KV cache ({', '.join(sorted(other))}), which are not modelled"
        raise InvalidRequest(field, str(directory), limit)

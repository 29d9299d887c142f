"""The numbers of a model that decide its size and speed: well-known models, and models with a config.json."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ATTENDING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_PARALLEL = "pard-"  # before a known name: the parallel draft model that was trained from it
_EXPERT_NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts")


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
    # As a draft model or head, guesses all tokens of a draft in one forward (PARD, P-EAGLE, DFlash).
    is_parallel: bool = field(default=False, kw_only=True)

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


# The fields of ModelShape in their order.
_MODELS = """
smollm2          30   576    9    3  64   49152   8192    134515008     0
llama-1b         16   2048   32   8  64   128256  131072  1235814400    0
llama-3b         28   3072   24   8  128  128256  131072  3212749824    0
llama-8b         32   4096   32   8  128  128256  131072  8030261248    525336576
llama-70b        80   8192   64   8  128  128256  131072  70553706496   1050673152
llama-405b       126  16384  128  8  128  128256  131072  405853388800  2101346304
mistral-7b       32   4096   32   8  128  32768   32768   7248023552    134217728
mixtral-8x7b     32   4096   32   8  128  32000   32768   46702792704   131072000   45097156608   8    2
qwen3-0.6b       28   1024   16   8  128  151936  40960   596042752     0
qwen3-1.7b       28   2048   16   8  128  151936  40960   1720567808    0
qwen3-4b         36   2560   32   8  128  151936  40960   4022458880    0
qwen3-8b         36   4096   32   8  128  151936  40960   8190726144    622329856
qwen3-14b        40   5120   40   8  128  151936  40960   14768296960   777912320
qwen3-32b        64   5120   64   8  128  151936  40960   32762106880   777912320
qwen3-30b-a3b    48   2048   32   4  128  151936  40960   30532110336   311164928   28991029248   128  8
qwen3-235b-a22b  94   4096   64   4  128  151936  40960   235093610496  622329856   227096395776  128  8
"""
MODELS = {row[0]: ModelShape(row[0], *map(int, row[1:])) for row in map(str.split, _MODELS.strip().splitlines())}


def known_model(spec: str) -> ModelShape | None:
    name = spec.lower()
    known = MODELS.get(name.removeprefix(_PARALLEL))
    if known is None or not name.startswith(_PARALLEL):
        return known
    return replace(known, name=name, is_parallel=True)


def find_model(spec: str, field: str) -> ModelShape:
    """A known name, a model directory, or a config.json. Raises InvalidRequest, or ModelError for a configuration that
    cannot be used."""
    if (known := known_model(spec)) is not None:
        return known
    path = Path(spec).expanduser()
    if path.name == "config.json":
        path = path.parent
    if (path / "config.json").is_file():
        return read_model_shape(path, field)
    known_names = f"{', '.join(MODELS)}, parallel draft models {_PARALLEL} and such a name"
    limit = f"known models are {known_names}; of others give a directory with a config.json, weights are not needed"
    raise InvalidRequest(field, spec, limit)


def _has_several_sizes(config: PretrainedConfig) -> bool:
    """Whether heads differ between layers (Gemma 4, MiMo V2), or values from keys."""
    if getattr(config, "is_heterogeneous", False) or getattr(config, "swa_num_key_value_heads", None):
        return True
    key_dim, value_dim = getattr(config, "head_dim", None), getattr(config, "v_head_dim", None)
    return bool(key_dim and value_dim and key_dim != value_dim)


def read_model_shape(directory: Path, field: str) -> ModelShape:
    """Count the model that `transformers` makes of the config.json, without memory for its weights.

    Raises ModelError for a configuration that transformers cannot use, InvalidRequest for a model whose layers or KV
    cache the formulas do not describe.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from actors.models.loader import load_config, max_model_len, refuse_encoder
    from actors.models.parallel_draft import mask_token_of
    from actors.models.quiet import quiet_transformers
    from actors.models.source import ModelSource

    source = ModelSource(spec=str(directory), name=directory.resolve().name, path=directory)
    refuse_encoder(source, "sizing")
    whole = load_config(source)
    config, problem = whole.get_text_config(), ""
    if getattr(config, "kv_lora_rank", None):
        problem = "compresses its KV cache, which is not modelled"
    elif other := set(getattr(config, "layer_types", None) or ()) - _ATTENDING_LAYERS:
        problem = f"has layers without a KV cache ({', '.join(sorted(other))}), which are not modelled"
    elif _has_several_sizes(config):
        problem = "has layers with keys and values of several sizes, which are not modelled"
    elif config.num_hidden_layers < 1:
        problem = f"has num_hidden_layers {config.num_hidden_layers}; it must be at least 1"
    if problem:
        raise InvalidRequest(field, str(directory), f"{config.model_type} {problem}")
    try:
        with torch.device("meta"), quiet_transformers():
            model = AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model {str(directory)!r}: no model can be made of its config.json: {reason}") from None
    embeddings, heads = model.get_input_embeddings().weight, config.num_attention_heads
    experts = next((n for name in _EXPERT_NUMBERS if (n := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    in_experts = sum(size for name, size in sizes.items() if ".experts." in name) if experts and chosen else 0
    return ModelShape(
        name=source.name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_context=max_model_len(config),
        num_parameters=sum(sizes.values()),
        num_lookup_parameters=0 if model.get_output_embeddings().weight is embeddings else embeddings.numel(),
        num_expert_parameters=in_experts,
        num_experts=experts if in_experts else 0,
        experts_per_token=chosen if in_experts else 0,
        is_parallel=mask_token_of(source, whole) is not None,
    )

"""Loads models and tokenizers with `transformers`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError
from actors.models.dtypes import choose_dtype
from actors.models.layer_types import has_recurrent_state
from actors.models.loaded_weights import check_loaded
from actors.models.quiet import quiet_transformers
from actors.models.rank_plans import add_biases_once, check_own_plan, plan_of, with_own_plan
from actors.models.source import ModelSource
from actors.models.stored_quantization import check_stored_quantization, stored_quantization, unify_dtype
from actors.options import Dtype, ModelOptions, Quantization, TargetOptions

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_FALLBACK_MODEL_LEN = 2048  # for models that state no limit (ALiBi)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a model that the cluster needs, read without its weights."""

    name: str  # name for clients
    vocab_size: int  # columns of the output logits
    max_model_len: int  # tokens of prompt and output together
    eos_token_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    weights_fingerprint: str
    tokenizer_fingerprint: str
    max_side_len: int | None = None  # encoder-decoder models: tokens of the prompt alone, or of the output alone

    @property
    def fingerprint(self) -> str:
        """Identifies weights, tokenizer and chat template."""
        return f"{self.weights_fingerprint}-{self.tokenizer_fingerprint}"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt."""
        return self.max_side_len is not None


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model. Column c of its logits is token `token_ids[c]`, or token c if that is None."""

    model: PreTrainedModel
    token_ids: torch.Tensor | None  # int64 [Vd] on the model's device, strictly increasing


def choose_device(device: str) -> str:
    """The name of an existing device. `auto` is cuda if there is one, else cpu. Raises ModelError."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device is {device!r}; this machine offers no CUDA device to torch")
    try:
        kind = torch.device(device)
        missing = kind.type == "meta" or (kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count())
        if kind.type != "cuda":  # there, a tensor would cost the process a context
            torch.empty(0, device=kind)
    except (RuntimeError, AssertionError, NotImplementedError):
        missing = True
    if missing:
        raise ModelError(f"device is {device!r}; it must be auto, cpu, cuda, cuda:N or another that torch has here")
    return device


def read_config(source: ModelSource) -> PretrainedConfig:
    """The configuration of a model of any kind that `transformers` knows. Raises ModelError."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"model {source.spec!r}: config.json cannot be used: {_one_line(error)}") from None


def load_config(source: ModelSource) -> PretrainedConfig:
    """The model's configuration. Raises ModelError unless it is a language model from text to text that `transformers`
    knows: decoder-only, or encoder-decoder."""
    from transformers import PreTrainedConfig

    config = read_config(source)
    problem = generation_problem(config)
    if problem is not None:
        raise ModelError(f"model {source.spec!r}: {config.model_type} {problem}")
    with _naming_config(source):
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise TypeError("its language model is no object")
        length_limits(config)
    return config


@contextlib.contextmanager
def _naming_config(source: ModelSource) -> Iterator[None]:
    """Turn what a value of a wrong type makes the block raise into ModelError."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"model {source.spec!r}: config.json cannot be used: {_one_line(error)}") from None


def generation_problem(config: PretrainedConfig) -> str | None:
    """Why a configuration is not of a language model from text to text, as a predicate to its model type; or None."""
    from transformers import GenerationMixin
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    if not getattr(config, "is_encoder_decoder", False):
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return None
        return "is not a language model that transformers generates with"
    if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return "is not a language model that transformers generates with"
    kind = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
    if kind.main_input_name != "input_ids" or kind.generate is not GenerationMixin.generate:
        return "does not generate from text alone"
    if config.model_type == "encoder-decoder" or hasattr(config, "src_vocab_size"):
        return "has a vocabulary for each of its two sides; there must be one for both"
    if hasattr(config, "expert_capacity"):
        return "has experts of limited capacity, for which tokens compete; what one says would depend on its company"
    if getattr(config, "attention_type", None) == "block_sparse":
        return "attends at random places; set attention_type to original_full"
    return None


def refuse_encoder(source: ModelSource, what: str) -> None:
    """Raises ModelError for an encoder-decoder model, which does not support `what`."""
    config = load_config(source)
    if config.is_encoder_decoder:
        raise ModelError(f"model {source.spec!r}: {config.model_type} has an encoder; {what} needs a model without")


def check_exact(options: TargetOptions) -> None:
    """Raises ModelError for options that contradict `exact: bitwise`."""
    if options.exact == "bitwise" and options.attention is not None:
        raise ModelError(
            f"attention is {options.attention!r} and exact is 'bitwise', which has attention of its own; leave one out"
        )


def check_attention(options: ModelOptions, device: str) -> None:
    """Raises ModelError for attention that no device of this kind computes."""
    if options.attention in ("triton_tree", "flashinfer") and not device.startswith("cuda"):
        raise ModelError(f"attention is {options.attention!r} with device {device!r}; it needs a GPU: choose 'padded'")


def check_encoder_decoder(source: ModelSource, options: TargetOptions) -> None:
    """Raises ModelError for an encoder-decoder target with options for decoder-only models."""
    if options.exact == "bitwise":
        refuse_encoder(source, "exact 'bitwise'")
    if options.tensor_parallel > 1:
        refuse_encoder(source, f"tensor_parallel {options.tensor_parallel}")
    if options.quantization != "none":
        refuse_encoder(source, f"quantization {options.quantization!r}")
    if options.attention is not None:
        refuse_encoder(source, f"attention {options.attention!r}")
    if options.eagle_head != "none":
        refuse_encoder(source, "a draft head")


def check_recurrent_state(source: ModelSource, options: TargetOptions) -> None:
    """Raises ModelError for a target with recurrent layers and options that need attention alone."""
    config = load_config(source)
    if not has_recurrent_state(config):
        return
    others = {
        "exact 'bitwise'": options.exact == "bitwise",
        f"attention {options.attention!r}": options.attention not in (None, "padded"),
    }
    for what, is_asked in others.items():
        if is_asked:
            raise ModelError(
                f"model {source.spec!r}: {config.model_type} has a recurrent state; {what} needs a model without"
            )


def check_tensor_parallel(source: ModelSource, ranks: int) -> None:
    """Raises ModelError for a model that has no tensor-parallel plan, or whose heads do not divide among the ranks."""
    text = load_config(source).get_text_config()
    if ranks == 1:
        return
    if not plan_of(text):
        raise ModelError(
            f"model {source.spec!r}: {text.model_type} has no tensor-parallel plan; tensor_parallel must be 1"
        )
    heads = int(text.num_attention_heads)
    for what, count in (("attention", heads), ("key-value", getattr(text, "num_key_value_heads", None) or heads)):
        if count % ranks:
            limit = f"it must divide the {count} {what} heads of model {source.spec!r}"
            raise ModelError(f"tensor_parallel is {ranks}; {limit}")
    check_own_plan(source.spec, text, stored_quantization(text), ranks)


def check_draft_ranks(source: ModelSource, ranks: int) -> None:
    """Raises ModelError for a draft model that is not shared out over so many ranks."""
    if ranks == 1:
        return
    refuse_encoder(source, f"tensor_parallel {ranks}")
    config = load_config(source)
    if has_recurrent_state(config):
        raise ModelError(
            f"model {source.spec!r}: {config.model_type} has a recurrent state; a draft model must have none"
        )
    check_whole_vocabulary(source, ranks)
    check_tensor_parallel(source, ranks)


def check_whole_vocabulary(source: ModelSource, ranks: int) -> None:
    """Raises ModelError for a reduced vocabulary on several ranks."""
    if source.vocab_map_path is not None and ranks > 1:
        raise ModelError(f"tensor_parallel is {ranks}; model {source.spec!r} has a reduced vocabulary, which needs 1")


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer with its chat template, if it has one. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(source.path, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"model {source.spec!r}: the tokenizer cannot be loaded: {_one_line(error)}") from None


def load_model(
    source: ModelSource,
    dtype: Dtype = "float32",
    device: str = "cpu",
    *,
    tensor_parallel: int = 1,
    quantization: Quantization = "none",
) -> PreTrainedModel:
    """Load a model unpatched, in eval mode, its parameters without gradients.

    With `tensor_parallel` > 1, every rank calls this after it has initialised `torch.distributed` with that world size,
    and gets its shard by the model's own plan. With a `quantization`, each weight is quantized on the device when it is
    read in `dtype`, and never are all of them there unquantized. A checkpoint that is quantized itself is left to
    `transformers`. Raises ModelError.
    """
    return _load_model(source, dtype, device, tensor_parallel, quantization)


def _load_model(
    source: ModelSource,
    dtype: Dtype,
    device: str,
    tensor_parallel: int = 1,
    quantization: Quantization = "none",
    *,
    keep_head: bool = False,
) -> PreTrainedModel:
    """keep_head: a `quantization` leaves the output layer as it is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = load_config(source)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if quantization != "none":
        refuse_encoder(source, f"quantization {quantization!r}")
    device = choose_device(device)
    stored = stored_quantization(config)
    if stored is not None:
        check_stored_quantization(source, stored, quantization, device)
    torch_dtype = getattr(torch, choose_dtype(dtype, config, device))
    options: dict[str, Any] = {"dtype": torch_dtype, "trust_remote_code": False, "output_loading_info": True}
    divides_mixers = quantization == "none" and stored is None  # weights that are cut after loading
    if tensor_parallel > 1:
        options["distributed_config"] = _distributed_config(source, config, tensor_parallel)
        options["config"] = with_own_plan(config, divides_mixers=divides_mixers)
    elif device != "cpu" or stored is not None:
        options["device_map"] = {"": device}  # loads onto the device, never whole into host memory
    try:
        reading: AbstractContextManager[None] = contextlib.nullcontext()
        if quantization != "none":
            options["quantization_config"], reading = _quantizing(quantization, device, tensor_parallel, keep_head)
        elif tensor_parallel > 1 and stored is not None and stored.get("quant_method") == "mxfp4":
            options["quantization_config"], reading = _widening()
        with quiet_transformers(), reading:
            model, info = kind.from_pretrained(source.path, **options)
            check_loaded(model, info, is_quantized=stored is not None)
    except ModelError as error:
        raise ModelError(f"model {source.spec!r}: {error}") from None
    except Exception as error:
        problem = getattr(options.get("quantization_config"), "problem", None)
        if problem is not None:
            raise ModelError(f"model {source.spec!r}: {problem}") from None
        raise ModelError(f"model {source.spec!r}: the weights cannot be loaded: {_one_line(error)}") from error
    if stored is not None:
        unify_dtype(model, torch_dtype)
    if tensor_parallel > 1:
        _keep_own_share(model, divides_mixers)
    model.eval()
    model.requires_grad_(False)
    return model


def _quantizing(
    quantization: Quantization, device: str, tensor_parallel: int, keep_head: bool
) -> tuple[Any, AbstractContextManager[None]]:
    """`quantization_config` of `from_pretrained`, and what is open while it reads. Raises ModelError for a device that
    has no such quantization."""
    import torch

    from actors.models.quantization import check_device
    from actors.models.quantized_loading import WhileLoading, read_by_tensor

    check_device(quantization, torch.device(device))
    return WhileLoading(quantization, tensor_parallel, keep_head), read_by_tensor()


def _widening() -> tuple[Any, AbstractContextManager[None]]:
    """As `_quantizing`, for ranks that widen their share of weights in MXFP4."""
    from transformers import Mxfp4Config

    from actors.models.mxfp4_shares import read_own_blocks

    return Mxfp4Config(dequantize=True), read_own_blocks()


def _keep_own_share(model: PreTrainedModel, divides_mixers: bool) -> None:
    """Make what `transformers` has loaded in shards a model of this rank alone."""
    import torch.distributed as dist

    from actors.models.mixer_shares import divide_mixers
    from actors.models.shards import unwrap_shards

    unwrap_shards(model)
    if divides_mixers:
        divide_mixers(model)
    add_biases_once(model, dist.get_rank())


def load_draft_model(
    source: ModelSource,
    dtype: Dtype = "float32",
    device: str = "cpu",
    *,
    tensor_parallel: int = 1,
    quantization: Quantization = "none",
) -> DraftModel:
    """Load a draft model. If its directory has a vocabulary map, only those rows of the output layer are kept.
    tensor_parallel: as for `load_model`; more than 1 needs a model of which `check_draft_ranks` says nothing.

    The map is `token_ids`, int32 or int64 [Vd], strictly increasing, in vocab_map.safetensors. Logits then have Vd
    columns. Raises ModelError.
    """
    import torch

    from actors.models.quantization import quantize_linears

    path = source.vocab_map_path
    if path is None:
        model = load_model(source, dtype, device, tensor_parallel=tensor_parallel, quantization=quantization)
        return DraftModel(model, token_ids=None)
    # The output layer is quantized last, because rows are selected from the original weights.
    model = _load_model(source, dtype, device, quantization=quantization, keep_head=True)
    head = model.get_output_embeddings()
    token_ids = _read_vocab_map(path, head.out_features).to(head.weight.device)
    # New parameters: the weight may be shared with the embeddings, which stay whole.
    head.weight = torch.nn.Parameter(head.weight[token_ids], requires_grad=False)
    if head.bias is not None:
        head.bias = torch.nn.Parameter(head.bias[token_ids], requires_grad=False)
    head.out_features = len(token_ids)
    quantize_linears(model, quantization, head.weight.device)
    return DraftModel(model=model, token_ids=token_ids)


def silence_unmapped_tokens(model: PreTrainedModel, source: ModelSource) -> None:
    """If the directory has a vocabulary map, set the logits of all other tokens to -inf, in place.

    So a draft model with a reduced vocabulary can be a target. Raises ModelError.
    """
    import torch

    path = source.vocab_map_path
    if path is None:
        return
    head = model.get_output_embeddings()
    bias = torch.full((head.out_features,), -torch.inf, dtype=model.dtype, device=model.device)
    token_ids = _read_vocab_map(path, head.out_features).to(model.device)
    bias[token_ids] = 0.0 if head.bias is None else head.bias[token_ids]
    head.bias = torch.nn.Parameter(bias, requires_grad=False)


def _read_vocab_map(path: Path, num_ids: int) -> torch.Tensor:
    """int64 [Vd], strictly increasing, below num_ids. Raises ModelError."""
    import torch
    from safetensors.torch import load_file

    try:
        token_ids = load_file(path)["token_ids"].to(torch.int64)
    except Exception as error:
        raise ModelError(f"{path}: cannot be read: {_one_line(error)}") from None
    if token_ids.ndim != 1 or not len(token_ids) or bool((token_ids.diff() <= 0).any()):
        raise ModelError(f"{path}: token_ids must be one strictly increasing row of ids")
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= num_ids:
        raise ModelError(f"{path}: token_ids reach from {token_ids[0]} to {token_ids[-1]}; the model has {num_ids} ids")
    return token_ids


def read_model_info(source: ModelSource, served_name: str | None = None) -> ModelInfo:
    """Raises ModelError."""
    config = load_config(source)
    text = config.get_text_config()
    max_len, max_side_len = length_limits(config)
    with _naming_config(source):
        vocab_size, num_layers, hidden_size = map(int, (text.vocab_size, text.num_hidden_layers, text.hidden_size))
        eos_token_ids = eos_token_ids_of(source, text)
    return ModelInfo(
        name=served_name or source.name,
        vocab_size=vocab_size,
        max_model_len=max_len,
        eos_token_ids=eos_token_ids,
        num_layers=num_layers,
        hidden_size=hidden_size,
        weights_fingerprint=source.weights_fingerprint(),
        tokenizer_fingerprint=source.tokenizer_fingerprint(),
        max_side_len=max_side_len,
    )


def length_limits(config: PretrainedConfig) -> tuple[int, int | None]:
    """Limits of prompt and output together, and of either alone for an encoder-decoder model, else None."""
    positions = max_model_len(config.get_text_config())
    return (2 * positions, positions) if config.is_encoder_decoder else (positions, None)


def max_model_len(config: PretrainedConfig) -> int:
    """Positions of the model (of the decoder, if there are two), extended by its rotary scaling.

    YaRN scales from its original length, linear scaling from the stated one. Llama 3, and models that scale only some
    layer types (Gemma 3), state the extended length. Dynamic scaling and LongRoPE change all positions once the longest
    row of a batch exceeds the original length, so rows would depend on each other; these models end there.
    """
    names = ("max_position_embeddings", "seq_length", "max_seq_len", "max_decoder_position_embeddings")
    limit = next((limit for name in names if (limit := getattr(config, name, None))), None)
    if not limit:
        return _FALLBACK_MODEL_LEN
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping) or "rope_type" not in rope:
        return int(limit)
    factor = float(rope.get("factor") or 1.0)
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or limit
        return max(int(limit), int(original * factor))
    if rope["rope_type"] == "linear":
        return max(int(limit), int(limit * factor))
    if rope["rope_type"] in ("dynamic", "longrope"):
        return min(int(limit), int(rope.get("original_max_position_embeddings") or limit))
    return int(limit)


def eos_token_ids_of(source: ModelSource, config: PretrainedConfig) -> tuple[int, ...]:
    """As in `generate`: generation_config.json first, then config.json, then the tokenizer."""
    for value in (
        source.read_json("generation_config.json").get("eos_token_id"),
        getattr(config, "eos_token_id", None),
    ):
        if isinstance(value, int):
            return (value,)
        if value:
            return tuple(int(token) for token in value)
    if not (source.path / "tokenizer_config.json").is_file():
        return ()
    value = load_tokenizer(source).eos_token_id
    return () if value is None else (int(value),)


def _distributed_config(source: ModelSource, config: PretrainedConfig, tensor_parallel: int) -> Any:
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != tensor_parallel:
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
        raise ModelError(f"tensor_parallel is {tensor_parallel}; torch.distributed is set up for {size} ranks")
    check_tensor_parallel(source, tensor_parallel)
    return DistributedConfig(tp_size=tensor_parallel)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

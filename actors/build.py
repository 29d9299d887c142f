"""From a model on disk to an engine, with a KV cache of a size that fits."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.ouroboros_drafter import LookaheadOptions
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.eagle.eagle_drafter import EagleOptions
from actors.eagle.eagle_head import EagleHead, load_eagle_head
from actors.engine.options import EngineOptions, Exactness
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.models.loader import (
    check_encoder_decoder,
    choose_device,
    load_config,
    load_draft_model,
    load_model,
    load_tokenizer,
    max_model_len,
    refuse_encoder,
    silence_unmapped_tokens,
)
from actors.models.quantization import Quantization
from actors.models.source import ModelSource
from actors.models.token_text import TokenText, has_own_vocabulary

logger = logging.getLogger(__name__)

_MAX_AUTO_TOKENS = 1 << 20


def build_target_engine(
    source: ModelSource,
    dtype: str = "float32",
    device: str = "auto",
    *,
    kv_cache_tokens: int | None = None,
    kv_cache_fraction: float = 0.2,
    block_size: int = 16,
    prefix_cache: bool = True,
    exact: Exactness = "default",
    tensor_parallel: int = 1,
    rank: int = 0,
    quantization: Quantization = "none",
    eagle_head: Path | str | None = None,
    eagle_options: EagleOptions | None = None,
) -> TargetEngine:
    """Load the target and size its cache: kv_cache_tokens, or a fraction of the device's free memory.

    eagle_head: directory of a head that drafts beside the target, which must be on one rank then.

    With tensor_parallel > 1 the caller has initialised `torch.distributed`; only rank 0 samples. Raises ModelError.
    """
    device = choose_device(device)
    if exact == "bitwise" and (device != "cpu" or tensor_parallel > 1):
        raise ModelError(
            f"exact is 'bitwise' with device {device!r} and tensor_parallel {tensor_parallel}; it needs cpu and 1"
        )
    if source.vocab_map_path is not None and tensor_parallel > 1:
        raise ModelError(
            f"tensor_parallel is {tensor_parallel}; model {source.spec!r} has a reduced vocabulary, which needs 1"
        )
    if eagle_head is not None and tensor_parallel > 1:
        raise ModelError(
            f"EAGLE head {str(eagle_head)!r} with tensor_parallel {tensor_parallel}; a head needs a target on one rank"
        )
    config = load_config(source)
    check_encoder_decoder(source, exact, tensor_parallel, quantization, eagle_head is not None)
    head: EagleHead | None = None
    if eagle_head is not None:  # before the target, which takes longer
        head = load_eagle_head(eagle_head, config, dtype, device)
    model = load_model(source, dtype, device, tensor_parallel=tensor_parallel, quantization=quantization)
    silence_unmapped_tokens(model, source)
    bytes_per_token = kv_bytes_per_token(config, next(model.parameters()).dtype, tensor_parallel)
    if head is not None:
        bytes_per_token += head.kv_bytes_per_token()
    tokens = kv_cache_tokens or _tokens_that_fit(config, model, kv_cache_fraction, bytes_per_token)
    options = EngineOptions(max(1, tokens // block_size), block_size, prefix_cache, exact)
    return TargetEngine(model, options, rank == 0, head, eagle_options)


def build_draft_engine(
    source: ModelSource,
    dtype: str = "float32",
    device: str = "auto",
    *,
    kv_cache_tokens: int | None = None,
    kv_cache_fraction: float = 0.1,
    block_size: int = 16,
    quantization: Quantization = "none",
    lookahead: LookaheadOptions | None = None,
    target: ModelSource | None = None,
    ahead: int = 0,
) -> DraftEngine | RetokenizedDraftEngine:
    """Load a draft model, reduced vocabulary or not, with its own cache.

    target: the model it drafts for; where their vocabularies differ, drafts go by way of the text. None: the
    vocabularies are the same. ahead: outcomes of each draft to draft for before they are asked for, which needs
    somebody to call `work_ahead`, and equal vocabularies. Raises ModelError.
    """
    texts = None
    if target is not None and has_own_vocabulary(source, target):
        refuse_encoder(source, "drafting for a model with another vocabulary")
        texts = TokenText(load_tokenizer(target), target.spec), TokenText(load_tokenizer(source), source.spec)
    draft = load_draft_model(source, dtype, choose_device(device), quantization=quantization)
    config = load_config(source)
    bytes_per_token = kv_bytes_per_token(config, next(draft.model.parameters()).dtype)
    tokens = kv_cache_tokens or _tokens_that_fit(config, draft.model, kv_cache_fraction, bytes_per_token)
    options = EngineOptions(max(1, tokens // block_size), block_size)
    engine = DraftEngine(draft.model, options, draft.token_ids, lookahead, ahead if texts is None else 0)
    if texts is None:
        return engine
    logger.info("draft model %s has a vocabulary of its own: its drafts go by way of the text", source.spec)
    return RetokenizedDraftEngine(engine, *texts)


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype, tensor_parallel: int = 1) -> int:
    """Bytes of keys and values that one token takes on one rank; with an encoder, those of either side's tokens."""
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_decoder_layers", None) or text.num_hidden_layers
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * layers * -(-kv_heads // tensor_parallel) * head_dim * dtype.itemsize)


def _tokens_that_fit(config: PretrainedConfig, model: PreTrainedModel, fraction: float, bytes_per_token: int) -> int:
    device = next(model.parameters()).device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    tokens = int(free * fraction) // bytes_per_token
    needed = min(max_model_len(config.get_text_config()), 4096)
    if tokens < needed:
        raise ModelError(
            f"{fraction:.0%} of free memory holds the keys and values of {tokens} tokens; at least {needed} are needed"
        )
    return min(tokens, _MAX_AUTO_TOKENS)

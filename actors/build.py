"""Builds engines from models on disk, with KV caches that fit into memory."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.eagle.eagle_drafter import EagleDrafter
from actors.eagle.eagle_head import EagleHead, load_eagle_head
from actors.engine.options import EngineOptions
from actors.engine.rank_group import least_of_ranks
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
from actors.models.source import ModelSource
from actors.models.token_text import TokenText, has_own_vocabulary
from actors.options import DraftOptions, TargetOptions

logger = logging.getLogger(__name__)

_MAX_AUTO_TOKENS = 1 << 20
_DRAFT_KV_FRACTION = 0.1  # share of free memory for a draft model's KV cache


def build_target_engine(source: ModelSource, options: TargetOptions | None = None, *, rank: int = 0) -> TargetEngine:
    """Load the target and its EAGLE head, if it has one, and size the KV cache.

    With tensor_parallel > 1 the caller has initialised `torch.distributed`; only rank 0 samples. Raises ModelError.
    """
    options = options or TargetOptions()
    device = choose_device(options.device)
    ranks = options.tensor_parallel
    if options.exact == "bitwise" and (device != "cpu" or ranks > 1):
        raise ModelError(f"exact is 'bitwise' with device {device!r} and tensor_parallel {ranks}; it needs cpu and 1")
    if source.vocab_map_path is not None and ranks > 1:
        raise ModelError(f"tensor_parallel is {ranks}; model {source.spec!r} has a reduced vocabulary, which needs 1")
    config = load_config(source)
    check_encoder_decoder(source, options)
    head: EagleHead | None = None
    if options.eagle_head != "none":  # before the target, which takes longer
        head = load_eagle_head(Path(options.eagle_head), config, options.dtype, device)
    model = load_model(source, options.dtype, device, tensor_parallel=ranks, quantization=options.quantization)
    silence_unmapped_tokens(model, source)
    bytes_per_token = kv_bytes_per_token(config, next(model.parameters()).dtype, ranks)
    if head is not None:
        bytes_per_token += head.kv_bytes_per_token()
    tokens = options.kv_cache_tokens or _tokens_that_fit(config, model, options.kv_cache_fraction, bytes_per_token)
    num_blocks = max(1, tokens // options.block_size)
    if ranks > 1:
        # With pools of their own size, one rank would find no room for a sequence that the others compute.
        num_blocks = least_of_ranks(num_blocks)
    engine_options = EngineOptions(
        num_blocks=num_blocks,
        block_size=options.block_size,
        prefix_cache=options.prefix_cache,
        exact=options.exact,
    )
    engine = TargetEngine(model, engine_options, samples=rank == 0)
    if head is not None:
        engine.eagle_head = EagleDrafter(model, head, engine_options.num_slots, options.eagle)
    return engine


def build_draft_engine(
    source: ModelSource, options: DraftOptions | None = None, *, target: ModelSource | None = None
) -> DraftEngine | RetokenizedDraftEngine:
    """Load a draft model, with a reduced vocabulary or not, and size its own KV cache.

    target: the model it drafts for; drafts are translated through the text if the vocabularies differ. None: they are
    equal. `options.ahead` above 0 needs a caller of `work_ahead`, and equal vocabularies; None is 0. Raises ModelError.
    """
    options = options or DraftOptions()
    texts = None
    if target is not None and has_own_vocabulary(source, target):
        refuse_encoder(source, "drafting for a model with another vocabulary")
        texts = TokenText(load_tokenizer(target), target.spec), TokenText(load_tokenizer(source), source.spec)
    draft = load_draft_model(source, options.dtype, choose_device(options.device), quantization=options.quantization)
    config = load_config(source)
    bytes_per_token = kv_bytes_per_token(config, next(draft.model.parameters()).dtype)
    tokens = options.kv_cache_tokens or _tokens_that_fit(config, draft.model, _DRAFT_KV_FRACTION, bytes_per_token)
    engine = DraftEngine(
        draft.model,
        EngineOptions(max(1, tokens // options.block_size), options.block_size),
        draft.token_ids,
        lookahead=options.lookahead,
        ahead=options.ahead or 0 if texts is None else 0,
    )
    if texts is None:
        return engine
    logger.info("draft model %s has its own vocabulary: its drafts are translated through the text", source.spec)
    return RetokenizedDraftEngine(engine, *texts)


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype, tensor_parallel: int = 1) -> int:
    """Bytes of keys and values of one token on one rank; with an encoder, of a token of either side."""
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

"""Builds engines from models on disk, with KV caches that fit into memory."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import psutil
import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.eagle.draft_head import DraftHead
from actors.eagle.eagle_drafter import EagleDrafter
from actors.eagle.head_loading import load_head
from actors.eagle.mtp_loading import load_mtp_head
from actors.eagle.one_pass_drafter import OnePassDrafter
from actors.engine.attention.choice import has_triton, missing_for_triton_tree
from actors.engine.attention.flashinfer import wrapper_class
from actors.engine.cpu_kernels.kernel_choice import fastest_dtype
from actors.engine.gpu_memory import GpuMeter, gpu_meter
from actors.engine.kv_bytes import kv_bytes_per_token
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions, RoundLimits
from actors.engine.rank_group import Leader, least_of_ranks
from actors.engine.recurrent.state_bytes import recurrent_state_bytes
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import largest_round_slots, run_largest_round
from actors.errors import ModelError
from actors.grammar.grammars import Grammars
from actors.models.collectives import rank_of_group, sum_in_rank_order, use_symmetric_memory
from actors.models.dtypes import choose_dtype
from actors.models.loader import (
    DraftModel,
    check_attention,
    check_draft_ranks,
    check_encoder_decoder,
    check_exact,
    check_recurrent_state,
    check_whole_vocabulary,
    choose_device,
    eos_token_ids_of,
    length_limits,
    load_config,
    load_draft_model,
    load_model,
    load_tokenizer,
    max_model_len,
    refuse_encoder,
    silence_unmapped_tokens,
)
from actors.models.parallel_draft import kind_of, mask_token_of, most_guesses_of, silence_mask_token
from actors.models.shards import check_unwrapped
from actors.models.source import ModelSource
from actors.models.token_text import TokenText, has_own_vocabulary
from actors.options import MTP_HEAD, DraftOptions, ModelOptions, TargetOptions

logger = logging.getLogger(__name__)

_MAX_AUTO_TOKENS = 1 << 20  # on a CPU, and of a draft model
_HOST_KV_FRACTION = 0.2  # of a host's free memory, for the target's KV cache
_HOST_DRAFT_KV_FRACTION = 0.1  # the same, for a draft model's
_GPU_FRACTION = 0.9  # of a GPU's memory, for all of a process
_CACHED_STATES_SHARE = 0.25  # recurrent states of prefixes, relative to the bytes of keys and values
_DEFAULT_LIMITS = RoundLimits()


def build_target_engine(
    source: ModelSource,
    options: TargetOptions | None = None,
    *,
    rank: int = 0,
    limits: RoundLimits = _DEFAULT_LIMITS,
) -> TargetEngine:
    """Load the target and its draft head, if it has one, and size the KV cache. limits: of rounds, which must fit
    beside it.

    With tensor_parallel > 1 the caller has initialised `torch.distributed`; only rank 0 samples. Raises ModelError.
    """
    options = options or TargetOptions()
    device = choose_device(options.device)
    ranks = options.tensor_parallel
    check_exact(options)
    _check_attention(options, device)
    if options.exact == "bitwise" and device != "cpu":
        _check_bitwise_on(device, warns=rank == 0)
    check_whole_vocabulary(source, ranks)
    config = load_config(source)
    check_encoder_decoder(source, options)
    check_recurrent_state(source, options)
    # Ranks that measure for themselves might disagree, and the arithmetic of bitwise mode is float32.
    measures = ranks == 1 and options.exact == "default"
    dtype = choose_dtype(options.dtype, config, device, fastest_dtype if measures else None)
    meter = gpu_meter(device)
    head: DraftHead | None = None
    if options.eagle_head == MTP_HEAD:  # before the target, which takes longer
        head = load_mtp_head(source, config, dtype, device)
    elif options.eagle_head != "none":
        head = load_head(Path(options.eagle_head), config, dtype, device)
    model = load_model(source, dtype, device, tensor_parallel=ranks, quantization=options.quantization)
    silence_unmapped_tokens(model, source)
    if ranks > 1:
        _choose_sums(model, options)
    num_blocks, max_cached_states = _target_cache(model, config, options, head, limits, meter)
    engine_options = EngineOptions(
        num_blocks=num_blocks,
        block_size=options.block_size,
        prefix_cache=options.prefix_cache,
        exact=options.exact,
        attention=options.attention,
        max_cached_states=max_cached_states,
        is_eager=options.enforce_eager,
    )
    engine = TargetEngine(model, engine_options, rank, ranks)
    if head is not None:
        attention = None if options.attention == "flashinfer" else options.attention
        # Branches of its trees would not be verified.
        shape = options.eagle.model_copy(update={"top_k": 1}) if engine.chain_only else options.eagle
        kind = EagleDrafter if head.masks is None else OnePassDrafter
        engine.attach_head(kind(model, head, engine_options.num_slots, shape, attention=attention, num_ranks=ranks))
    return engine


def _target_cache(
    model: PreTrainedModel,
    config: PretrainedConfig,
    options: TargetOptions,
    head: DraftHead | None,
    limits: RoundLimits,
    meter: GpuMeter | None,
) -> tuple[int, int]:
    """Blocks of the KV cache, those asked for or as many as fit; and recurrent states of prefixes."""
    ranks = options.tensor_parallel
    if ranks > 1:
        least_of_ranks(0)  # fails where one could not load, before forwards, which would hang
    state_bytes = recurrent_state_bytes(model)  # before attention of the model is changed
    bytes_per_token = kv_bytes_per_token(model)
    tokens = options.kv_cache_tokens
    states_share = _CACHED_STATES_SHARE if state_bytes and options.prefix_cache else 0.0
    if tokens is None:
        # Each sequence has a state and the one at its last border of blocks, and a round computes with a copy.
        num_bytes = _bytes_for_target(model, options, limits, meter, bytes_per_token)
        num_bytes = int((num_bytes - 3 * limits.sequences * state_bytes) / (1 + states_share))
        if head is not None:
            bytes_per_token += head.kv_bytes_per_token()
        tokens = _tokens_that_fit(num_bytes, bytes_per_token, config)
        if meter is None:
            tokens = min(tokens, _MAX_AUTO_TOKENS)
    num_blocks = _blocks_of(tokens, options.block_size)
    # With pools of their own size, one rank would find no room for a sequence that the others compute.
    num_blocks = least_of_ranks(num_blocks) if ranks > 1 else num_blocks
    kv_bytes = num_blocks * options.block_size * bytes_per_token
    return num_blocks, int(states_share * kv_bytes) // state_bytes if state_bytes else 0


def _check_bitwise_on(device: str, *, warns: bool) -> None:
    """Raises ModelError if the kernel of bitwise mode cannot be compiled here. device: no CPU."""
    if not has_triton():
        raise ModelError(f"exact is 'bitwise' with device {device!r}; without Triton it needs cpu")
    if warns:
        logger.warning("of all GPUs, exact 'bitwise' has been tried on an H200 only")


def _choose_sums(model: PreTrainedModel, options: TargetOptions) -> None:
    """Choose the all-reduce of the ranks: in a fixed order for bitwise mode, else the fastest. Raises ModelError."""
    if options.exact == "bitwise":
        check_unwrapped(model)
        sum_in_rank_order()
    elif model.device.type == "cuda":
        use_symmetric_memory(model.device, model.dtype)


def build_draft_engine(
    source: ModelSource,
    options: DraftOptions | None = None,
    *,
    target: ModelSource | None = None,
    grammars: Grammars | None = None,
    leader: Leader | None = None,
) -> DraftEngine | RetokenizedDraftEngine:
    """Load a draft model, with a reduced vocabulary or not, and size its own KV cache.

    target: the model it drafts for; drafts are translated through the text if the vocabularies differ. None: they are
    equal. grammars: of the target's vocabulary; None: made for the target, if there is one. leader: of the ranks of
    `torch.distributed` that share the model, of which this is rank 0; the others call `build_draft_runner` meanwhile. A
    model whose configuration names a mask token guesses all tokens of a draft in one forward.
    `options.ahead` above 0 needs a caller of `work_ahead`, and equal vocabularies; None is 0. Raises ModelError.
    """
    options = options or DraftOptions()
    texts = None
    if target is not None and has_own_vocabulary(source, target):
        refuse_encoder(source, "drafting for a model with another vocabulary")
        texts = TokenText(load_tokenizer(target), target.spec), TokenText(load_tokenizer(source), source.spec)
    config = load_config(source)
    mask_token = mask_token_of(source, config)
    draft, engine_options = _load_draft(source, options, 1 if leader is None else rank_of_group()[1])
    if texts is None and grammars is None and target is not None:
        grammars = _checked_grammars(target)
    engine = DraftEngine(
        draft.model,
        engine_options,
        draft.token_ids,
        lookahead=options.lookahead,
        ahead=options.ahead or 0 if texts is None else 0,
        mask_token=mask_token,
        most_guesses=most_guesses_of(source, config) if mask_token is not None else None,
        grammars=grammars,
        leader=leader,
    )
    if texts is None:
        return engine
    logger.info("draft model %s has its own vocabulary: its drafts are translated through the text", source.spec)
    return RetokenizedDraftEngine(engine, *texts)


def build_draft_runner(source: ModelSource, options: DraftOptions) -> ModelRunner:
    """The part of a draft model on ranks 1 to N - 1, for `follow_forwards`. Raises ModelError."""
    draft, engine_options = _load_draft(source, options, rank_of_group()[1])
    return ModelRunner(
        draft.model,
        engine_options.num_slots,
        attention=engine_options.attention,
        is_eager=engine_options.is_eager,
    )


def _load_draft(source: ModelSource, options: DraftOptions, ranks: int) -> tuple[DraftModel, EngineOptions]:
    """This rank's part of a draft model, which guesses no mask token; and the size of its KV cache."""
    config, device = load_config(source), choose_device(options.device)
    check_draft_ranks(source, ranks)
    _check_attention(options, device)
    if options.attention is not None:
        refuse_encoder(source, f"attention {options.attention!r}")
    # Ranks that measure for themselves might disagree.
    dtype = choose_dtype(options.dtype, config, device, fastest_dtype if ranks == 1 else None)
    meter = gpu_meter(device)
    mask_token = mask_token_of(source, config)
    draft = load_draft_model(source, dtype, device, tensor_parallel=ranks, quantization=options.quantization)
    if mask_token is not None:
        silence_mask_token(draft.model, mask_token, draft.token_ids)
        logger.info("draft model %s guesses all tokens of a draft in one forward (%s)", source.spec, kind_of(config))
    if ranks > 1:
        least_of_ranks(0)  # fails where one could not load, before forwards, which would hang
    bytes_per_token = kv_bytes_per_token(draft.model)
    tokens = options.kv_cache_tokens
    if tokens is None:
        num_bytes = _bytes_for_draft_model(options, meter)
        tokens = min(_tokens_that_fit(num_bytes, bytes_per_token, config), _MAX_AUTO_TOKENS)
    num_blocks = _blocks_of(tokens, options.block_size)
    if ranks > 1:
        num_blocks = least_of_ranks(num_blocks)
        if draft.model.device.type == "cuda":
            use_symmetric_memory(draft.model.device, draft.model.dtype)
    return draft, EngineOptions(
        num_blocks, options.block_size, attention=options.attention, is_eager=options.enforce_eager
    )


def _checked_grammars(target: ModelSource) -> Grammars:
    """Grammars over the target's vocabulary; its router has compiled them before."""
    text = load_config(target).get_text_config()
    ends = eos_token_ids_of(target, text)
    return Grammars(lambda: load_tokenizer(target), int(text.vocab_size), ends, target.name, are_checked=True)


def _blocks_of(tokens: int, block_size: int) -> int:
    if tokens < block_size:
        raise ModelError(f"kv_cache_tokens is {tokens}; it must be at least block_size, {block_size}")
    return tokens // block_size


def _check_attention(options: ModelOptions, device: str) -> None:
    """Raises ModelError where attention is asked for that does not run here."""
    check_attention(options, device)
    if options.attention == "flashinfer":
        wrapper_class()
    missing = missing_for_triton_tree(torch.device(device)) if options.attention == "triton_tree" else None
    if missing is not None:
        raise ModelError(f"attention is 'triton_tree' with device {device!r}; it needs {missing}: choose 'padded'")


def _bytes_for_target(
    model: PreTrainedModel, options: TargetOptions, limits: RoundLimits, meter: GpuMeter | None, bytes_per_token: int
) -> int:
    """Bytes of the KV cache of a target on one rank. On a GPU the largest round runs first. Raises ModelError."""
    if meter is None:
        return int(psutil.virtual_memory().available * (options.kv_cache_fraction or _HOST_KV_FRACTION))
    longest = options.max_model_len or length_limits(model.config)[0]
    slots = 0
    if not model.config.is_encoder_decoder:
        slots = largest_round_slots(limits, longest, options.block_size)
        engine_options = EngineOptions(
            slots // options.block_size,
            options.block_size,
            exact=options.exact,
            attention=options.attention,
            is_eager=options.enforce_eager,
        )
        engine = TargetEngine(model, engine_options)
        meter.start()
        try:
            run_largest_round(engine, limits, longest)
        except torch.OutOfMemoryError:
            raise ModelError(
                f"a round of {limits.prefill_rows} prompt rows and {limits.draft_rows + limits.sequences} others does "
                "not fit beside the model; lower router.max_prefill_rows, or use more ranks"
            ) from None
        del engine
        gc.collect()  # its KV cache may be in a cycle
    memory = meter.read(slots * bytes_per_token, will_record=slots > 0 and not options.enforce_eager)
    left = memory.for_kv_cache(options.kv_cache_fraction or _GPU_FRACTION, options.gpus or 1.0)
    return left if slots else left // 2  # not measured: half is for forwards


def _bytes_for_draft_model(options: DraftOptions, meter: GpuMeter | None) -> int:
    """Bytes of the KV cache of a draft model. On a GPU, half of what its weights leave: the rest is for forwards."""
    if meter is None:
        return int(psutil.virtual_memory().available * _HOST_DRAFT_KV_FRACTION)
    return meter.read(0).for_kv_cache(_GPU_FRACTION, options.gpus or 1.0) // 2


def _tokens_that_fit(num_bytes: int, bytes_per_token: int, config: PretrainedConfig) -> int:
    tokens = num_bytes // bytes_per_token
    needed = min(max_model_len(config.get_text_config()), 4096)
    if tokens < needed:
        raise ModelError(
            f"memory has room for the keys and values of {max(0, tokens)} tokens; at least {needed} are needed"
        )
    return tokens

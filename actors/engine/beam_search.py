"""Beam search with `transformers`.

It uses the engine's model with its packed or quantized weights, but a separate KV cache, and no drafts or batches of
the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from actors.models.quiet import quiet_transformers

# Defaults of the model that the decoder of an encoder-decoder model needs.
_OF_DECODERS = ("decoder_start_token_id", "bos_token_id", "forced_bos_token_id", "bad_words_ids", "suppress_tokens")


@dataclass(frozen=True, slots=True)
class Beam:
    token_ids: list[int]  # with the stop token, if it ended by one
    score: float  # sum of log probabilities / number of tokens ** length_penalty


@torch.inference_mode()
def search_beams(
    model: PreTrainedModel,
    prompt_token_ids: Sequence[int],
    *,
    num_beams: int,
    length_penalty: float,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
) -> Beam:
    """The best of `num_beams` (>= 2) continuations of a prompt of at least one token. length_penalty: above 0 favours
    long continuations, below 0 short ones."""
    ids = torch.tensor([list(prompt_token_ids)], device=model.device)
    begin = ids.shape[1]
    decoder: dict[str, object] = {}
    if model.config.is_encoder_decoder:
        begin = 1
        decoder = {name: getattr(model.generation_config, name) for name in _OF_DECODERS}
    config = GenerationConfig(
        num_beams=num_beams,
        length_penalty=length_penalty,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=stop_token_ids[0] if stop_token_ids else 0,
        return_dict_in_generate=True,
        output_scores=True,
        **decoder,
    )
    with _plain_attention(model), quiet_transformers():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens = output.sequences[0, begin:].tolist()
    stops = [index for index, token in enumerate(tokens) if token in stop_token_ids]
    return Beam(tokens[: stops[0] + 1] if stops else tokens, float(output.sequences_scores[0]))


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attend without the engine's cache, and ignore the model's generation defaults."""
    attention, defaults = model.config._attn_implementation, model.generation_config
    if not model.config.is_encoder_decoder:  # their attention was not replaced
        model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = defaults
        if not model.config.is_encoder_decoder:
            model.set_attn_implementation(attention)

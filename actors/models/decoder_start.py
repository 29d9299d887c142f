"""The first tokens of an encoder-decoder model's output and the tokens it never emits, as in `generate`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from actors.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# Settings of generation_config.json that are options of requests here, with their neutral values.
_OF_REQUESTS: dict[str, tuple[object, ...]] = {
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None,),
}


@dataclass(frozen=True, slots=True)
class DecoderStart:
    """The decoder's start token, a forced first token, and the suppressed tokens."""

    token_id: int
    forced_id: int | None  # the first token of every output, such as the language of a translation
    suppressed_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Raises ModelError if the generation configuration lacks a start token or has unsupported settings."""
        config = model.generation_config
        start = config.decoder_start_token_id
        if start is None:
            start = config.bos_token_id
        if not isinstance(start, int):
            raise ModelError(f"{type(model).__name__} has the decoder_start_token_id {start!r}; it must be one token")
        if config.begin_suppress_tokens:
            raise ModelError(f"{type(model).__name__} has begin_suppress_tokens, which are not supported")
        ignored = [name for name, none in _OF_REQUESTS.items() if getattr(config, name, None) not in none]
        if ignored:
            logger.warning("left to requests, not taken from generation_config.json: %s", ", ".join(ignored))
        return cls(start, config.forced_bos_token_id, _suppressed(config, type(model).__name__))

    def constrain(self, logits: torch.Tensor, is_first: bool) -> torch.Tensor:
        """Logits [rows, vocab] with suppressed tokens at -inf. is_first: row 0 gives the first token."""
        forces = is_first and self.forced_id is not None
        if not forces and not self.suppressed_ids:
            return logits
        logits = logits.clone()
        logits[:, list(self.suppressed_ids)] = -float("inf")
        if forces:
            logits[0] = -float("inf")
            logits[0, self.forced_id] = 0.0
        return logits


def _suppressed(config: GenerationConfig, name: str) -> tuple[int, ...]:
    words = [list(word) for word in config.bad_words_ids or []]
    if any(len(word) != 1 for word in words):
        raise ModelError(f"{name} has bad_words_ids of several tokens, which are not supported")
    return tuple(sorted({*(config.suppress_tokens or []), *(word[0] for word in words)}))

"""What a head is trained on, readable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """How long a head is trained, and on what: amounts, no clock, so that a training can be repeated and resumed."""

    vocab_size: int | None = None  # output columns; None: 6144, or all of a smaller target's
    text_tokens: int = 64_000  # answer tokens that the target writes
    answer_tokens: int = 160  # most of one answer
    write_rows: int = 320  # answers written at a time
    epochs: int = 4
    unroll: int = 4  # steps on its own outputs; published heads: 7
    batch_tokens: int = 1024  # prompt and answer tokens of a batch, padding included
    learning_rate: float = 1e-3
    seed: int = 0

"""Sizes and amounts of training, readable without torch. No time limits, so that a training is reproducible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from actors.errors import ModelError
from actors.models.loader import ModelInfo

_VOCAB_SIZE = 6144
MAX_PARALLEL = 32


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    layers: int = 2
    vocab_size: int | None = None  # output rows; None: 6144, or all of a smaller target's
    text_tokens: int = 26_000  # approximate number of answer tokens that the target writes for training
    answer_tokens: int = 160  # limit of one answer
    write_rows: int = 320  # answers written at a time
    epochs: int = 3
    batch_tokens: int = 1024  # prompt and answer tokens of a batch, padding included
    learning_rate: float = 3e-3
    seed: int = 0
    parallel: int = 1  # tokens guessed in one forward; more than 1: by mask tokens
    # With mask tokens: the share of places with a row for a guess of depth d + 1 among those with one of depth d
    retention: float = 0.6
    masks_from: float = 0.0  # share of the steps before those with mask tokens, which take half as long again


TRAINING_RECIPE = DrafterRecipe(text_tokens=128_000, epochs=6)  # for a long training
# One forward a draft leaves time for more layers.
PARALLEL_RECIPE = DrafterRecipe(layers=4, parallel=8)
PARALLEL_TRAINING_RECIPE = replace(TRAINING_RECIPE, layers=6, parallel=8)


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """An EAGLE-3 head. Fields that DrafterRecipe has, too, mean the same."""

    vocab_size: int | None = None
    text_tokens: int = 64_000
    answer_tokens: int = 160
    write_rows: int = 320
    epochs: int = 4
    unroll: int = 4  # steps on its own outputs; published heads: 7
    batch_tokens: int = 1024
    learning_rate: float = 1e-3
    seed: int = 0


def output_vocab_size(recipe: DrafterRecipe | HeadRecipe, info: ModelInfo) -> int:
    return min(_VOCAB_SIZE, info.vocab_size) if recipe.vocab_size is None else recipe.vocab_size


def check_recipe(of: str, recipe: DrafterRecipe | HeadRecipe, limits: Mapping[str, tuple[int, int]]) -> None:
    """Raises ModelError for a value outside its limits (lowest, highest). `of` names in it what is trained."""
    limits = {"text_tokens": (1, 10**9), "write_rows": (1, 10**4), "batch_tokens": (1, 10**7), **limits}
    for name, (low, high) in limits.items():
        value = getattr(recipe, name)
        if not low <= value <= high:
            raise ModelError(f"{of} {name} is {value}; it must be between {low} and {high}")
    if not 0 < recipe.learning_rate < math.inf:
        raise ModelError(f"{of} learning_rate is {recipe.learning_rate}; it must be above 0, and finite")

"""Prompts for filling in the middle: models that were trained for it write what goes between two texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FillInMarks:
    """Special tokens before the text, between it and what follows the gap, and before the answer."""

    before: str
    after: str
    gap: str

    def prompt(self, before: str, after: str) -> str:
        return f"{self.before}{before}{self.after}{after}{self.gap}"


_KNOWN_MARKS = (
    FillInMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    FillInMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillInMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)


def fill_in_marks(tokenizer: Any) -> FillInMarks | None:
    """tokenizer: from `transformers`. None: it has no marks that are known."""
    tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return next((marks for marks in _KNOWN_MARKS if tokens >= {marks.before, marks.after, marks.gap}), None)

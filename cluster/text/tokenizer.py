"""Loads tokenizers in processes without a model."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """transformers finds no torch, if it is not loaded yet: a tokenizer does without, and a process starts faster with
    less memory."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # one says that torch was not found
    # transformers looks for torch once, when it is imported; if it has found it, it must find it again.
    hides_torch = "torch" not in sys.modules and "transformers" not in sys.modules
    if hides_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes an import fail
    try:
        from transformers import AutoTokenizer
    finally:
        if hides_torch:
            del sys.modules["torch"]
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return tokenizer

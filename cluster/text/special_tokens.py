"""Special tokens of a tokenizer, by their text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def special_token_ids(tokenizer: Any) -> dict[str, int]:
    """Token ids by text. tokenizer: from `transformers`."""
    return {
        str(token.content): int(token_id)
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if token.special
    }


def split_at_special_tokens(text: str, special_tokens: Iterable[str]) -> list[str]:
    """The text in parts, none of them empty: special tokens, and what stands between them."""
    longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
    if not longest_first:
        return [text] if text else []
    return [part for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if part]

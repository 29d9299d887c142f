"""Limits of the options of lookahead decoding."""

from __future__ import annotations

MAX_WINDOW_SIZE, MAX_LOOKAHEAD_LEVEL, MAX_GUESS_SET_SIZE = 64, 16, 64
MAX_POOL_PHRASES = 1 << 20


def broken_limit(
    window_size: int, lookahead_level: int, guess_set_size: int, pool_phrases: int
) -> tuple[str, int, str] | None:
    """Name, value and limit of the first option that is out of range, or None."""
    for name, value, least, most in (
        ("window_size", window_size, 1, MAX_WINDOW_SIZE),
        ("lookahead_level", lookahead_level, 2, MAX_LOOKAHEAD_LEVEL),
        ("pool_phrases", pool_phrases, 1, MAX_POOL_PHRASES),
    ):
        if not least <= value <= most:
            return name, value, f"it must be from {least} to {most}"
    if guess_set_size != -1 and not 1 <= guess_set_size <= MAX_GUESS_SET_SIZE:
        return "guess_set_size", guess_set_size, f"it must be from 1 to {MAX_GUESS_SET_SIZE}, or -1"
    return None

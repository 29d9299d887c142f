"""Compiles grammars in a process of their own: llguidance may run out of stack, memory or time on a hostile one.

Reads parts from standard input, each with its length in 8 bytes before it: the tokenizer as JSON, the vocabulary's size
and the end-of-sequence ids as JSON, then grammars. Writes an empty part when it is ready, and of each grammar what is
wrong with it, empty if nothing is.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import threading
import time
from typing import IO

from llguidance import LLMatcher, LLTokenizer

from actors.grammar.forced import forced_tokens
from actors.grammar.limits import LIMITS

_MOST_BYTES = 2 << 30  # of address space
_STEPS = 8  # tokens
_MOST_STEP_S = 0.05  # of processor time, for a mask and the way behind a token
_STACK_BYTES = 4 << 20  # less than a router's threads have


def read_part(stream: IO[bytes]) -> bytes | None:
    """None at the end of the stream."""
    head = stream.read(8)
    return stream.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else None


def write_part(stream: IO[bytes], part: bytes) -> None:
    stream.write(struct.pack("<Q", len(part)) + part)
    stream.flush()


def _serve() -> None:
    tokenizer, rest = read_part(sys.stdin.buffer), read_part(sys.stdin.buffer)
    if tokenizer is None or rest is None:
        return
    vocab_size, eos_token_ids = json.loads(rest)
    vocabulary = LLTokenizer(tokenizer.decode(), n_vocab=vocab_size, eos_token=eos_token_ids)
    write_part(sys.stdout.buffer, b"")  # ready
    while (text := read_part(sys.stdin.buffer)) is not None:
        write_part(
            sys.stdout.buffer,
            _problem(LLMatcher(vocabulary, text.decode(), log_level=0, limits=LIMITS), vocabulary).encode(),
        )


def _problem(matcher: LLMatcher, vocabulary: LLTokenizer) -> str:
    """What is wrong, at the beginning and on the way of a random answer: some expressions are compiled only there."""
    rng = random.Random(0)
    for _ in range(_STEPS):
        started = time.process_time()  # on a busy machine it is not the grammar that is slow
        allowed = [] if matcher.is_error() else _tokens_in(matcher.compute_bitmask())
        if matcher.is_error():
            return matcher.get_error()
        is_over = matcher.is_stopped() or not allowed
        if not is_over:
            matcher.consume_token(rng.choice(forced_tokens(matcher, vocabulary)[:1] or allowed))
        if time.process_time() - started > _MOST_STEP_S:
            return f"the tokens that may follow are not found within {1e3 * _MOST_STEP_S:g} ms"
        if is_over:
            break
    return ""


def _tokens_in(mask: bytes) -> list[int]:
    """Some of the tokens of a mask."""
    found = [index for index, byte in enumerate(mask) if byte][:: max(1, len(mask) // 256)]
    return [8 * index + bit for index in found for bit in range(8) if mask[index] >> bit & 1]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()

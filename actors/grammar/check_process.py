"""Compiles grammars in processes of their own: llguidance may run out of stack, memory or time on a hostile one.

This one loads a vocabulary and forks a child for each grammar, and so stays fit for the next. It reads the tokenizer,
the vocabulary's size and the end-of-sequence ids as JSON from standard input. Standard output is a Unix socket, from
which it takes a connection for each grammar; it and its children end with that socket. A child writes its process id in
8 bytes, reads the grammar to its end, and writes "=" and what is wrong with it, nothing if nothing is.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time

from llguidance import LLMatcher, LLTokenizer

from actors.grammar.forced import forced_tokens
from actors.grammar.limits import LIMITS

_MOST_BYTES = 2 << 30  # of address space
_STEPS = 8  # tokens
_MOST_STEP_S = 0.05  # of processor time, for a mask and the way behind a token
_STACK_BYTES = 4 << 20  # less than a router's threads have


def _try(vocabulary: LLTokenizer, connection: socket.socket) -> None:
    connection.sendall(os.getpid().to_bytes(8, "little"))
    text = connection.makefile("rb").read().decode()
    problem = _problem(LLMatcher(vocabulary, text, log_level=0, limits=LIMITS), vocabulary)
    connection.sendall(b"=" + problem.encode())
    connection.shutdown(socket.SHUT_WR)  # before it ends, which takes longer the more memory it has used


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
    os.setpgrp()  # of this process and its children alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    threading.stack_size(_STACK_BYTES)
    tokenizer, vocab_size, eos_token_ids = json.load(sys.stdin)
    vocabulary = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)
    requests = socket.socket(fileno=sys.stdout.fileno())
    while connections := socket.recv_fds(requests, 1, 1)[1]:
        if os.fork() == 0:  # safe, as this process has one thread
            requests.close()
            thread = threading.Thread(target=_try, args=(vocabulary, socket.socket(fileno=connections[0])))
            thread.start()
            thread.join()
            os._exit(0)
        os.close(connections[0])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Conversations: whose they are, what is said in them, and how long their clients think.

Each is drawn from the seed and its number alone, so it can also be drawn ahead, in another process.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from actors.messages import ServiceClass
from cluster.simulate.options import TrafficOptions
from cluster.simulate.texts import Texts

_CHUNK = 64  # conversations that go from process to process at a time


class DrawnTurn(NamedTuple):
    text: np.ndarray  # int32: of all turns so far, this one's prompt and answer included
    num_prompt: int  # tokens
    cancel_after: int | None  # tokens after which its client goes away
    pause_s: float | None  # from its end to the next turn; None: it is the last one


@dataclass(slots=True)
class Conversation:
    number: int
    tenant: int
    turns: Iterator[DrawnTurn]
    system: Hashable = None  # names its system prompt
    num_system: int = 0
    num_turns: int = 0  # sent so far
    service_class: ServiceClass = "interactive"
    blocks: Sequence[int] = ()  # of the text of all turns so far, see `prefix_blocks`


class ConversationDraws:
    def __init__(self, options: TrafficOptions, texts: Texts, seed: int, *, most_tokens: int) -> None:
        """most_tokens: of prompt and answer together; a conversation ends before it exceeds them."""
        self._options = options
        self._texts = texts
        self._seed_words = [seed >> shift & 0xFFFFFFFF for shift in range(0, max(1, seed.bit_length()), 32)]
        self._most_tokens = most_tokens
        weights = np.arange(1, options.tenants + 1, dtype=np.float64) ** -options.tenant_skew
        self._tenants = np.cumsum(weights / weights.sum())

    def __iter__(self) -> Iterator[Conversation]:
        return map(self.drawn, count())

    def drawn(self, number: int) -> Conversation:
        """Its turns are drawn when they are asked for."""
        options = self._options
        # An array has the same draws as a tuple of its numbers, in two thirds of the time.
        random = np.random.default_rng(np.array((*self._seed_words, 3, number), np.uint32))
        tenant = min(int(np.searchsorted(self._tenants, random.random())), options.tenants - 1)
        is_batch = bool(options.batch_share) and random.random() < options.batch_share
        system, text = None, np.empty(0, np.int32)
        if options.system_prompts:
            which = int(random.integers(options.system_prompts))
            system, text = (tenant, which), self._texts.system(tenant, which, options.system_tokens)
        turns = self._turns(number, tenant, text, random)
        told = Conversation(number, tenant, turns, system, len(text))
        if is_batch:
            told.service_class = "batch"
        return told

    def _turns(self, number: int, tenant: int, text: np.ndarray, random: np.random.Generator) -> Iterator[DrawnTurn]:
        options = self._options
        for turn in count():
            num_new = self._length(random, options.prompt_tokens)
            num_answer = self._length(random, options.answer_tokens)
            new, answer = self._texts.exchange((number, turn), tenant, text, num_new, num_answer)
            text = np.concatenate([text, new, answer])
            if len(text) > self._most_tokens:
                return
            goes_away = options.cancelled_share and random.random() < options.cancelled_share
            cancel_after = int(random.integers(len(answer) + 1)) if goes_away else None
            pause_s = None
            if random.random() * options.turns >= 1.0:
                calls_tool = random.random() < options.tool_share
                pause_s = random.exponential(options.tool_s if calls_tool else options.think_s)
            yield DrawnTurn(text, len(text) - len(answer), cancel_after, pause_s)
            if pause_s is None:
                return

    def _length(self, random: np.random.Generator, mean: int) -> int:
        spread = self._options.spread
        if not spread:
            return mean
        return max(1, round(random.lognormal(math.log(mean) - spread**2 / 2, spread)))

    def packed(self, first: int, num_conversations: int) -> list[tuple[object, ...]]:
        """Conversations from number `first` on with all their turns, as tuples for another process."""
        found: list[tuple[object, ...]] = []
        for told in map(self.drawn, range(first, first + num_conversations)):
            turns = list(told.turns)
            lengths = [(len(turn.text), *turn[1:]) for turn in turns]
            text = turns[-1].text if turns else None
            found.append((told.number, told.tenant, text, lengths, told.system, told.num_system, told.service_class))
        return found


def drawn_ahead(draws: ConversationDraws) -> Iterator[Conversation]:
    """The same conversations in the same order; another process draws them ahead, and ends when this is closed or the
    process that asked."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    drawer = context.Process(target=_draw, args=(draws, sender), daemon=True)
    drawer.start()
    sender.close()
    try:
        while True:
            yield from map(_unpacked, receiver.recv())
    finally:
        receiver.close()
        drawer.join()


def _draw(draws: ConversationDraws, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(BrokenPipeError):  # nobody wants more
        for first in count(0, _CHUNK):
            sender.send(draws.packed(first, _CHUNK))


def _unpacked(packed: tuple) -> Conversation:
    number, tenant, text, lengths, system, num_system, service_class = packed
    # A generator, which refers to no conversation: cycles would keep ended ones where nobody collects garbage.
    turns = (DrawnTurn(text[:length], *rest) for length, *rest in lengths)
    return Conversation(number, tenant, turns, system, num_system, service_class=service_class)

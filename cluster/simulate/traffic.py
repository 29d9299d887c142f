"""Conversations: whose they are, when their turns come, and how long these are."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from actors.messages import ServiceClass
from cluster.simulate.arrivals import arrival_times
from cluster.simulate.events import Events
from cluster.simulate.options import TrafficOptions
from cluster.simulate.scripts import Prefixes
from cluster.simulate.texts import Texts


@dataclass(slots=True)
class Conversation:
    number: int
    tenant: int
    random: np.random.Generator = field(repr=False)
    text: np.ndarray = field(repr=False)  # int32: of all turns so far
    system: Hashable = None  # names its system prompt
    num_system: int = 0
    num_turns: int = 0
    service_class: ServiceClass = "interactive"
    blocks: Sequence[int] = ()  # of the text of all turns so far, see `prefix_blocks`


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as its client sends it."""

    conversation: Conversation
    number: int
    text: np.ndarray  # int32: prompt and answer
    num_prompt: int  # tokens
    cancel_after: int | None  # tokens after which its client goes away

    @property
    def prompt(self) -> np.ndarray:
        return self.text[: self.num_prompt]

    @property
    def answer(self) -> np.ndarray:
        """What the target will say."""
        return self.text[self.num_prompt :]

    @property
    def prefixes(self) -> Prefixes:
        told = self.conversation
        return ((("conversation", told.number), self.num_prompt), (("system", told.system), told.num_system))


class TrafficSource(Protocol):
    """Sends turns while events happen."""

    def ended(self, turn: Turn, is_answered: bool) -> None: ...


class Traffic:
    """Sends the turns of all conversations. The caller reports with `ended` what has become of each."""

    def __init__(
        self,
        events: Events,
        options: TrafficOptions,
        texts: Texts,
        seed: int,
        *,
        most_tokens: int,
        send: Callable[[Turn], object],
    ) -> None:
        """most_tokens: of prompt and answer together; a conversation ends before it exceeds them."""
        self._events = events
        self._options = options
        self._texts = texts
        self._seed_words = [seed >> shift & 0xFFFFFFFF for shift in range(0, max(1, seed.bit_length()), 32)]
        self._most_tokens = most_tokens
        self._send = send
        self._times = arrival_times(options, np.random.default_rng((seed, 2)))
        weights = np.arange(1, options.tenants + 1, dtype=np.float64) ** -options.tenant_skew
        self._tenants = np.cumsum(weights / weights.sum())
        self._num_begun = 0
        self._is_over = False
        if options.clients is None:
            events.at(next(self._times), self._arrive)
        for _ in range(options.clients or 0):
            events.after(0.0, self._begin)

    def stop(self) -> None:
        """Send nothing any more."""
        self._is_over = True

    def _arrive(self) -> None:
        if self._is_over:
            return
        self._begin()
        self._events.at(next(self._times), self._arrive)

    def _begin(self) -> None:
        number, options = self._num_begun, self._options
        self._num_begun += 1
        # An array has the same draws as a tuple of its numbers, in two thirds of the time.
        random = np.random.default_rng(np.array((*self._seed_words, 3, number), np.uint32))
        tenant = min(int(np.searchsorted(self._tenants, random.random())), options.tenants - 1)
        told = Conversation(number, tenant, random, np.empty(0, np.int32))
        if options.batch_share and random.random() < options.batch_share:
            told.service_class = "batch"
        if options.system_prompts:
            which = int(random.integers(options.system_prompts))
            told.text = self._texts.system(tenant, which, options.system_tokens)
            told.system, told.num_system = (tenant, which), len(told.text)
        self._next_turn(told)

    def ended(self, turn: Turn, is_answered: bool) -> None:
        """The client has the whole answer, or goes away."""
        told, options = turn.conversation, self._options
        if not is_answered or told.random.random() * options.turns < 1.0:
            self._over()
            return
        told.text = turn.text
        calls_tool = told.random.random() < options.tool_share
        pause_s = told.random.exponential(options.tool_s if calls_tool else options.think_s)
        self._events.after(pause_s, self._next_turn, told)

    def _next_turn(self, told: Conversation) -> None:
        if self._is_over:
            return
        options = self._options
        num_new, num_answer = self._length(told, options.prompt_tokens), self._length(told, options.answer_tokens)
        turn = (told.number, told.num_turns)
        new, answer = self._texts.exchange(turn, told.tenant, told.text, num_new, num_answer)
        text = np.concatenate([told.text, new, answer])
        if len(text) > self._most_tokens:
            self._over()
            return
        goes_away = options.cancelled_share and told.random.random() < options.cancelled_share
        cancel_after = int(told.random.integers(len(answer) + 1)) if goes_away else None
        told.num_turns += 1
        self._send(Turn(told, told.num_turns, text, len(text) - len(answer), cancel_after))

    def _over(self) -> None:
        """A conversation has ended: in a closed loop, its client begins another one."""
        if self._options.clients is not None:
            self._events.after(0.0, self._begin)

    def _length(self, told: Conversation, mean: int) -> int:
        spread = self._options.spread
        if not spread:
            return mean
        return max(1, round(told.random.lognormal(math.log(mean) - spread**2 / 2, spread)))

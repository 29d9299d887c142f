"""When the turns of conversations are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.simulate.arrivals import arrival_times
from cluster.simulate.conversations import Conversation
from cluster.simulate.events import Events
from cluster.simulate.options import TrafficOptions
from cluster.simulate.scripts import Prefixes


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as its client sends it."""

    conversation: Conversation
    number: int
    text: np.ndarray  # int32: prompt and answer
    num_prompt: int  # tokens
    cancel_after: int | None  # tokens after which its client goes away
    pause_s: float | None = None  # from its end to the next turn; None: it is the last one

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
        conversations: Iterator[Conversation],
        seed: int,
        *,
        send: Callable[[Turn], object],
    ) -> None:
        self._events = events
        self._options = options
        self._conversations = conversations
        self._send = send
        self._times = arrival_times(options, np.random.default_rng((seed, 2)))
        self._is_over = False
        self.num_too_long = 0  # conversations that ended because no more fits into the context
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
        self._next_turn(next(self._conversations))

    def ended(self, turn: Turn, is_answered: bool) -> None:
        """The client has the whole answer, or goes away."""
        if not is_answered or turn.pause_s is None:
            self._over()
        else:
            self._events.after(turn.pause_s, self._next_turn, turn.conversation)

    def _next_turn(self, told: Conversation) -> None:
        if self._is_over:
            return
        drawn = next(told.turns, None)
        if drawn is None:
            self.num_too_long += 1
            self._over()
            return
        told.num_turns += 1
        self._send(Turn(told, told.num_turns, *drawn))

    def _over(self) -> None:
        """A conversation has ended: in a closed loop, its client begins another one."""
        if self._options.clients is not None:
            self._events.after(0.0, self._begin)

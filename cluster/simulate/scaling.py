"""Autoscaling in simulated time: the policies of production, asked as Serve's controller asks them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

from actors.workers.autoscaling import MOST_REPLICAS
from cluster.simulate.events import Events

_PERIOD_S = 1.0


class Policy(Protocol):
    def decide(self, context: Any, now: float) -> tuple[int, dict[str, Any]]: ...


class Autoscaler:
    """Averages signals over the time that the policy looks back, and asks it every second."""

    def __init__(
        self,
        events: Events,
        policy: Policy,
        *,
        look_back_s: float,
        current: Callable[[], int],
        signals: Callable[[], Mapping[str, float] | None],
        resize: Callable[[int], object],
    ) -> None:
        """current: replicas that are there; signals: means over all of them, None while there are none; resize: called
        with the wanted number whenever it changes."""
        self.target = current()
        self._events = events
        self._policy = policy
        self._current = current
        self._signals = signals
        self._resize = resize
        self._samples: deque[Mapping[str, float]] = deque(maxlen=max(1, round(look_back_s / _PERIOD_S)))
        self._state: dict[str, Any] = {}
        events.every(_PERIOD_S, self._look)

    def _look(self) -> None:
        current, told = self._current(), self._signals()
        if told is not None:
            self._samples.append(told)
        if not self._samples:
            return
        means = {name: sum(sample[name] for sample in self._samples) / len(self._samples) for name in self._samples[-1]}
        context = SimpleNamespace(
            capacity_adjusted_max_replicas=MOST_REPLICAS,
            raw_metrics={},
            # Each replica records the same.
            aggregated_metrics={name: dict.fromkeys(range(current), mean) for name, mean in means.items()},
            current_num_replicas=current,
            target_num_replicas=self.target,
            policy_state=self._state,
        )
        wanted, self._state = self._policy.decide(context, self._events.now)
        if wanted != self.target:
            self.target = wanted
            self._resize(wanted)

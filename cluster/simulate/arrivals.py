"""When conversations begin: arrival processes with the shapes that published traces of language models have."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cluster.simulate.options import TrafficOptions


def arrival_times(options: TrafficOptions, random: np.random.Generator) -> Iterator[float]:
    """Ascending, without end."""
    return {"poisson": _poisson, "gamma": _gamma, "mmpp": _mmpp, "diurnal": _diurnal}[options.arrivals](options, random)


def _poisson(options: TrafficOptions, random: np.random.Generator) -> Iterator[float]:
    now = 0.0
    while True:
        now += random.exponential(1.0 / options.conversations_per_s)
        yield now


def _gamma(options: TrafficOptions, random: np.random.Generator) -> Iterator[float]:
    """Gaps with the given coefficient of variation."""
    squared, now = options.burstiness**2, 0.0
    while True:
        now += random.gamma(1.0 / squared, squared / options.conversations_per_s)
        yield now


def _mmpp(options: TrafficOptions, random: np.random.Generator) -> Iterator[float]:
    """Busy and quiet times of equal mean length take turns."""
    quiet = 2.0 * options.conversations_per_s / (1.0 + options.burstiness)
    rates, state, now = (quiet, quiet * options.burstiness), 0, 0.0
    changes = random.exponential(options.period_s)
    while True:
        gap = random.exponential(1.0 / rates[state])
        if now + gap < changes:
            now += gap
            yield now
        else:  # gaps have no memory, so the rest of this one may be drawn anew
            now, state = changes, 1 - state
            changes += random.exponential(options.period_s)


def _diurnal(options: TrafficOptions, random: np.random.Generator) -> Iterator[float]:
    """A sine over the day, by thinning. It begins at its mean, rising."""
    swing = (options.burstiness - 1.0) / (options.burstiness + 1.0)
    most, now = options.conversations_per_s * (1.0 + swing), 0.0
    while True:
        now += random.exponential(1.0 / most)
        rate = options.conversations_per_s * (1.0 + swing * math.sin(2.0 * math.pi * now / options.period_s))
        if random.random() * most < rate:
            yield now

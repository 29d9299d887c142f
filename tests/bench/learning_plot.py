"""The picture of drafters that learn: tokens per round against the traffic that they have seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from cluster.cli.bench.plot import method_colour, tidy

_WINDOWS = 5  # that do not overlap; so many answers are averaged that a curve has room for these
_LABEL_GAP = 0.055  # of the height, between the labels of two curves


@dataclass(frozen=True, slots=True)
class AnswerRounds:
    """What an answer took."""

    tokens: int
    rounds: int  # at least 1 where there are tokens


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Tokens per round in a window that moves over the answers, by the answers before the middle of the window."""

    answers_before: tuple[float, ...]
    tokens_per_round: tuple[float, ...]


def learning_curve(answers: Sequence[AnswerRounds], window: int) -> LearningCurve:
    """All tokens by all rounds of every `window` answers in a row, in the order in which they were given. `window` is
    at least 1; fewer answers than that make one point, none none."""
    window = min(window, len(answers))
    if not window:
        return LearningCurve((), ())
    tokens = [0, *accumulate(answer.tokens for answer in answers)]
    rounds = [0, *accumulate(answer.rounds for answer in answers)]
    starts = range(len(answers) - window + 1)
    return LearningCurve(
        tuple(start + (window - 1) / 2 for start in starts),
        tuple((tokens[at + window] - tokens[at]) / max(1, rounds[at + window] - rounds[at]) for at in starts),
    )


def window_for(num_answers: int, num_tasks: int) -> int:
    """Answers to average: several for every point, and of tasks that take turns equally many of each."""
    num_tasks = max(1, num_tasks)
    return num_tasks * max(1, ceil(num_answers / (_WINDOWS * num_tasks)))


def draw_learning(
    answers: Mapping[str, Sequence[AnswerRounds]],
    num_tasks: int,
    title: str,
    file: Path,
    cold: Mapping[str, Sequence[AnswerRounds]] = MappingProxyType({}),
) -> None:
    """answers: of every set of drafters to the same requests in the same order, whose `num_tasks` tasks take turns;
    cold: what the same took of some of the sets when every request began with empty drafters, drawn dashed: what lies
    between is learnt from other requests. The file's suffix decides between PNG and SVG. Raises OSError."""
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.subplots()
    first = next(iter(answers.values()), ())
    window = window_for(len(first), num_tasks)
    ends = []
    highest = 1.0
    for index, (name, own) in enumerate(answers.items()):
        warm, colour = learning_curve(own, window), method_colour(index)
        for curve, style in ((warm, "-"), (learning_curve(cold.get(name, ()), window), "--")):
            marker = "o" if len(curve.answers_before) == 1 else ""
            axes.plot(curve.answers_before, curve.tokens_per_round, style, color=colour, marker=marker)
            highest = max((highest, *curve.tokens_per_round))
        if warm.answers_before:
            ends.append((name, colour, warm.answers_before[-1], warm.tokens_per_round[-1]))
    axes.axhline(1.0, color="0.35", linewidth=1, linestyle=":")
    axes.annotate("without drafts", (0.0, 1.0), (2, 3), textcoords="offset points", fontsize=8, color="0.35")
    axes.set_xlim(0, max(len(first), 1))
    axes.set_ylim(0.95, 1.05 * highest)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"requests answered before (every point: {window} requests around it)")
    axes.set_ylabel("tokens per round of the target")
    axes.set_title(title, fontsize=10, loc="left")
    tidy(axes)
    if cold:
        styles = [Line2D([], [], color="0.3", linestyle=style) for style in ("-", "--")]
        labels = ["having seen all requests before", "every request from an empty start"]
        axes.legend(styles, labels, loc="upper left", frameon=False, fontsize=8)
    _label_ends(axes, ends)
    _add_token_axis(axes, first)
    figure.savefig(file, dpi=150)


def _label_ends(axes: Axes, ends: Sequence[tuple[str, str, float, float]]) -> None:
    """Names and last values to the right of the axes, in the order of the values and never over each other."""
    low, high = axes.get_ylim()
    at = low
    for name, colour, x, y in sorted(ends, key=lambda end: end[3]):
        at = max(y, at + _LABEL_GAP * (high - low))
        axes.plot((x, axes.get_xlim()[1]), (y, at), color=colour, linewidth=0.8, linestyle=":", clip_on=False)
        axes.annotate(
            f"{name} {y:.2f}",
            (axes.get_xlim()[1], at),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
            annotation_clip=False,
        )


def _add_token_axis(axes: Axes, answers: Sequence[AnswerRounds]) -> None:
    """The tokens of those requests' answers above."""
    counts = np.arange(len(answers) + 1, dtype=float)
    tokens = np.array([0, *accumulate(answer.tokens for answer in answers)], dtype=float)
    if len(answers) < 2 or (np.diff(tokens) <= 0).any():
        return  # an axis needs a scale that grows
    # Ticks beyond the ends go on at the average pace, out of sight.
    counts = np.concatenate([[-counts[-1]], counts, [2 * counts[-1]]])
    tokens = np.concatenate([[-tokens[-1]], tokens, [2 * tokens[-1]]])
    above = axes.secondary_xaxis(
        "top",
        functions=(
            lambda x: np.interp(np.asarray(x, float), counts, tokens),
            lambda x: np.interp(np.asarray(x, float), tokens, counts),
        ),
    )
    above.set_xlabel("tokens of their answers")
    above.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    above.spines["top"].set_visible(False)

"""The picture of `paceline bench local --compare`: speed relative to no drafts, and acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from cluster.cli.bench.measure import Comparison, MethodResult

# Okabe and Ito: colours that colour-blind people can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_MIN_ROUNDS = 10  # a share of fewer is drawn only where there is nothing better


def draw_comparison(report: Comparison, title: str, file: Path) -> None:
    """Write a PNG or SVG, as the file's suffix says. Raises OSError."""
    methods = report.methods[1:]
    tasks = list(report.methods[0].tasks)
    groups = [*tasks, "all"] if len(tasks) > 1 else ["all prompts"]
    speed_width = max(4.0, 1.2 + 0.24 * len(groups) * (len(methods) + 1))
    figure = Figure(figsize=(speed_width + 5.0, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
    speed, positions = figure.subplots(1, 2, width_ratios=(speed_width, 5.0))
    _draw_speed(speed, methods, tasks, groups)
    _draw_positions(positions, methods)
    figure.suptitle(f"{title}, answers: {report.methods[0].overall.num_prompts}", fontsize=11)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    figure.savefig(file, dpi=150)


def _draw_speed(axes: Axes, methods: Sequence[MethodResult], tasks: Sequence[str], groups: Sequence[str]) -> None:
    width = min(0.2, 0.8 / max(1, len(methods)))
    for index, method in enumerate(methods):
        speeds = [*(method.tasks[task] for task in tasks), method.overall] if len(groups) > 1 else [method.overall]
        heights = [speed.ratio or 0.0 for speed in speeds]
        places = [group + (index - (len(methods) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(places, heights, 0.92 * width, label=method.name, color=method_colour(index))
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1, rotation=90 if len(methods) > 3 else 0)
    axes.axhline(1.0, color="0.35", linewidth=1, linestyle="--", label="without drafts")
    axes.set_xticks(range(len(groups)), groups, rotation=20 if len(groups) > 4 else 0)
    axes.set_ylabel("tokens/s relative to no drafts")
    axes.set_title("Speed", fontsize=10)
    axes.margins(y=0.12)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    tidy(axes)


def _draw_positions(axes: Axes, methods: Sequence[MethodResult]) -> None:
    for index, method in enumerate(methods):
        positions = method.acceptance.by_position if method.acceptance is not None else ()
        shown = [one for one in positions if one.rounds >= _MIN_ROUNDS] or positions
        axes.plot(
            [one.position for one in shown],
            [one.share for one in shown],
            marker="o",
            markersize=4,
            color=method_colour(index),
        )
    axes.set_ylim(0.0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted, of rounds that verified it")
    axes.set_title("Acceptance by position", fontsize=10)
    tidy(axes)


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)


def method_colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]

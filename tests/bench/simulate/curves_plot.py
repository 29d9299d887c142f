"""The picture of one scenario at growing numbers of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.cli.bench.plot import method_colour, tidy

# Of each panel its title, and its curves: label, figure, what it is divided by, whether by the groups, too.
_PANELS: tuple[tuple[str, tuple[tuple[str, str, float, bool], ...]], ...] = (
    ("tokens a second and group", (("all", "tokens_per_s", 1, True),)),
    ("share of requests within their objectives", (("goodput", "goodput_share", 1, False),)),
    ("milliseconds", (("TTFT p99", "ttft_p99_ms", 1, False), ("TTFT p50", "ttft_p50_ms", 1, False))),
    ("busy draft workers a group", (("draft workers", "draft_workers_busy", 1, True),)),
    (
        "shared cache, kB a second and group",
        (("written", "store_written_bytes_per_s", 1e3, True), ("read", "store_read_bytes_per_s", 1e3, True)),
    ),
    ("dollars a million tokens (example price)", (("cost", "dollars_per_million", 1, False),)),
)


def draw_curves(sizes: Mapping[tuple[str, int], Mapping[str, float]], file: Path) -> None:
    """sizes: figures by level and groups. The file's suffix decides between PNG and SVG. Raises OSError."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 9}):
        figure = Figure(figsize=(9.6, 5.4), layout="constrained")
        for axes, (title, curves) in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
            for index, (label, name, divisor, is_by_group) in enumerate(curves):
                for level, style in (("exact", "o-"), ("aggregate", "s--")):
                    points = [
                        (groups, figures[name] / divisor / (groups if is_by_group else 1))
                        for (own, groups), figures in sizes.items()
                        if own == level and name in figures
                    ]
                    if points:
                        axes.plot(
                            *zip(*points, strict=True), style, color=method_colour(index), label=f"{label}, {level}"
                        )
            _finish(axes, title, sorted({groups for _, groups in sizes}))
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)


def _finish(axes: Axes, title: str, groups: Sequence[int]) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xscale("log")
    axes.set_xticks(groups, [f"{count:,}" for count in groups])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("target groups")
    axes.set_xlim(0.7 * groups[0], 1.4 * groups[-1])
    axes.set_ylim(0, 1.2 * axes.dataLim.ymax)
    axes.legend(frameon=False, fontsize=7)
    tidy(axes)

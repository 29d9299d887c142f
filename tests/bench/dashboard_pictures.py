"""Pictures of the dashboards, out of a Prometheus that scrapes a server: one PNG a dashboard.

prometheus --config.file prometheus.yml &   # with a scrape job of http://127.0.0.1:8000/metrics
export PYTHONPATH=tests/support
python tests/bench/dashboard_pictures.py --prometheus http://127.0.0.1:9090 --minutes 5 --out pictures
"""

import argparse
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import matplotlib.dates as mdates
import matplotlib.pyplot as plt

from paceline_testing.panels import DASHBOARDS, panels_of


def series(client: httpx.Client, expression: str, start: float, end: float, step: float, window: str) -> list[dict]:
    query = expression.replace("$job", ".*").replace("$__rate_interval", window)
    answer = client.get("/api/v1/query_range", params={"query": query, "start": start, "end": end, "step": step})
    assert answer.status_code == 200, f"{query}: {answer.text}"
    return answer.json()["data"]["result"]


def legend(pattern: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        pattern = pattern.replace("{{" + name + "}}", value)
    return pattern


def draw(axes: plt.Axes, panel: dict[str, Any], client: httpx.Client, start: float, end: float, window: str) -> int:
    """Returns how many series there were."""
    lines = []
    defaults = panel["fieldConfig"]["defaults"]
    for query in panel["targets"]:
        for one in series(client, query["expr"], start, end, max(1.0, (end - start) / 120), window):
            times = [datetime.fromtimestamp(at, UTC) for at, _ in one["values"]]
            values = [float(value) for _, value in one["values"]]
            lines.append((legend(query["legendFormat"], one["metric"]), times, values))
    unit = defaults["unit"].removeprefix("suffix:").strip()
    axes.set_title(f"{panel['title']} [{unit}]", fontsize=9, loc="left")
    axes.set_xlim(datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(end, UTC))
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter(mdates.DateFormatter("%H:%M:%S"))
    axes.xaxis.set_major_locator(mdates.AutoDateLocator(maxticks=4))
    if panel["type"] == "stat":
        shown = lines[0][2][-1] if lines else math.nan
        axes.text(0.5, 0.5, f"{shown:.3g}", ha="center", va="center", fontsize=22, transform=axes.transAxes)
        axes.set_axis_off()
        axes.set_title(panel["title"], fontsize=9, loc="left")
    elif not lines:
        axes.text(0.5, 0.5, defaults["noValue"], ha="center", va="center", color="grey", transform=axes.transAxes)
    else:
        for name, times, values in lines:
            axes.plot(times, values, linewidth=1, label=name)
        if defaults.get("custom", {}).get("scaleDistribution", {}).get("type") == "log":
            axes.set_yscale("log")
        else:
            top = max((value for _, _, values in lines for value in values if math.isfinite(value)), default=0)
            axes.set_ylim(0, 1.25 * top or 1)
        axes.legend(fontsize=7, loc="upper left", ncols=3)
    return len(lines)


def picture(dashboard: dict[str, Any], client: httpx.Client, start: float, end: float, window: str, path: Path) -> None:
    panels = panels_of(dashboard)
    columns = 3
    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(15, 2.6 * rows), squeeze=False)
    empty = []
    for index, axes in enumerate(grid.flat):
        if index >= len(panels):
            axes.set_axis_off()
        elif not draw(axes, panels[index], client, start, end, window):
            empty.append(panels[index]["title"])
    figure.suptitle(dashboard["title"], fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=90)
    plt.close(figure)
    print(f"{path}: {len(panels)} panels, without data: {', '.join(empty) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--window", default="30s", help="of rates")
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.time()
    with httpx.Client(base_url=arguments.prometheus, timeout=30) as client:
        for name, dashboard in DASHBOARDS.items():
            start = end - 60 * arguments.minutes
            picture(dashboard, client, start, end, arguments.window, arguments.out / f"{name}.png")


if __name__ == "__main__":
    main()

"""A dashboard as rows of panels, and the JSON that Grafana imports (dashboard schema 39, Grafana 10 and later)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["timeseries", "stat"]

_WIDTH = 24  # of Grafana's grid
_HEIGHT = 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression. `$job` in it is the scrape job chosen on the dashboard."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """unit: Grafana's name of it: s, short, reqps, cps, percentunit, bytes, Bps, or `suffix: tokens/s`. empty: what is
    said where there is no series, as of counters that are made when they first count."""

    title: str
    help: str  # what it shows, and what to do about it
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    stacked: bool = False
    logarithmic: bool = False
    empty: str = "No data"
    columns: int = 8  # of 24


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    help: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana imports; the same for the same dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": _WIDTH, "x": 0, "y": y},
                "panels": [],
            }
        )
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.columns > _WIDTH:
                x, y = 0, y + _HEIGHT
            place = {"h": _HEIGHT, "w": panel.columns, "x": x, "y": y}
            panels.append(_panel_json(panel, len(panels) + 1, place))
            x += panel.columns
        y += _HEIGHT
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.help,
        "tags": ["paceline"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _job_variable()]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "noValue": panel.empty}
    if not panel.logarithmic:
        defaults["min"] = 0
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 5,
            "showPoints": "never",
            "scaleDistribution": {"type": "log", "log": 10} if panel.logarithmic else {"type": "linear"},
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "format": "time_series",
                "range": panel.kind != "stat",
                "instant": panel.kind == "stat",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _job_variable() -> dict[str, Any]:
    return {
        "name": "job",
        "label": "Scrape job",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": "label_values(paceline_num_requests_running, job)", "refId": "job"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }

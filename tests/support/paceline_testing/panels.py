"""Prometheus queries of the dashboards' panels and of the alerts."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

OBSERVABILITY = Path(__file__).parents[3] / "k8s" / "chart" / "observability"
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_bytes()) for path in sorted((OBSERVABILITY / "dashboards").glob("*.json"))
}

_OF_SCRAPING = {"job", "instance", "router"}  # labels that Prometheus adds, or the gateway when it is scraped
_SELECTOR = re.compile(r"(paceline_\w+)(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


@dataclass(frozen=True)
class Asked:
    """The series that one expression reads."""

    where: str
    series: tuple[tuple[str, frozenset[str]], ...]  # metrics with the labels that are selected by
    groups: frozenset[str]  # labels that results are grouped by

    def unknown(self, exposed: dict[str, frozenset[str]]) -> set[str]:
        """Names and labels that are not exposed."""
        missing = {name for name, _ in self.series if name not in exposed}
        for name, labels in self.series:
            missing |= {f"{name}.{label}" for label in labels - _OF_SCRAPING - exposed.get(name, labels)}
        known = frozenset().union(*(exposed.get(name, frozenset()) for name, _ in self.series))
        return missing | (self.groups - _OF_SCRAPING - known)


def asked_by(where: str, expression: str) -> Asked:
    series = tuple((name, frozenset(_MATCHER.findall(selector))) for name, selector in _SELECTOR.findall(expression))
    groups = {label.strip() for found in _GROUPING.findall(expression) for label in found.split(",")}
    return Asked(where, series, frozenset(groups))


def alerts() -> list[dict]:
    groups = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the rows, which only have a title. A collapsed row holds its panels itself."""
    found: list[dict[str, Any]] = []
    for panel in dashboard["panels"]:
        found += panel.get("panels", []) if panel["type"] == "row" else [panel]
    return found


def everything_asked() -> list[Asked]:
    panels = [
        asked_by(f"{name}: {panel['title']}", query["expr"])
        for name, dashboard in DASHBOARDS.items()
        for panel in panels_of(dashboard)
        for query in panel["targets"]
    ]
    return panels + [asked_by(rule["alert"], rule["expr"]) for rule in alerts()]


def names_in(text: str) -> dict[str, frozenset[str]]:
    """Series of a /metrics with the labels that they have there; none where a family has no series yet."""
    return names_of(list(text_string_to_metric_families(text)))


def names_of(families: list[Metric]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for family in families:
        if family.type == "counter":
            found[f"{family.name}_total"] = frozenset(getattr(family, "_labelnames", ()))
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, frozenset()) | frozenset(sample.labels)
        if not family.samples:
            found.setdefault(family.name, frozenset(getattr(family, "_labelnames", ())))
    return found

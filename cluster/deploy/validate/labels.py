"""Labels, annotations and the selectors that look for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.naming import is_label_value, is_qualified_name
from cluster.deploy.validate.tree import items, listed, mapping

_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


def check_metadata(metadata: dict[str, Any], where: Location) -> Iterator[Problem]:
    yield from check_labels(mapping(metadata, "labels"), (*where, "labels"))
    for key in mapping(metadata, "annotations"):
        if not is_qualified_name(str(key).lower() if "/" not in str(key) else str(key)):
            yield Problem("annotation-syntax", (*where, "annotations", str(key)), f"{key!r} is no key of an annotation")


def check_labels(labels: dict[str, Any], where: Location) -> Iterator[Problem]:
    for key, value in labels.items():
        if not is_qualified_name(str(key)):
            yield Problem("label-syntax", (*where, str(key)), f"{key!r} is no key of a label")
        if isinstance(value, str) and not is_label_value(value):
            yield Problem("label-syntax", (*where, str(key)), f"{value!r} is no value of a label")


def check_selector(selector: object, where: Location) -> Iterator[Problem]:
    """A selector with matchLabels and matchExpressions."""
    yield from check_labels(mapping(selector, "matchLabels"), (*where, "matchLabels"))
    for index, expression in items(selector, "matchExpressions"):
        place = (*where, "matchExpressions", index)
        operator = expression.get("operator")
        values = listed(expression, "values")
        if isinstance(operator, str) and operator not in _OPERATORS:
            yield Problem("enum", (*place, "operator"), f"{operator!r}; it must be one of {', '.join(_OPERATORS)}")
        elif operator in ("In", "NotIn") and not values:
            yield Problem("selector-syntax", (*place, "values"), f"operator {operator} needs values")
        elif operator in ("Exists", "DoesNotExist") and values:
            yield Problem("selector-syntax", (*place, "values"), f"operator {operator} takes no values")


def selects(selector: object, labels: dict[str, Any]) -> bool:
    """Whether labels are what a selector with matchLabels and matchExpressions looks for."""
    for key, value in mapping(selector, "matchLabels").items():
        if labels.get(key) != value:
            return False
    for _, expression in items(selector, "matchExpressions"):
        wanted, operator, values = (
            str(expression.get("key")),
            expression.get("operator"),
            listed(expression, "values"),
        )
        if operator == "In" and labels.get(wanted) not in values:
            return False
        if operator == "NotIn" and wanted in labels and labels[wanted] in values:
            return False
        if operator == "Exists" and wanted not in labels:
            return False
        if operator == "DoesNotExist" and wanted in labels:
            return False
    return True

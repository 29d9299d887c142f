"""Kubernetes quantities: 500m, 1.5, 2e3, 16Gi."""

from __future__ import annotations

import re
from decimal import Decimal

_SYNTAX = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,3})?")
_SUFFIXES = {
    **{
        letter: Decimal(10) ** power
        for letter, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
    },
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}


def parse_quantity(text: object) -> Decimal | None:
    """Its value; None where it is none."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    match = _SYNTAX.fullmatch(str(text))
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix is None:
        return Decimal(number)
    if suffix in _SUFFIXES:
        return Decimal(number) * _SUFFIXES[suffix]
    return Decimal(f"{number.rstrip('.')}{suffix}")

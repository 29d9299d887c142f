"""Rows that drafters require: whether a round has room for them at all."""

from __future__ import annotations

from collections.abc import Iterable

from actors.drafters.contract import CpuDrafter
from actors.errors import InvalidRequest


def least_max_rows(drafters: Iterable[CpuDrafter]) -> int:
    """The least `max_rows` with which one sequence may have all that these require and a draft beside it."""
    return 1 + sum(drafter.most_required for drafter in drafters)


def check_required_rows(drafters: Iterable[CpuDrafter], max_rows: int, field: str = "speculation.max_rows") -> None:
    """Raises InvalidRequest naming `field` if the drafters' rows of one sequence are more than a round may spend."""
    least = least_max_rows(drafters)
    if max_rows < least:
        limit = f"it must be at least {least} for the rows that its drafters require, such as a lookahead window"
        raise InvalidRequest(field, max_rows, limit)

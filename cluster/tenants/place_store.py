"""Where gateways lease the places of tenants: who holds how many, in Redis, whose clock counts."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from typing import Any

from cache_service.store.answers import as_count, as_text, faults_told, run_script
from cache_service.store.connection import Connection
from cache_service.store.scripts import RENEW_PLACES
from cluster.tenants.lease import MEMORY_S
from cluster.tenants.places import PLACES_LIFE_S, PlacesAnswers, PlacesReport, PlacesReports, PlacesTold

_AT_ONCE = 100  # tenants in a script
_BYTES = 32  # of a number
_LIFE_MS = round(1000 * PLACES_LIFE_S)


class PlaceStore:
    """The store of places, as one gateway uses it. Not thread-safe. A report that is lost or late does no harm: what a
    gateway keeps is never more than what Redis has noted, and Redis ignores a report that comes after a later one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._caller = f"sd:{{limits}}:{secrets.token_hex(8)}"
        self._num_calls = 0

    def renew(self, reports: PlacesReports) -> PlacesAnswers:
        """Raises StoreError."""
        answers: PlacesAnswers = {}
        names = list(reports)
        with faults_told():
            for begin in range(0, len(names), _AT_ONCE):
                batch = names[begin : begin + _AT_ONCE]
                answers |= zip(batch, self._call({name: reports[name] for name in batch}), strict=True)
        return answers

    def _call(self, batch: dict[str, PlacesReport]) -> Iterator[PlacesTold]:
        self._num_calls += 1
        keys = [self._caller, *(f"sd:{{limits}}:{tenant}:max_concurrent" for tenant in batch)]
        numbers = (number for one in batch.values() for number in (one.limit, one.kept, one.wanted, one.asked))
        arguments = [self._num_calls, _LIFE_MS, MEMORY_S, *numbers]
        answer = run_script(self._connection.client(), RENEW_PLACES, keys, arguments)
        if len(answer) != 3 * len(batch):
            raise ValueError
        return map(_told, batch.values(), answer[::3], answer[1::3], answer[2::3])


def _told(report: PlacesReport, held: Any, left: Any, asked: Any) -> PlacesTold:
    """Raises ValueError for nonsense."""
    told = PlacesTold(as_count(held), as_count(left), float(as_text(asked[:_BYTES])))
    if not report.kept <= told.held <= max(report.kept, report.wanted) or not math.isfinite(told.asked):
        raise ValueError
    return told

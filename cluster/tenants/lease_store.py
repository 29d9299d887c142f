"""Where gateways lease the limits of tenants: a bucket for each in Redis, whose clock counts.

Each report counts once. Redis knows the last call of each gateway, and before the next one a gateway asks about a call
that was not answered: it has counted, or never will. A server that is slow, and counts but answers too late, would
otherwise be told again and again of the same tokens, and a tenant would owe them many times over.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cache_service.store.answers import as_count, as_text, faults_told, run_script
from cache_service.store.connection import Connection
from cache_service.store.scripts import RENEW_LEASES
from cluster.tenants.lease import MEMORY_S, Answers, Report, Reports, Told

_AT_ONCE = 200  # buckets in a script: half a millisecond of the server
_BYTES = 32  # of a number
_CALLER_LIFE_MS = 3_600_000  # for which Redis knows a gateway's last call

_Batch = dict[tuple[str, str], Report]  # by tenant and limit


class LeaseStore:
    """The store of leases, as one gateway uses it. Not thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._caller = f"sd:{{limits}}:{secrets.token_hex(8)}"
        self._num_calls = 0
        self._unanswered: _Batch = {}  # the last call's, until its answer comes
        self._counted: dict[tuple[str, str], tuple[float, float]] = {}  # spent and asked, and the gateway was not told

    def renew(self, reports: Reports) -> Answers:
        """Raises StoreError. What has counted then is left out of the next reports, which are to have it again."""
        answers: Answers = {tenant: {} for tenant in reports}
        with faults_told():
            self._settle()
            flat = [((tenant, limit), report) for tenant, own in reports.items() for limit, report in own.items()]
            for begin in range(0, len(flat), _AT_ONCE):
                batch = {name: self._without_counted(name, one) for name, one in flat[begin : begin + _AT_ONCE]}
                for (tenant, limit), told in zip(batch, self._call(batch), strict=True):
                    answers[tenant][limit] = told
        for name, _ in flat:
            del self._counted[name]
        return answers

    def _settle(self) -> None:
        """Find out whether the call that was not answered has counted, and keep it from counting later."""
        if self._unanswered:
            last = self._connection.client().set(self._caller, self._num_calls, px=_CALLER_LIFE_MS, get=True)
            if last is not None and as_count(last) >= self._num_calls:
                self._count(self._unanswered)
            self._unanswered = {}

    def _call(self, batch: _Batch) -> Iterator[Told]:
        self._num_calls += 1
        self._unanswered = batch
        keys = [self._caller, *(f"sd:{{limits}}:{tenant}:{limit}" for tenant, limit in batch)]
        numbers = (number for report in batch.values() for number in _numbers(report))
        arguments = [self._num_calls, _CALLER_LIFE_MS, MEMORY_S, *numbers]
        told = _told(run_script(self._connection.client(), RENEW_LEASES, keys, arguments), len(batch))
        self._count(batch)
        self._unanswered = {}
        return told

    def _count(self, batch: _Batch) -> None:
        for name, report in batch.items():
            spent, asked = self._counted.get(name, (0.0, 0.0))
            self._counted[name] = spent + report.spent, asked + report.asked

    def _without_counted(self, name: tuple[str, str], report: Report) -> Report:
        spent, asked = self._counted.get(name, (0.0, 0.0))
        return replace(report, spent=max(0.0, report.spent - spent), asked=max(0.0, report.asked - asked))


def _numbers(report: Report) -> tuple[float, ...]:
    return report.rate, report.capacity, report.spent, report.asked, report.level


def _told(answer: Any, count: int) -> Iterator[Told]:
    """Raises ValueError for nonsense."""
    numbers = [float(as_text(one[:_BYTES])) for one in answer]
    if len(numbers) != 2 * count or not all(map(math.isfinite, numbers)) or any(asked < 0 for asked in numbers[1::2]):
        raise ValueError
    return map(Told, numbers[::2], numbers[1::2])

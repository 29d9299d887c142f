"""Where gateways lease the limits of tenants: a bucket for each in Redis, whose clock counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cache_service.store.answers import as_text, faults_told, run_script
from cache_service.store.connection import Connection
from cache_service.store.scripts import RENEW_LEASES
from cluster.tenants.lease import MEMORY_S, Answers, Report, Reports, Told

_AT_ONCE = 200  # buckets in a script: half a millisecond of the server
_BYTES = 32  # of a number


class LeaseStore:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def renew(self, reports: Reports) -> Answers:
        """Raises StoreError; then some of the reports may count all the same."""
        answers: Answers = {tenant: {} for tenant in reports}
        flat = [(tenant, limit, report) for tenant, own in reports.items() for limit, report in own.items()]
        with faults_told():
            for begin in range(0, len(flat), _AT_ONCE):
                some = flat[begin : begin + _AT_ONCE]
                keys = [f"sd:{{limits}}:{tenant}:{limit}" for tenant, limit, _ in some]
                numbers = (number for _, _, report in some for number in _numbers(report))
                answer = run_script(self._connection.client(), RENEW_LEASES, keys, [MEMORY_S, *numbers])
                for (tenant, limit, _), told in zip(some, _told(answer, len(some)), strict=True):
                    answers[tenant][limit] = told
        return answers


def _numbers(report: Report) -> tuple[float, ...]:
    return report.rate, report.capacity, report.spent, report.asked, report.level


def _told(answer: Any, count: int) -> Iterator[Told]:
    """Raises ValueError for nonsense."""
    numbers = [float(as_text(one[:_BYTES])) for one in answer]
    if len(numbers) != 2 * count or not all(map(math.isfinite, numbers)) or any(asked < 0 for asked in numbers[1::2]):
        raise ValueError
    return map(Told, numbers[::2], numbers[1::2])

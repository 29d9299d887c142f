"""Failures of drafters: each is counted, the first of each drafter is logged."""

from __future__ import annotations

import logging

from cluster.router.counters import RouterCounters

logger = logging.getLogger(__name__)


class DrafterFailures:
    def __init__(self, counters: RouterCounters) -> None:
        self._counters = counters
        self._reported: set[str] = set()

    def count(self, name: str) -> None:
        """Call it while the exception is handled."""
        self._counters.drafter_errors[name] += 1
        if name not in self._reported:
            self._reported.add(name)
            logger.warning(
                "drafter %s failed; its drafts are left out, further failures are only counted", name, exc_info=True
            )

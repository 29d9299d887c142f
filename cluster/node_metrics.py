"""Metrics of a process among Ray's of its node, for clusters of more processes than one page can ask."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from prometheus_client import CollectorRegistry
from ray.util.metrics import Gauge

logger = logging.getLogger(__name__)

MOST_ON_PAGE = 32
"""Gateways, or routers, up to which /metrics has those of all. Beyond, each process tells its node."""

_PERIOD_S = 15.0  # which shows as little of a tenant's rounds as the page does


class NodeMetrics:
    """Repeats samples of a registry by `ray.util.metrics`; the agent of each node adds `ray_` to their names. Counters
    and histograms are gauges there, which `rate` and `histogram_quantile` take as well."""

    def __init__(self, registry: CollectorRegistry, label: str, process: str) -> None:
        """label: of all samples, whose value is the id of the process."""
        self._registry = registry
        self._mark = {label: process}
        self._gauges: dict[str, Gauge] = {}

    def tell(self) -> None:
        for family in self._registry.collect():
            for sample in family.samples:
                labels = {**self._mark, **sample.labels}
                if sample.name not in self._gauges:
                    self._gauges[sample.name] = Gauge(sample.name, family.documentation, tag_keys=tuple(labels))
                self._gauges[sample.name].set(sample.value, labels)

    async def keep_telling(self) -> NoReturn:
        while True:
            try:
                self.tell()
            except Exception:
                logger.exception("metrics cannot be told to the node")
            await asyncio.sleep(_PERIOD_S)

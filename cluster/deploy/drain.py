"""What a pod waits for before it ends: that nobody sends it requests any more, and that those it carries are done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

Read: TypeAlias = Callable[[], str | None]  # the node's metrics, None when there are none

ONGOING = frozenset(("ray_serve_num_ongoing_http_requests", "ray_serve_num_ongoing_grpc_requests"))

_LOOK_AGAIN_S = 2.0
_QUIET_S = 20.0  # Ray's metrics are up to ten seconds old
_SILENT_S = 10.0  # without metrics for so long, Ray has ended


def ongoing_requests(text: str) -> float:
    """Those that the proxy of this node carries, in Prometheus text format."""
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name in ONGOING)


def drain(
    read: Read,
    settle_s: float,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait `settle_s`, then until there was no request for a while, `limit_s` in all; whether it came to that."""
    until = clock() + limit_s
    sleep(min(settle_s, limit_s))
    quiet_since = silent_since = None
    while (now := clock()) < until:
        text = read()
        if text is None:
            silent_since = silent_since or now
            if now - silent_since >= _SILENT_S:
                return True
        else:
            silent_since = None
            quiet_since = (quiet_since or now) if ongoing_requests(text) == 0 else None
            if quiet_since is not None and now - quiet_since >= _QUIET_S:
                return True
        sleep(_LOOK_AGAIN_S)
    return False

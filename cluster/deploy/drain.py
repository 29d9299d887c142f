"""A pod's wait before it ends: until no new requests arrive and its open requests are done."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import TypeAlias

import httpx

from cluster.errors import ConfigError

# Open requests of the node; inf: unknown at the moment; None: nothing listens.
Read: TypeAlias = Callable[[], float | None]

_OF_THE_PROXY = re.compile(r"^ray_serve_num_ongoing_(?:http|grpc)_requests(?:\{.*\})? +(\S+)", re.MULTILINE)
# Proxies of other nodes also send requests to the gateways here.
_OF_GATEWAYS = re.compile(
    r"^ray_serve_replica_processing_queries\{(?:.*,)?deployment=\"Gateway\".*\} +(\S+)", re.MULTILINE
)

_LOOK_AGAIN_S = 2.0
_QUIET_S = 20.0  # Ray's metrics are up to ten seconds old
_SILENT_S = 10.0  # where nobody listens for so long, Ray has ended
_MAX_BYTES = 64 * 2**20  # of metrics
_READ_S = 5.0


def ongoing_requests(text: str) -> float:
    """Open requests of this node's proxy and gateways, from Ray's metrics in Prometheus text format. A request at both
    counts twice. What else is there may be anything."""
    return sum(_number(value) for pattern in (_OF_THE_PROXY, _OF_GATEWAYS) for value in pattern.findall(text))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def metrics_reader(url: str) -> Read:
    """Reads a page of metrics within some seconds from any server. Raises ConfigError for what is no URL."""
    try:
        address = httpx.URL(url)
        if address.scheme not in ("http", "https") or not address.host or (address.port or 1) > 65_535:
            raise httpx.InvalidURL("it must be http://host:port/path")
    except httpx.InvalidURL as error:
        raise ConfigError(f"--metrics is {url!r}: {error}") from None
    client = httpx.Client(timeout=_READ_S, trust_env=False)  # no proxy between a pod and itself

    def read() -> float | None:
        until = time.monotonic() + _READ_S
        text = bytearray()
        try:
            with client.stream("GET", address) as answer:
                for part in answer.iter_bytes():
                    text += part
                    if time.monotonic() > until or len(text) > _MAX_BYTES:
                        return math.inf
        except httpx.ConnectError:
            return None
        except httpx.HTTPError:
            return math.inf
        return ongoing_requests(text.decode(errors="replace")) if answer.status_code == 200 else math.inf

    return read


def drain(
    read: Read,
    settle_s: float,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait `settle_s`, then until there was no request for a while, `limit_s` in all; whether it came to that."""
    until = clock() + limit_s
    sleep(max(0.0, min(settle_s, limit_s)))
    quiet_since = silent_since = None
    while (now := clock()) < until:
        ongoing = read()
        if ongoing is None:
            silent_since = silent_since or now
            if now - silent_since >= _SILENT_S:
                return True
        else:
            silent_since = None
            quiet_since = (quiet_since or now) if ongoing == 0 else None
            if quiet_since is not None and now - quiet_since >= _QUIET_S:
                return True
        sleep(_LOOK_AGAIN_S)
    return False

"""Counts what a proxy refuses before a gateway hears of it. The number is among Ray's metrics of the node, as
`ray_paceline_door_refusals_total`: a proxy is a process of Ray's, and has no page of ours."""

from __future__ import annotations

from functools import cache

from ray.util.metrics import Counter


def count_refusal(code: str) -> None:
    """code: that of the error object."""
    _refusals().inc(1, {"code": code})


@cache
def _refusals() -> Counter:
    text = "Calls that a proxy refused itself, by error code"
    return Counter("paceline_door_refusals", description=text, tag_keys=("code",))

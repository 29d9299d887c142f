"""Attention as one operator that a compiler does not look into.

The operator takes the plan and the layer from the thread that runs it, not from its arguments. So one compiled graph
serves all layers and all forwards, and the cache, which is no argument either, is never copied to keep the graph free
of mutation. A graph must hold at most one of them: nothing else orders two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from actors.engine.attention.interface import AttentionPlan, Scoring


class _Current(threading.local):
    plan: AttentionPlan
    layer: int


_current = _Current()


@contextmanager
def attending(plan: AttentionPlan, layer: int) -> Iterator[None]:
    """What `paceline::attend` does on this thread meanwhile."""
    _current.plan, _current.layer = plan, layer
    try:
        yield
    finally:
        del _current.plan, _current.layer


class OpaquePlan:
    """`AttentionPlan` of layers that are traced: attends by the operator. The layer it is given is not read, because
    tracing would bind the graph to it."""

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        return torch.ops.paceline.attend(
            query, keys, values, scoring.sinks, scoring.scale, scoring.sliding_window, scoring.softcap
        )


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Arguments as of `AttentionPlan.attend`; contiguous [rows, heads, value_dim]."""
    scoring = Scoring(scale, sliding_window, softcap, sinks)
    return _current.plan.attend(_current.layer, query, keys, values, scoring).contiguous()


def _empty(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty((*query.shape[:2], values.shape[2]))


_library = torch.library.Library("paceline", "FRAGMENT")
_library.define("attend" + torch.library.infer_schema(attend, mutates_args=()))
for _key in ("CPU", "CUDA"):
    _library.impl("attend", attend, _key)
torch.library.register_fake("paceline::attend", _empty, lib=_library)

"""A round that the device computes or has computed: its state between begin and result, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from actors.draft_tree import DraftTree
from actors.engine.draws import Emitted
from actors.engine.planned_round import PlannedRound
from actors.engine.round_clock import Event
from actors.engine.round_items import READY
from actors.messages import TokenLogprobs, Verdict, VerifyItem, no_tokens

_NO_TOKENS = no_tokens()


@dataclass(slots=True)
class BegunRound:
    """A round between `TargetEngine.begin` and `TargetEngine.result`."""

    round_id: int
    started: Event | float
    finished: list[int]  # sequences that were forgotten before it
    seq_ids: list[int]
    asked: list[VerifyItem]  # one per sequence; empty for a round that was sent ahead
    statuses: list[int] = field(default_factory=list)  # one per sequence; empty: all are ready
    round: PlannedRound | None = None  # None: no sequence is ready
    rejecting: list[int] = field(default_factory=list)  # places in `round` of drafts under the rejection rule
    is_scoring: bool = False  # it computes log-probabilities of prompts, on the host
    computing: Any = None  # returned by the rounds' `begin`, until its result is read
    launched: Event | float = 0.0
    is_new_shape: bool = False  # as in `VerifyResult`
    # After `settle`:
    ended: Event | float = 0.0
    emitted: Emitted | None = None
    num_free: int = 0
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by place in `round`, as are the next
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    drafted_seq_ids: list[int] = field(default_factory=list)
    drafts: list[DraftTree] = field(default_factory=list)
    head_s: float = 0.0
    head_forwards: int = 0  # as in `VerifyResult`
    head_is_new_shape: bool = False  # likewise

    @property
    def ready(self) -> list[VerifyItem]:
        if not self.statuses:
            return self.asked
        return [item for item, status in zip(self.asked, self.statuses, strict=True) if status == READY]

    def left_out(self, status: int) -> list[int]:
        """Sequences with a status."""
        if not self.statuses:
            return []
        return [seq_id for seq_id, own in zip(self.seq_ids, self.statuses, strict=True) if own == status]


def outcomes_of(round: PlannedRound, emitted: Emitted | None) -> tuple[list[int], list[np.ndarray]]:
    """Next token of each sequence, -1 for none, and accepted nodes, int32."""
    count = len(round.sequences)
    if emitted is None:
        return [-1] * count, [_NO_TOKENS] * count
    own = [emitted.nodes[begin:end] for begin, end in pairwise(emitted.ends.tolist())]
    if len(own) == count:
        return emitted.next_tokens.tolist(), own
    next_tokens, paths = [-1] * count, [_NO_TOKENS] * count
    for place, token, path in zip(round.emitting.tolist(), emitted.next_tokens.tolist(), own, strict=True):
        next_tokens[place], paths[place] = token, path
    return next_tokens, paths


def verdicts_of(round: PlannedRound, emitted: Emitted | None) -> list[Verdict]:
    items = round.items
    next_tokens, paths = outcomes_of(round, emitted)
    fields = (
        [sequence.seq_id for sequence in round.sequences],
        items["num_computed"].tolist(),
        (items["count"] + items["num_nodes"]).tolist(),
        next_tokens,
        paths,
        [sequence.num_cached for sequence in round.sequences],
        items["num_nodes"].tolist(),
    )
    return [Verdict(*values) for values in zip(*fields, strict=True)]

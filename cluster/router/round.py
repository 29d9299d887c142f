"""One round of the router: what `RouterCore` plans, fills and commits; and the events that come out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.draft_tree import DraftTree
from actors.errors import PacelineError
from actors.messages import DraftBatch, TokenChunk
from cluster.router.planner import Forest, ProposedNodes
from cluster.router.sequence import Sequence
from cluster.router.traffic import Traffic


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request's last event when it did not finish: no chunk with a finish reason follows."""

    request_id: str
    error: PacelineError


RouterEvent = TokenChunk | RequestFailed


Emitted = tuple[int, int, list[int]]  # index of the entry, its first new token's position, accepted nodes


@dataclass(slots=True)
class RoundEntry:
    """One sequence of a round, as it was when the round was planned."""

    sequence: Sequence
    seq_id: int
    num_tokens: int  # committed
    rows: int  # of these, to be computed now
    max_nodes: int  # draft nodes it may verify; 0 unless it will emit
    emits: bool  # all its committed tokens are computed after the round
    is_coupled: bool  # False: acceptance == "rejection"
    target_known: int  # before the round, to go back to if the round is lost
    draft_worker: str | None = None  # the worker asked to draft for it
    max_required: int = 0  # nodes that its drafters may require beside those
    head_nodes: int = -1  # wanted of the target's head for the next round, as in `VerifyItem`
    proposals: list[tuple[int, DraftTree]] = field(default_factory=list)  # (source, tree)
    node_start: int = 0  # its nodes in the round's forest
    node_end: int = 0
    num_chain: int = 0  # nodes of a rejection chain, which the forest does not hold
    tree: DraftTree = field(default_factory=DraftTree.empty)  # sent to the target
    num_verified: int = 0  # of these nodes, as the target says


@dataclass(slots=True)
class Round:
    """Made by `RouterCore.plan_round`; everything but `round_id`, `draft_batches`, `awaited_workers` and
    `assembled_at` is the core's.

    Every batch of `draft_batches` is to be sent, but only the answers of `awaited_workers` are worth waiting for: the
    others merely bring a worker up to date.
    """

    round_id: int
    planned_at: float
    entries: list[RoundEntry]
    finished: list[int]  # sequences the target is to free
    num_rows: int  # without drafts
    num_running: int
    num_emitting: int
    row_budget: int  # draft nodes of all sequences, beside those that are required
    explores: bool  # verify more than seems to pay, to measure the target there
    traffic: Traffic  # what rounds like this one have shown
    wanted_rows: int = 0  # draft nodes that sequences could use, whether they pay or not
    draft_batches: dict[str, DraftBatch] = field(default_factory=dict)
    awaited_workers: tuple[str, ...] = ()
    num_draft_workers: int = 0  # that there were to ask
    asked_draft_model: bool = False
    asked_head: bool = False  # to draft, not only to take rows in
    is_assembled: bool = False  # its batch is written: sequences may end before the target's answer
    assembled_at: float = 0.0  # on the clock of `planned_at`; 0: nobody has said
    forest: Forest | None = None  # the nodes sent to the target
    proposed: ProposedNodes | None = None
    node_index: np.ndarray | None = None  # int32: merged node -> node of `forest` or -1

    def __len__(self) -> int:
        return len(self.entries)

"""One round: what `RouterCore` plans, fills and commits, and the events that come out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from actors.draft_tree import DraftTree
from actors.draft_worth import no_worth
from actors.errors import PacelineError
from actors.messages import DraftBatch, TokenChunk
from cluster.router.merged_trees import MergedTrees
from cluster.router.sequence import Sequence
from cluster.router.traffic import Traffic


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The last event of a request that failed; no chunk with a finish reason follows."""

    request_id: str
    error: PacelineError


RouterEvent = TokenChunk | RequestFailed


class Emitted(NamedTuple):
    """A round's entry that emitted tokens."""

    entry_index: int
    first: int  # position of its first new token
    path: list[int]  # accepted nodes, in order


@dataclass(slots=True)
class RoundEntry:
    """One sequence in a round, as it was when the round was planned."""

    sequence: Sequence
    seq_id: int
    num_tokens: int  # committed
    rows: int  # committed tokens to compute in this round
    emits: bool  # all its committed tokens are computed after the round
    is_coupled: bool  # False: acceptance == "rejection"
    target_known: int  # `TargetState.known` before the round, restored if the round is lost
    max_nodes: int = 0  # draft nodes it may verify; 0 unless it emits
    max_required: int = 0  # further nodes that its drafters may require
    head_nodes: int = -1  # as in `VerifyItem`: nodes that the head drafts for the next round
    draft_workers: dict[int, str] = field(default_factory=dict)  # the workers asked to draft for it, by pool
    proposals: list[tuple[int, DraftTree]] = field(default_factory=list)  # (source, tree), verified by coupling
    chain: DraftTree | None = None  # a draft model's, with the distributions it was drawn from; under rejection
    chain_source: int = -1  # the source of `chain`
    node_start: int = 0  # its nodes in the round's `chosen` trees
    node_end: int = 0
    num_chain: int = 0  # nodes of `chain` that are verified, which `Round.chosen` does not hold; 0: proposals are
    tree: DraftTree = field(default_factory=DraftTree.empty)  # sent to the target
    is_masked: bool = False  # its tokens are drawn within a grammar
    num_unmasked: int = 0  # last nodes of `tree` without a mask: no token drawn behind them may be emitted
    num_verified: int = 0  # nodes that the target computed


class RoundSize(NamedTuple):
    """What a round computes without drafts."""

    num_rows: int
    num_running: int
    num_emitting: int


@dataclass(slots=True)
class RowBudget:
    """Draft nodes that a round may verify over all sequences, without the required ones."""

    rows: int = 0
    wanted: int = 0  # nodes that the sequences could use, paying or not
    explores: bool = False  # verify more than seems to pay, to measure the target's time


@dataclass(slots=True)
class AskedDrafters:
    """What a round asks of draft workers and of the target's head."""

    batches: dict[str, DraftBatch] = field(default_factory=dict)  # by worker; all are sent
    awaited: tuple[str, ...] = ()  # workers whose answers the round waits for; the others only receive tokens
    pool_of: dict[str, int] = field(default_factory=dict)  # index of the pool of each worker of `batches`
    pools: dict[int, int] = field(default_factory=dict)  # pools that the round waits for: their workers when planned
    is_new_shape: bool = False  # of an awaited answer, or of the head: the next of the shape will take less time
    head: bool = False  # the head drafts; otherwise it only reads the rows
    head_min_confidence: float = 0.0  # of nodes that the head drafts behind
    head_worth: np.ndarray = field(default_factory=no_worth)  # of a forward of the head
    head_levels: int | None = None  # as in `VerifyItem`

    @property
    def draft_model(self) -> bool:
        """Whether the round waits for draft workers."""
        return bool(self.pools)


@dataclass(slots=True)
class Round:
    """Made by `RouterCore.plan_round`; only `assembled_at` is set outside the core."""

    round_id: int
    planned_at: float
    entries: list[RoundEntry]
    finished: list[int]  # sequences the target is to free
    size: RoundSize
    traffic: Traffic  # statistics of rounds of this namespace, or of mixed rounds
    budget: RowBudget = field(default_factory=RowBudget)
    asked: AskedDrafters = field(default_factory=AskedDrafters)
    chosen: MergedTrees | None = None  # the nodes sent to the target; None: no tree was merged
    is_assembled: bool = False  # its batch is written: sequences may end before the target's answer
    is_ahead: bool = False  # it was sent ahead, so the target began it before the router knew what it follows
    assembled_at: float = 0.0  # on the clock of `planned_at`; 0: unknown

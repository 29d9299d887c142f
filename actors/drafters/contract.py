"""What a drafter is. Each drafting method is one file beside this one; adding a method touches no other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One sequence as a drafter sees it this round.

    `tokens` is a read-only view of all committed tokens, int32 [n]; `start` of them were there when this drafter was
    last asked or told about the sequence (0: new or restarted), so `tokens[start:]` is what it has to catch up on.
    """

    seq_id: int
    tokens: np.ndarray
    start: int
    num_prompt_tokens: int
    max_nodes: int
    sampling: SamplingParams
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one drafter's proposal."""

    seq_id: int
    num_proposed: int  # nodes of this drafter that were verified
    num_accepted: int  # of them on the accepted path
    emitted: np.ndarray  # int32: all tokens of the round, accepted ones and the target's own last one


class Drafter(Protocol):
    """Guesses continuations on the router's CPU. Errors never reach a user: the round goes on without the drafter."""

    name: str

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One tree per context, in order, with at most max_nodes nodes; empty where there is nothing to say."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the round. Optional work; may do nothing."""
        ...

    def forget(self, seq_id: int) -> None:
        """Free everything kept for a sequence; unknown ids are fine."""
        ...

    def memory_bytes(self) -> int:
        """Bytes held for all sequences, for the memory metrics and tests."""
        ...

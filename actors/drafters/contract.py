"""What a drafter is. Each drafting method is one file beside this one; adding a method touches no other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import SamplingParams, no_tokens


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
    prediction: np.ndarray = field(default_factory=no_tokens)  # int32: what the caller thinks will be the output
    max_required: int = 0  # nodes of the tree that may be required, beside max_nodes others
    max_depth: int = 0  # of required nodes: behind those there are no positions
    readable: tuple[str, ...] = ()  # further namespaces of the shared cache to draft from, the nearest first
    reads_cache: bool = True  # whether to draft from the shared cache at all

    @property
    def shared_namespaces(self) -> tuple[str, ...]:
        """Those of the shared cache to draft from, the nearest first."""
        return tuple(dict.fromkeys((self.namespace, *self.readable))) if self.reads_cache else ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one drafter's proposal."""

    seq_id: int
    num_proposed: int  # nodes of this drafter that were verified, without those that are required and no guess
    num_accepted: int  # of them on the accepted path
    emitted: np.ndarray  # int32: all tokens of the round, accepted ones and the target's own last one


def no_sequences() -> np.ndarray:
    return np.empty(0, np.int64)


# Tokens of context that come with each verified row; no drafter learns contexts longer than that.
MAX_CONTEXT = 4


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """What the target thought at rows it computed, accepted or not: soft labels for drafters that learn.

    Rows of one namespace, any number of sequences. Rows of a prompt come with what stands there: its first successor
    has probability 1, the others are token 0 with probability 0; they have no parents.
    """

    namespace: str
    contexts: np.ndarray  # int32 [rows, MAX_CONTEXT]: the last tokens up to the row's own, oldest first; -1: before 0
    token_ids: np.ndarray  # int32 [rows, k]: the most probable next tokens by the raw logits, most probable first
    probs: np.ndarray  # float32 [rows, k]: their probabilities at temperature 1, over the whole vocabulary
    sequences: np.ndarray = field(default_factory=no_sequences)  # int64 [rows]: whose rows they are
    # int32 [rows]: which of these rows is that of the node's parent; -1: the row is that of the last committed token.
    parents: np.ndarray = field(default_factory=no_tokens)
    may_share: bool = False  # what is learnt from these rows may leave this process, within the namespace


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


@runtime_checkable
class RememberingDrafter(Drafter, Protocol):
    """A drafter that keeps what it has seen in a namespace from one sequence to the next, whatever it is."""

    def drop(self, namespace: str) -> None:
        """Forget all that was learnt in a namespace; unknown ones are fine. It has been purged, or nobody would hear
        if it were. What is kept for sequences that run may stay: it ends with them."""
        ...


@runtime_checkable
class LearningDrafter(Drafter, Protocol):
    """A drafter that learns from every row the target computes, its own drafts or not."""

    num_successors: int  # how many successors of a row it wants to see, >= 1

    def learn(self, rows: VerifiedRows) -> None: ...


@runtime_checkable
class RequiringDrafter(LearningDrafter, Protocol):
    """A drafter that needs rows of its own choosing computed, guesses or not, and learns from what is said there.

    Rows are granted whole, `most_required` for a sequence, or not at all where a round has no room for them: then
    `DraftContext.max_required` is 0. Which have been computed is seen in `VerifiedRows.parents`.
    """

    most_required: int  # required nodes of a tree, at most

"""The contract of drafters. Each CPU drafter is one file beside this one; adding one touches no other file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import SamplingParams, no_tokens

Asked = TypeVar("Asked")


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One sequence as a drafter sees it this round.

    `tokens` is a read-only view of all committed tokens, int32 [n]. The drafter has been shown the first `start` of
    them (0: new or restarted), so `tokens[start:]` is what it has to catch up on.
    """

    seq_id: int
    tokens: np.ndarray
    start: int
    num_prompt_tokens: int
    max_nodes: int
    sampling: SamplingParams
    namespace: str = ""
    prediction: np.ndarray = field(default_factory=no_tokens)  # int32: the output that the caller expects
    max_required: int = 0  # required nodes the tree may have, beside max_nodes others
    max_depth: int = 0  # greatest depth of a required node: there are no positions behind it
    readable: tuple[str, ...] = ()  # further namespaces of the shared cache to draft from, the nearest first
    reads_cache: bool = True  # whether to draft from the shared cache at all

    @property
    def shared_namespaces(self) -> tuple[str, ...]:
        """Those of the shared cache to draft from, the nearest first."""
        return tuple(dict.fromkeys((self.namespace, *self.readable))) if self.reads_cache else ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one drafter's proposal."""

    seq_id: int
    num_proposed: int  # nodes of this drafter that were verified, required nodes with confidence 0 not counted
    num_accepted: int  # of these, nodes on the accepted path
    emitted: np.ndarray  # int32: all tokens of the round: the accepted ones and the target's next token


def no_sequences() -> np.ndarray:
    return np.empty(0, np.int64)


# Tokens of context that come with each verified row; no drafter learns contexts longer than that.
MAX_CONTEXT = 4


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """Target predictions at rows it computed, accepted or not: soft labels for drafters that learn.

    Rows of one namespace and any number of sequences. Rows of a prompt carry the prompt's next token instead: the first
    successor has probability 1, the others are token 0 with probability 0; they have no parents.
    """

    namespace: str
    contexts: np.ndarray  # int32 [rows, MAX_CONTEXT]: the last tokens up to the row's own, oldest first; -1: before 0
    token_ids: np.ndarray  # int32 [rows, k]: the most probable next tokens by the raw logits, most probable first
    probs: np.ndarray  # float32 [rows, k]: their probabilities at temperature 1, over the whole vocabulary
    sequences: np.ndarray = field(default_factory=no_sequences)  # int64 [rows]: sequence ids
    # int32 [rows]: the row of the node's parent; -1: this is the row of the last committed token.
    parents: np.ndarray = field(default_factory=no_tokens)
    may_share: bool = False  # counts learnt from these rows may be sent to other routers, within the namespace


class Drafter(ABC, Generic[Asked]):
    """One drafting method. CPU drafters are asked with `DraftContext`; drafters beside a model with what they compute.

    Only `propose` is required. An error of a drafter never reaches a user: the round goes on without its drafts.
    """

    name: str
    num_successors: int = 0  # target predictions a row that `remember` wants to see; 0: `remember` is not called
    # Most nodes of a tree that it may require: these are computed whether they pay or not. They are granted whole or,
    # in a round without room, not at all (`DraftContext.max_required` is 0). `VerifiedRows.parents` tells which were
    # computed.
    most_required: int = 0

    @abstractmethod
    def propose(self, asked: Sequence[Asked]) -> list[DraftTree]:
        """One tree for each item, in order, within its limits; empty where there is nothing to propose."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from what became of its proposals and from the tokens emitted."""

    def remember(self, rows: VerifiedRows) -> None:
        """Learn from every row that the target computed, whoever drafted it. Rows of a prompt come here too."""

    def forget(self, seq_id: int) -> None:
        """Free what is kept for a sequence; unknown ids are accepted."""

    def drop_namespace(self, namespace: str) -> None:
        """Drop what was learnt in a namespace from all its sequences; unknown names are accepted. State of running
        sequences may stay until `forget`."""

    def memory_bytes(self) -> int:
        """Bytes held for all sequences and namespaces, for metrics and tests."""
        return 0


CpuDrafter = Drafter[DraftContext]

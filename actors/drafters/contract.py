"""The contract of drafters. Each CPU drafter is one file beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from actors.draft_tree import DraftTree
from actors.grammar.matcher import GrammarMatcher
from actors.messages import GenerationRequest, SamplingParams, no_tokens

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
    max_required: int = 0  # limit of required nodes, which do not count in max_nodes
    max_depth: int = 0  # greatest depth of a required node: the model has no positions beyond
    readable: tuple[str, ...] = ()  # further namespaces of the shared cache to read, the nearest first
    reads_cache: bool = True  # whether to draft from the shared cache at all
    grammar: GrammarMatcher | None = None  # behind the committed tokens; not to be moved, but copied

    @property
    def shared_namespaces(self) -> tuple[str, ...]:
        """Namespaces of the shared cache to read, the nearest first."""
        return tuple(dict.fromkeys((self.namespace, *self.readable))) if self.reads_cache else ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one drafter's proposal."""

    seq_id: int
    num_proposed: int  # verified nodes of this drafter, without required nodes of confidence 0
    num_accepted: int  # nodes among num_proposed that are on the accepted path
    emitted: np.ndarray  # int32: all tokens of the round, the accepted ones and the target's next token


def no_sequences() -> np.ndarray:
    return np.empty(0, np.int64)


MAX_CONTEXT = 4  # tokens of context that come with each verified row


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """The target's predictions at all rows it computed, accepted or not: soft labels for drafters that learn.

    Rows of one namespace and any number of sequences. Rows of a prompt have the prompt's next token instead, with
    probability 1 (the other successors are token 0 with probability 0), and no parents.
    """

    namespace: str
    contexts: np.ndarray  # int32 [rows, MAX_CONTEXT]: the last tokens, the row's own at the end; -1 before the text
    token_ids: np.ndarray  # int32 [rows, k]: the most probable next tokens by the raw logits, most probable first
    probs: np.ndarray  # float32 [rows, k]: their probabilities at temperature 1, over the whole vocabulary
    sequences: np.ndarray = field(default_factory=no_sequences)  # int64 [rows]: sequence ids
    # int32 [rows]: row of the node's parent; -1 for the row of the last committed token.
    parents: np.ndarray = field(default_factory=no_tokens)
    may_share: bool = False  # whether counts of these rows may be sent to other routers, within the namespace


class Drafter(ABC, Generic[Asked]):
    """One drafting method. CPU drafters get a `DraftContext`; drafters in a worker get its own item type.

    Only `propose` is required. A drafter's error never reaches a user: the round goes on without its drafts.
    """

    name: str
    num_successors: int = 0  # predictions of each row that `remember` wants; 0: `remember` is not called
    successors_option: str = ""  # the option that sets it, if one does
    # Limit of required nodes, which are computed without regard to their cost. A round grants all of them, or none if
    # it has no room (`DraftContext.max_required` is 0). `VerifiedRows.parents` tells which were computed.
    most_required: int = 0

    @abstractmethod
    def propose(self, asked: Sequence[Asked]) -> list[DraftTree]:
        """One tree for each item, in order and within its limits; empty if there is nothing to propose."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the results of its proposals and from the emitted tokens."""

    def remember(self, rows: VerifiedRows) -> None:
        """Learn from all rows that the target computed, whichever drafter proposed them, and from rows of prompts."""

    def forget(self, seq_id: int) -> None:
        """Free the state of a sequence. Unknown ids are ignored."""

    def drop_namespace(self, namespace: str) -> None:
        """Drop what was learnt in a namespace. State of running sequences may stay until `forget`. Unknown names are
        ignored."""

    def memory_bytes(self) -> int:
        """Bytes held for all sequences and namespaces, for metrics and tests."""
        return 0


class CpuDrafter(Drafter[DraftContext]):
    """A drafter on the CPU of the router. It has `_propose_one`, or its own `propose`."""

    def may_draft_for(self, request: GenerationRequest) -> bool:
        """Whether it may ever propose something. Asked once for a request: False saves its part of every round."""
        return True

    def propose(self, asked: Sequence[DraftContext]) -> list[DraftTree]:
        return [self._propose_one(context) for context in asked]

    def _propose_one(self, context: DraftContext) -> DraftTree:
        raise NotImplementedError

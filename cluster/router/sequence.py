"""One request on the machine side: its committed tokens and what every worker is known to hold of them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import GenerationRequest, RequestTimes, SequenceStart, SpeculationStats, no_tokens
from cluster.router.context_class import DraftRecord

_FIRST_ROOM = 256  # tokens of output that fit before the buffer grows


class Sequence:
    """The router's record of a running or waiting request. Tokens are only ever appended.

    `num_computed` and `target_known` mirror the target: committed tokens with valid KV, and committed tokens it has
    been sent. Both fall to 0 when the target loses the sequence; nothing else does.
    """

    __slots__ = (
        "_buffer",
        "arrival",
        "arrived_at",
        "begin",
        "chunk_index",
        "corrections",
        "deadline",
        "draft_known",
        "draft_record",
        "draft_worker",
        "drafter_known",
        "drafters",
        "drafts_from",
        "head_length",
        "head_tree",
        "is_at_target",
        "is_cancelled",
        "is_ended",
        "max_draft_tokens",
        "max_tokens",
        "most_computed",
        "num_cached",
        "num_computed",
        "num_failed_rounds",
        "num_prompt",
        "num_setbacks",
        "num_taught",
        "num_tokens",
        "request",
        "request_id",
        "seq_id",
        "started_at",
        "stats",
        "stop_tokens",
        "target_known",
        "times",
        "wants_draft_model",
        "wants_head",
        "wants_lookahead",
    )

    def __init__(
        self,
        request: GenerationRequest,
        seq_id: int,
        arrival: int,
        now: float,
        max_model_len: int,
        drafters: tuple[int, ...],
        num_drafters: int,
        wants_draft_model: bool,
        max_draft_tokens: int,
        wants_head: bool = False,
        wants_lookahead: bool = False,
    ) -> None:
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        self.request = request
        self.request_id = request.request_id
        self.seq_id = seq_id
        self.arrival = arrival  # order of age; kept when the sequence is preempted
        self.arrived_at = now
        self.started_at: float | None = None  # its first round was planned; None: it waits
        self.times = RequestTimes(rounds=[]) if request.timed_rounds >= 0 else None
        self.deadline = None if request.timeout_s is None else now + request.timeout_s
        self.num_prompt = len(prompt)
        self.num_tokens = len(prompt)
        self.max_tokens = min(len(prompt) + request.max_new_tokens, max_model_len)  # prompt and output
        self._buffer = np.empty(min(self.max_tokens, len(prompt) + _FIRST_ROOM), np.int32)
        self._buffer[: len(prompt)] = prompt
        self.stop_tokens = frozenset(request.stop_token_ids)
        self.begin = SequenceStart(request.sampling, len(prompt) - request.num_output_in_prompt, request.namespace)
        self.drafters = drafters  # indices of the CPU drafters it may use
        self.drafter_known = [0] * num_drafters  # tokens each of them has seen
        self.wants_draft_model = wants_draft_model
        self.max_draft_tokens = max_draft_tokens
        self.wants_head = wants_head
        self.wants_lookahead = wants_lookahead  # of the draft model, instead of trees
        self.head_tree: DraftTree | None = None  # what the target's head has drafted
        self.head_length = 0  # committed tokens that it belongs behind
        self.draft_record: DraftRecord | None = None  # how each source has fared in it; None: it had no drafts
        self.draft_worker: str | None = None
        self.draft_known = 0  # tokens that worker has been sent
        self.corrections = no_tokens()  # that it is to be sent, as in `DraftItem`: those of the last round with any
        self.target_known = 0
        self.is_at_target = False  # it has been sent under its present id, so the target must be told to free it
        self.num_computed = 0
        self.most_computed = 0  # the highest num_computed there has been
        self.num_cached = 0
        self.chunk_index = 0
        self.num_setbacks = 0  # rounds in a row that were answered and brought it no further
        self.num_failed_rounds = 0  # rounds it was in that failed as a whole, since it last got further than ever
        self.drafts_from = 0  # the round before which it gets no drafts, because they lacked blocks or rounds failed
        self.is_cancelled = False
        self.is_ended = False  # its outcome has been delivered
        self.num_taught = 0  # rows of its prompt that drafters have learnt, from it or from another one
        self.stats = SpeculationStats(accepted_tokens={})

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_left(self) -> int:
        """Tokens it may still emit."""
        return self.max_tokens - self.num_tokens

    def tokens(self, start: int = 0) -> np.ndarray:
        """Committed tokens from `start`: a read-only view, int32. It stays what it is when the sequence grows."""
        view = self._buffer[start : self.num_tokens]
        view.flags.writeable = False
        return view

    def has_prompt_of(self, other: Sequence) -> bool:
        """Whether both belong to one namespace and have the same prompt."""
        return (
            self.num_prompt == other.num_prompt
            and self.begin.namespace == other.begin.namespace
            and np.array_equal(self._buffer[: self.num_prompt], other._buffer[: other.num_prompt])
        )

    def append(self, token_ids: SequenceOf[int]) -> None:
        """Commit tokens; at most `num_left`."""
        end = self.num_tokens + len(token_ids)
        if end > len(self._buffer):
            # A new array, never resized in place: views in flight keep the old one.
            grown = np.empty(min(max(end, len(self._buffer) * 2), self.max_tokens), np.int32)
            grown[: self.num_tokens] = self._buffer[: self.num_tokens]
            self._buffer = grown
        self._buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def lost_by_target(self) -> None:
        """The target holds nothing of it any more: the next delta starts at 0."""
        self.target_known = 0
        self.num_computed = 0

    def leave_draft_worker(self) -> None:
        """It has none from now on."""
        self.draft_worker = None
        self.draft_known = 0
        self.corrections = no_tokens()

    def renamed(self, seq_id: int) -> None:
        """Start over under a new id, with the tokens it has: every worker has been told to forget the old one."""
        self.seq_id = seq_id
        self.lost_by_target()
        self.drafter_known = [0] * len(self.drafter_known)
        self.leave_draft_worker()

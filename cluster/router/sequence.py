"""One request in the router: its committed tokens, and what each worker holds of them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from actors.draft_tree import DraftTree
from actors.errors import InvalidRequest
from actors.grammar.matcher import GrammarMatcher
from actors.messages import GenerationRequest, RequestTimes, SequenceStart, SpeculationStats, TokenLogprobs, no_tokens
from cluster.router.draft_record import DraftRecord
from cluster.router.draft_sources import AllowedSources, WorkerSource

_FIRST_ROOM = 256  # output tokens that fit before the buffer grows


@dataclass(slots=True)
class TargetState:
    """What the target holds of a sequence, and how its rounds went.

    `num_computed` and `known` return to 0 when the target loses the sequence; nothing else lowers them.
    """

    known: int = 0  # committed tokens the target has been sent
    is_held: bool = False  # sent under its present id, so the target must be told to free it
    num_computed: int = 0  # committed tokens with valid KV
    most_computed: int = 0  # the highest num_computed so far
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_setbacks: int = 0  # consecutive answered rounds without progress
    num_failed_rounds: int = 0  # rounds with this sequence that failed as a whole since most_computed last rose

    def advance(self, num_computed: int) -> None:
        self.num_computed = num_computed
        self.most_computed = max(self.most_computed, num_computed)
        self.num_setbacks = self.num_failed_rounds = 0

    def compute_prompt(self, num_computed: int) -> bool:
        """Note a round that computed a part of the prompt. Returns whether it got further than the round before."""
        has_progressed = num_computed > self.num_computed
        self.num_computed = num_computed
        if num_computed > self.most_computed:
            # Recomputing what a failed round lost does not clear the sequence of suspicion.
            self.most_computed = num_computed
            self.num_failed_rounds = 0
        if has_progressed:
            self.num_setbacks = 0
        return has_progressed

    def lost(self) -> None:
        """The target no longer holds the sequence: the next delta starts at 0."""
        self.known = 0
        self.num_computed = 0


@dataclass(slots=True)
class PoolState:
    """What a worker of one pool holds of a sequence."""

    source: WorkerSource
    worker: str | None = None
    known: int = 0  # tokens that worker has been sent
    corrections: np.ndarray = field(default_factory=no_tokens)  # for the next `DraftItem`, from the last round with any

    def leave_worker(self) -> None:
        self.worker = None
        self.known = 0
        self.corrections = no_tokens()


@dataclass(slots=True)
class DraftState:
    """Which sources may draft for a sequence, and what each of them has seen of it."""

    sources: AllowedSources
    cpu_known: list[int] = field(default_factory=list)  # tokens each CPU drafter has seen
    max_tokens: int = 0  # draft tokens a round
    from_round: int = 0  # no drafts before this round, after failed rounds or a lack of KV blocks
    head_tree: DraftTree | None = None  # drafted by the target's draft head
    head_length: int = 0  # committed tokens that head_tree follows
    record: DraftRecord | None = None  # how each source has fared; None: no drafts yet
    pools: dict[int, PoolState] = field(default_factory=dict)  # by index, those that may draft for it
    gain: float = 2.0  # tokens that a draft brings, typically; at first a guess
    num_taught: int = 0  # prompt rows that drafters have learnt, here or from a sequence with the same prompt

    def leave_workers(self) -> None:
        for held in self.pools.values():
            held.leave_worker()


@dataclass(slots=True)
class RequestProgress:
    """What the client has received, and when; times are on the router's clock."""

    arrived_at: float
    started_at: float | None = None  # when its first round was planned; None: it waits
    first_at: float | None = None  # when its first tokens were committed
    chunk_index: int = 0  # index that the next chunk will have
    is_cancelled: bool = False
    is_ended: bool = False  # its last event has been queued
    stats: SpeculationStats = field(default_factory=lambda: SpeculationStats(accepted_tokens={}))
    times: RequestTimes | None = None  # None: the request does not want them
    prompt_parts: list[TokenLogprobs] = field(default_factory=list)  # of the prompt computed so far


class Sequence:
    """A running or waiting request. Tokens are only ever appended."""

    __slots__ = (
        "_buffer", "arrival", "begin", "deadline", "drafts", "grammar", "max_tokens", "namespace", "num_prompt",
        "num_tokens", "progress", "request", "request_id", "seq_id", "stop_tokens", "target",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        *,
        seq_id: int,
        arrival: int,
        now: float,
        max_model_len: int,
        drafts: DraftState,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """grammar: at the beginning of the answer. Raises InvalidRequest if output in the prompt does not follow it."""
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        self.request = request
        self.request_id = request.request_id
        self.namespace = request.namespace
        self.seq_id = seq_id
        self.arrival = arrival  # order of age; kept when the sequence is preempted
        self.deadline = None if request.timeout_s is None else now + request.timeout_s
        self.num_prompt = len(prompt)
        self.num_tokens = len(prompt)
        self.max_tokens = min(len(prompt) + request.max_new_tokens, max_model_len)  # prompt and output
        self._buffer = np.empty(min(self.max_tokens, len(prompt) + _FIRST_ROOM), np.int32)
        self._buffer[: len(prompt)] = prompt
        self.stop_tokens = frozenset(request.stop_token_ids)
        self.begin = SequenceStart(
            request.sampling,
            len(prompt) - request.num_output_in_prompt,
            request.prefix_namespace or request.namespace,
            request.num_logprobs,
            request.num_prompt_logprobs,
        )
        self.target = TargetState()
        self.drafts = drafts
        self.grammar = grammar  # behind the committed tokens; None: the answer is not constrained
        if grammar is not None and not grammar.follow(prompt[self.begin.num_prompt_tokens :].tolist()):
            answered = f"{request.num_output_in_prompt} tokens of the answer"
            raise InvalidRequest(request.grammar_field, answered, "they do not follow it")
        self.progress = RequestProgress(now, times=RequestTimes(rounds=[]) if request.timed_rounds >= 0 else None)

    @property
    def draft_begin(self) -> SequenceStart:
        """For draft workers: what they learn belongs to the sequence's namespace, they draw within its grammar, and
        nobody asks them for log-probabilities."""
        begin, grammar = self.begin, self.request.grammar
        return SequenceStart(begin.sampling, begin.num_prompt_tokens, self.namespace, grammar=grammar)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.target.num_computed

    @property
    def num_left(self) -> int:
        """Tokens it may still emit."""
        return self.max_tokens - self.num_tokens

    def tokens(self, start: int = 0) -> np.ndarray:
        """Committed tokens from `start`, int32: a read-only view that does not change when the sequence grows."""
        view = self._buffer[start : self.num_tokens]
        view.flags.writeable = False
        return view

    def has_prompt_of(self, other: Sequence) -> bool:
        """Whether both belong to one namespace and have the same prompt."""
        return (
            self.num_prompt == other.num_prompt
            and self.namespace == other.namespace
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

    def rename(self, seq_id: int) -> None:
        """Start over under a new id with the committed tokens; the caller has every worker forget the old id."""
        self.seq_id = seq_id
        self.target.lost()
        self.drafts.cpu_known = [0] * len(self.drafts.cpu_known)
        self.drafts.leave_workers()

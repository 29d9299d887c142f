"""The router's heart: which tokens are committed, and what every round asks of drafters and target.

A plain object without I/O, clock or threads: time is passed in, messages are handed out and taken in. One round at a
time goes `plan_round`, `draft_locally`, `assemble`, `commit`; requests may come and be cancelled at any moment.
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Literal

import msgspec

from actors.drafters.contract import Drafter
from actors.drafters.registry import CACHE, DRAFT_MODEL, OUROBOROS
from actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LinkError,
    ModelError,
    Overloaded,
    PacelineError,
    Unavailable,
)
from actors.messages import (
    DraftResult,
    GenerationRequest,
    RequestTimes,
    RoundTimes,
    SequenceDelta,
    SpeculationStats,
    TokenChunk,
    Verdict,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    WorkerInfo,
)
from actors.workers.target_demand import TargetDemand
from cache_service.automata.shared_phrases import SharedPhrases
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router import learning, planner
from cluster.router.acceptance_watch import AcceptanceWatch
from cluster.router.counters import RouterCounters
from cluster.router.draft_choice import DraftChoice
from cluster.router.draft_scaling import DraftScaling
from cluster.router.drafting import Drafting, DraftShape
from cluster.router.guarded_sink import GuardedSink
from cluster.router.learning import rows_of_prompt, rows_of_round, successors_of
from cluster.router.required_rows import check_required_rows
from cluster.router.round import Emitted, RequestFailed, Round, RoundEntry, RoundSize, RouterEvent
from cluster.router.scheduler import Scheduler, share_prompt_rows
from cluster.router.sequence import DraftState, Sequence
from cluster.router.shared_learning import SharedLearning
from cluster.router.step_time import StepTimeCurve
from cluster.router.traffic import TrafficRecords

logger = logging.getLogger(__name__)

TARGET = "target"  # who proposed a recovered or bonus token

_DEFAULT_SHAPE = DraftShape()
_NOTHING_SHARED = SharedLearning()
_MAX_SETBACKS = 16  # rounds in a row without progress after which a request fails
_SUSPICIOUS_ROUNDS = 2  # failed in a row, after which a sequence runs alone, so that it fails no others
_GIVEN_UP_ROUNDS = 4  # failed in a row, the last of them alone, after which its request fails
_MAX_TAUGHT_ROWS = 2048  # of prompts in a round: drafters learn about half a million a second, and all others wait
_DRAFTLESS_ROUNDS = 8  # of a sequence whose drafts lacked KV blocks, or whose rounds failed


class RouterCore:
    """Owns every sequence of one target group. Only tokens committed here exist; workers hold copies of them.

    Each accepted request ends exactly once: with a chunk that has a finish reason, or with a `RequestFailed`. Both
    come out of `plan_round`, `commit` and `end_overdue` as events, in the order in which they happened.

    `drafters` are the CPU drafters by name; "draft_model" and, where it is configured, "ouroboros" are the sources that
    `set_draft_workers` serves. A target with a head drafts, too, as the source "eagle".
    Raises InvalidRequest for drafters that require more rows than a round may have.
    """

    def __init__(
        self,
        target: WorkerInfo,
        config: RouterConfig,
        speculation: SpeculationConfig,
        drafters: Mapping[str, Drafter],
        *,
        draft_shape: DraftShape = _DEFAULT_SHAPE,
        shared: SharedLearning = _NOTHING_SHARED,
    ) -> None:
        check_required_rows(drafters.values(), speculation.max_rows)
        self.counters = RouterCounters()
        self.step_times = StepTimeCurve(target.step_times, target.row_steps)
        self._config = config
        self._speculation = speculation
        self._vocab_size = target.vocab_size
        self.max_model_len = target.max_model_len  # for new requests; a target that was started anew may have another
        self._block_size = target.block_size
        self._scheduler = Scheduler(config, target.block_size)
        self._by_request: dict[str, Sequence] = {}
        self._by_seq_id: dict[int, Sequence] = {}
        self._traffic = TrafficRecords()
        self.draft_scaling = DraftScaling()
        self._drafting = Drafting(
            drafters,
            speculation.drafters,
            draft_shape.gamma,
            draft_shape.branch,
            target.vocab_size,
            target.has_head,
            self._by_seq_id,
            self.counters,
            SharedPhrases(shared.index) if shared.index is not None and OUROBOROS in speculation.drafters else None,
            self.draft_scaling,
        )
        self.acceptance = AcceptanceWatch(self._drafting.names)
        self._choice = DraftChoice(
            self._drafting.names,
            speculation.max_rows,
            target.vocab_size,
            self.step_times,
            self.counters,
            config.max_running,
            self._drafting.head,
            self._drafting.most_required,
            self.draft_scaling,
        )
        self._deadlines: list[tuple[float, int, Sequence]] = []  # heap; may hold ended sequences
        self._cancelled: list[Sequence] = []  # running ones, to be freed
        self._events: list[RouterEvent] = []
        self._to_free: list[int] = []  # sequences the target still holds
        self._open: Round | None = None
        # Random high bits: a restarted router never names a sequence like one its workers still hold.
        self._seq_id_base = secrets.randbits(31) << 32
        self._num_named = 0
        self._num_arrived = 0
        names = self._drafting.names
        cache_source = names.index(CACHE) if CACHE in names else None
        self._sink = GuardedSink(shared.token_sink, self, self.counters, cache_source)
        self.soft_sharing = shared.soft_sharing
        self._round_id = 0
        self._free_blocks = 0
        self._total_blocks = 0
        planner.warm_up()
        learning.warm_up()

    # Requests

    def add(self, request: GenerationRequest, now: float) -> None:
        """Accept a request. Raises InvalidRequest if its prompt leaves no room for a token or its id is in use,
        Overloaded when the waiting queue is full and nothing of the request has been delivered yet."""
        if request.request_id in self._by_request:
            raise InvalidRequest("request_id", request.request_id, "a request with this id is still running")
        num_prompt = len(request.prompt_token_ids)
        if not 1 <= num_prompt < self.max_model_len:
            raise InvalidRequest(
                "prompt",
                f"{num_prompt} tokens",
                f"it must have at least 1 and at most {self.max_model_len - 1} tokens",
                code="context_length_exceeded",
            )
        if request.max_new_tokens < 1:
            raise InvalidRequest("max_tokens", request.max_new_tokens, "it must be at least 1")
        if self._speculation.acceptance == "rejection":
            sampling = msgspec.structs.replace(request.sampling, acceptance="rejection")
            request = msgspec.structs.replace(request, sampling=sampling)
        drafters, wants_draft_model, wants_head, wants_lookahead = self._drafting.sources_of(request)
        most = self._speculation.max_draft_tokens
        sequence = Sequence(
            request,
            seq_id=self._name_sequence(),
            arrival=self._num_arrived,
            now=now,
            max_model_len=self.max_model_len,
            drafts=DraftState(
                cpu=drafters,
                cpu_known=[0] * self._drafting.num_drafters,
                wants_draft_model=wants_draft_model,
                wants_head=wants_head,
                wants_lookahead=wants_lookahead,
                max_tokens=most if request.max_draft_tokens is None else max(0, min(most, request.max_draft_tokens)),
            ),
        )
        try:
            self._scheduler.enqueue(sequence, now)
        except Overloaded:
            self.counters.refused += 1
            raise
        self.counters.requests += 1
        self._num_arrived += 1
        self._by_request[request.request_id] = sequence
        self._by_seq_id[sequence.seq_id] = sequence
        if sequence.deadline is not None:
            self._push_deadline(sequence.deadline, sequence)
        self._sink.follow(request)
        if self.soft_sharing is not None and request.cache != "off":
            self.soft_sharing.follow(request.namespace)
        self._sink.watch(request.namespace)

    def cancel(self, request_id: str) -> bool:
        """The client is gone: the request ends with a "cancelled" chunk and frees its room within one round. False
        if there is no such request any more."""
        sequence = self._by_request.get(request_id)
        if sequence is None:
            return False
        if not sequence.progress.is_cancelled:
            sequence.progress.is_cancelled = True
            if request_id in self._scheduler.waiting:
                self._end_cancelled(sequence, None)  # at once: its place in the queue is free
            else:
                self._cancelled.append(sequence)
        return True

    @property
    def has_work(self) -> bool:
        """Whether `plan_round` has something to do: sequences, undelivered events, or workers to tell of freed ones."""
        return bool(self._by_request or self._events or self._to_free) or self._drafting.has_notices

    @property
    def source_names(self) -> tuple[str, ...]:
        """Who proposes drafts, by source index."""
        return tuple(self._drafting.names)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def target_demand(self, now: float) -> TargetDemand:
        """How long requests wait for their first round, and how much of what the group can hold is in use."""
        used_share = len(self._scheduler.running) / self._config.max_running
        if self._scheduler.running and self._total_blocks:
            used_share = max(used_share, 1.0 - self._free_blocks / self._total_blocks)
        return TargetDemand(self._scheduler.longest_wait_s(now), used_share)

    @property
    def free_blocks(self) -> int:
        """KV blocks the target had free after the last round."""
        return self._free_blocks

    @property
    def total_blocks(self) -> int:
        return self._total_blocks

    def set_draft_workers(self, worker_ids: SequenceOf[str]) -> None:
        """The draft workers that are alive. Sequences of one that is gone move; the others stay where they are."""
        self._drafting.set_workers(worker_ids, self._scheduler.sequences())

    # One round

    def plan_round(self, now: float) -> tuple[Round | None, list[RouterEvent]]:
        """End what is cancelled or late, admit, and decide what the next round computes.

        The round is None when there is nothing to send. It may have no entries and only tell workers to free
        sequences. Raises RuntimeError while another round is open.
        """
        if self._open is not None:
            raise RuntimeError(f"round {self._open.round_id} is open; commit or abandon it first")
        self._end_overdue(now)
        self._scheduler.admit(self._free_blocks)
        entries = self._choose_rows()
        if not entries and not self._to_free and not self._drafting.has_notices:
            return None, self._take_events()
        self._round_id += 1
        num_emitting = sum(entry.emits for entry in entries)
        round = Round(
            self._round_id,
            now,
            entries,
            self._to_free,
            RoundSize(sum(entry.rows for entry in entries), len(self._scheduler.running), num_emitting),
            self._traffic.of(entry.sequence.namespace for entry in entries),
        )
        self._to_free = []
        self._open = round
        self._choice.set_budgets(round)
        self._drafting.ask_workers(round)
        self._drafting.ask_head(round)
        return round, self._take_events()

    def exchange(self, now: float) -> None:
        """Forget what has been purged, take in what other routers have learnt, and give out what this one has. Call it
        between rounds, and now and then while there are none; takes about a millisecond at most, but for a purge."""
        self._sink.forget_ended(sequence.namespace for sequence in self._by_request.values())
        if self.soft_sharing is not None:
            self.soft_sharing.tick(now)

    @property
    def has_exchange(self) -> bool:
        """Whether `exchange` has ever anything to do."""
        return self._sink.is_there or self.soft_sharing is not None

    def drop(self, namespace: str) -> None:
        """Forget all that rounds have taught of a namespace, here and at the draft workers. Call it between rounds."""
        if self.soft_sharing is not None:
            self.soft_sharing.drop(namespace)
        self._drafting.drop(namespace)
        self._choice.drop(namespace)
        self._traffic.drop(namespace)

    def end_overdue(self, now: float) -> list[RouterEvent]:
        """End what is cancelled or late while no round is planned, for want of a target or of its answer.

        May be called at any time; a round whose drafts are being made is not disturbed.
        """
        if self._open is None or self._open.is_assembled:
            self._end_overdue(now)
        return self._take_events()

    def draft_locally(self, round: Round) -> None:
        """Run the CPU drafters, and propose what the target's head has drafted. Whatever one of them does wrong costs
        only its own drafts."""
        self._drafting.draft_locally(round)

    def assemble(self, round: Round, results: Mapping[str, DraftResult | None]) -> VerifyBatch:
        """Merge all drafts, choose the nodes that pay, and write the batch for the target.

        results: what the draft workers answered; None or missing: nothing in time.
        """
        self._drafting.take_results(round, results)
        self._choice.choose(round)
        round.is_assembled = True
        return VerifyBatch(
            round.round_id,
            [self._verify_item(round, entry) for entry in round.entries],
            round.finished,
            self._drafting.num_successors_of(round),
        )

    def commit(self, round: Round, result: VerifyResult, now: float) -> list[RouterEvent]:
        """Take in what the target said: commit and emit tokens, end what has finished, learn.

        A round that is no longer open (abandoned, or its target lost) changes nothing. Raises LinkError when the
        result belongs to another round; the round stays open then.
        """
        if round is not self._open:
            return self._take_events()
        if result.round_id != round.round_id:
            raise LinkError(f"the target answered round {result.round_id}, expected {round.round_id}")
        self._open = None
        self._free_blocks = result.free_blocks
        self._total_blocks = result.total_blocks
        self.counters.rounds += 1
        self.counters.rows += max(0, result.rows)
        self.counters.verify_s += max(0.0, result.elapsed_s)
        self.counters.head_s += max(0.0, result.head_s)
        self.step_times.observe(result.rows, result.elapsed_s)
        verdicts = {verdict.seq_id: verdict for verdict in result.verdicts}
        self.counters.unknown_sequences += len(verdicts.keys() - {entry.seq_id for entry in round.entries})
        stale = set(result.stale_seq_ids)
        starved = set(result.starved_seq_ids)
        hungry: list[RoundEntry] = []
        emitted: list[Emitted] = []
        done: list[Sequence] = []
        for index, entry in enumerate(round.entries):
            sequence = entry.sequence
            if sequence.progress.is_cancelled or sequence.progress.is_ended:
                continue  # nothing comes after a cancellation or an end
            if entry.seq_id in stale:
                self.counters.stale_sequences += 1
                self._restart(sequence, now)
                continue
            if entry.seq_id in starved:
                hungry.append(entry)
                continue
            verdict = verdicts.get(entry.seq_id)
            path = self._valid_path(entry, verdict)
            if verdict is None or path is None:
                self.counters.invalid_verdicts += 1
                self._restart(sequence, now)
                continue
            entry.num_verified = verdict.num_nodes
            self._note_rows(entry, verdict)
            if verdict.next_token < 0:
                self._note_progress(entry, verdict, now)
                continue
            emitted.append(Emitted(index, sequence.num_tokens, path))
            if self._emit(round, entry, path, verdict.next_token, now):
                done.append(sequence)
        verified, accepted = self._choice.learn(round, emitted, result.elapsed_s, result.head_s, now)
        if verified is not None and accepted is not None:
            self.acceptance.observe(verified, accepted)
        self._drafting.tell(round, emitted, verified, accepted)
        self._drafting.take_head_drafts(round, result)
        self._teach(round, result, emitted)
        self._sink.share(round, emitted)
        for sequence in done:
            self.counters.finished += 1
            self._sink.finished(sequence)
            self._release(sequence, now)
        if hungry:
            self._relieve(round, hungry, now)
        return self._take_events()

    def abandon_round(self, round: Round, is_cleared: bool = False) -> None:
        """The target did not answer, or answered with a failure (is_cleared: it has dropped every sequence then).
        Nothing was committed; the next round asks again.

        Whether a target that did not answer took the batch in is unknown: the deltas are sent again as they were, and
        if it did, it answers stale and is sent the sequences from 0.

        A sequence whose rounds fail twice in a row runs alone, without drafts, until it emits a token; if it fails
        twice more, so does its request. The others have every second round meanwhile.
        """
        if round is not self._open:
            return
        self._open = None
        self.counters.abandoned_rounds += 1
        self._to_free = round.finished + self._to_free
        for entry in round.entries:
            entry.sequence.target.known = entry.target_known
        if is_cleared:
            for sequence in self._scheduler.running:
                sequence.target.lost()
        self._blame(round)

    def target_lost(self) -> None:
        """The target is another incarnation, without any KV: every running sequence is sent again from 0. Closes an
        open round, which counts as failed: a request that takes the target down with it must not do so for ever. No
        token is lost or emitted twice, for tokens are committed only here."""
        if self._open is not None:
            self._blame(self._open)
            self._open = None
        self._to_free = []
        self._free_blocks = 0
        for sequence in self._scheduler.running:
            sequence.target.lost()
            sequence.target.is_held = False

    # Planning

    def _name_sequence(self) -> int:
        self._num_named += 1
        return self._seq_id_base + self._num_named

    def _push_deadline(self, deadline: float, sequence: Sequence) -> None:
        if len(self._deadlines) > 64 + 2 * len(self._by_request):
            self._deadlines = [item for item in self._deadlines if not item[2].progress.is_ended]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, sequence.arrival, sequence))

    def _end_cancelled(self, sequence: Sequence, now: float | None) -> None:
        self.counters.cancelled += 1
        self._events.append(
            TokenChunk(
                request_id=sequence.request_id,
                index=sequence.progress.chunk_index,
                token_ids=(),
                finish_reason="cancelled",
                stats=sequence.progress.stats,
            )
        )
        self._release(sequence, now)

    def _end_overdue(self, now: float) -> None:
        for sequence in self._cancelled:
            if not sequence.progress.is_ended:
                self._end_cancelled(sequence, now)
        self._cancelled.clear()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].progress.is_ended):
            sequence = heapq.heappop(self._deadlines)[2]
            if not sequence.progress.is_ended:
                timeout_s = sequence.request.timeout_s
                self._fail(sequence, DeadlineExceeded(f"the request's {timeout_s:g} s passed before it finished"), now)

    def _in_turn(self) -> list[Sequence]:
        """The running sequences; but while there are suspects, the oldest of them and all others take turns."""
        running = self._scheduler.running
        suspects = [sequence for sequence in running if sequence.target.num_failed_rounds >= _SUSPICIOUS_ROUNDS]
        if not suspects:
            return running
        others = [sequence for sequence in running if sequence.target.num_failed_rounds < _SUSPICIOUS_ROUNDS]
        return others if others and self._round_id % 2 else suspects[:1]

    def _choose_rows(self) -> list[RoundEntry]:
        """Every decoding sequence, and as much of the prompts as the round's share allows."""
        running = self._in_turn()
        prompts = [sequence for sequence in running if sequence.num_uncomputed > 1]
        shares = share_prompt_rows([sequence.num_uncomputed for sequence in prompts], self._config.max_prefill_rows)
        rows_of = dict(zip((sequence.seq_id for sequence in prompts), shares, strict=True))
        entries = []
        for sequence in running:
            rows = rows_of.get(sequence.seq_id, 1)
            if rows:
                entries.append(
                    RoundEntry(
                        sequence,
                        sequence.seq_id,
                        sequence.num_tokens,
                        rows,
                        emits=rows == sequence.num_uncomputed,
                        is_coupled=sequence.begin.sampling.acceptance != "rejection",
                        target_known=sequence.target.known,
                    )
                )
        return entries

    def _verify_item(self, round: Round, entry: RoundEntry) -> VerifyItem:
        sequence = entry.sequence
        start = sequence.target.known
        if start == 0 and sequence.progress.started_at is None:
            sequence.progress.started_at = round.planned_at
        delta = SequenceDelta(entry.seq_id, start, sequence.tokens(start))
        sequence.target.known = sequence.num_tokens
        sequence.target.is_held = True
        return VerifyItem(
            delta,
            entry.rows,
            entry.tree if len(entry.tree) else None,
            sequence.begin if start == 0 else None,
            entry.head_nodes,
        )

    # Committing

    def _valid_path(self, entry: RoundEntry, verdict: Verdict | None) -> list[int] | None:
        """The accepted nodes if the verdict can be true, else None."""
        if verdict is None or verdict.next_token < -1 or verdict.next_token >= self._vocab_size:
            return None
        if verdict.path.dtype.kind != "i" or verdict.path.ndim != 1:
            return None
        path: list[int] = verdict.path.tolist()
        if verdict.next_token < 0:
            return None if path or not 0 <= verdict.num_computed < entry.num_tokens else path
        if not 0 <= verdict.num_nodes <= len(entry.tree):
            return None
        if path:
            parents = entry.tree.parents[: verdict.num_nodes].tolist()
            previous = -1
            for node in path:
                if not previous < node < len(parents) or parents[node] != previous:
                    return None
                previous = node
        return path

    def _note_rows(self, entry: RoundEntry, verdict: Verdict) -> None:
        sequence = entry.sequence
        sequence.progress.stats.target_rows += max(0, verdict.rows)
        if entry.target_known == 0 and sequence.progress.chunk_index == 0:
            sequence.target.num_cached = min(max(0, verdict.num_cached), sequence.num_prompt)

    def _note_progress(self, entry: RoundEntry, verdict: Verdict, now: float) -> None:
        sequence = entry.sequence
        has_progressed = verdict.num_computed > sequence.target.num_computed
        sequence.target.num_computed = verdict.num_computed
        if verdict.num_computed > sequence.target.most_computed:
            # Computing again what a failed round has lost says nothing of the rows that failed.
            sequence.target.most_computed = verdict.num_computed
            sequence.target.num_failed_rounds = 0
        if has_progressed:
            sequence.target.num_setbacks = 0
        else:
            self._set_back(sequence, now)

    def _emit(self, round: Round, entry: RoundEntry, path: list[int], next_token: int, now: float) -> bool:
        """Commit a round's tokens and queue their chunk; True when the sequence has finished.

        A stop token ends the sequence and is not part of its tokens; nothing after it is.
        """
        sequence = entry.sequence
        stats = sequence.progress.stats
        tokens: list[int] = entry.tree.token_ids[path].tolist() if path else []
        sources = self._credits(round, entry, path)
        tokens.append(next_token)
        sources.append(TARGET)
        if sequence.progress.chunk_index == 0 and sequence.progress.started_at is not None:
            self.counters.queue_time.add(sequence.progress.started_at - sequence.progress.arrived_at)
            self.counters.prefill_time.add(now - sequence.progress.started_at)
        finish: Literal["stop", "length"] | None = None
        if not sequence.stop_tokens.isdisjoint(tokens):
            end = next(index for index, token in enumerate(tokens) if token in sequence.stop_tokens)
            if end < sequence.num_left:
                finish = "stop"
                del tokens[end:], sources[end:]
        if finish is None and len(tokens) >= sequence.num_left:
            finish = "length"
            del tokens[sequence.num_left :], sources[sequence.num_left :]
        sequence.append(tokens)
        sequence.target.num_computed = entry.num_tokens + len(path)
        sequence.target.most_computed = max(sequence.target.most_computed, sequence.target.num_computed)
        sequence.target.num_setbacks = sequence.target.num_failed_rounds = 0
        stats.rounds += 1
        stats.draft_tokens += entry.num_verified
        for source in sources:
            if source is not TARGET:
                stats.accepted_tokens[source] = stats.accepted_tokens.get(source, 0) + 1
                self.counters.accepted_tokens[source] += 1
        if sequence.progress.times is not None:
            _note_times(sequence, sequence.progress.times, round, entry, len(tokens), now)
        self.counters.draft_tokens += entry.num_verified
        self.counters.emitted_tokens += len(tokens)
        self._events.append(
            TokenChunk(
                request_id=sequence.request_id,
                index=sequence.progress.chunk_index,
                token_ids=tuple(tokens),
                finish_reason=finish,
                sources=tuple(sources),
                num_cached_tokens=sequence.target.num_cached if sequence.progress.chunk_index == 0 else 0,
                stats=_snapshot(stats) if finish or sequence.request.wants_stats else None,
                times=sequence.progress.times if finish or sequence.request.wants_stats else None,
            )
        )
        sequence.progress.chunk_index += 1
        return finish is not None

    def _teach(self, round: Round, result: VerifyResult, emitted: list[Emitted]) -> None:
        """Let drafters and draft workers learn from every row the target computed, and drafters from prompts that are
        done."""
        if not self._drafting.num_successors_of(round):
            return
        count = self._drafting.num_successors
        entries = [round.entries[index] for index, _, _ in emitted]
        if count:
            self._teach_prompts([entry.sequence for entry in entries], count)
        successors = successors_of(result, self._vocab_size)
        if successors is None:
            self.counters.invalid_successors += result.successors is not None
            return
        self._drafting.keep_corrections(entries, result, successors[0])
        if count:
            for rows in rows_of_round(round, result, entries, *successors, self._shares_prompts):
                self._drafting.teach(rows)

    def _teach_prompts(self, sequences: list[Sequence], count: int) -> None:
        """A part of a long prompt each round, while its sequence runs; sequences with the same prompt share the work.
        count: successors of a row."""
        left, shares_prompts = _MAX_TAUGHT_ROWS, self._shares_prompts
        for sequence in sequences:
            last = sequence.num_prompt - 1
            if sequence.drafts.num_taught >= last or not left:
                continue
            begin = max(other.drafts.num_taught for other in self._scheduler.running if other.has_prompt_of(sequence))
            end = min(last, begin + left)
            sequence.drafts.num_taught = end
            if begin < end:
                prompt = sequence.tokens()[: sequence.num_prompt]
                may_share = shares_prompts and sequence.request.cache == "read_write"
                self._drafting.teach(
                    rows_of_prompt(sequence.namespace, sequence.seq_id, prompt, count, begin, end, may_share)
                )
                left -= end - begin

    @property
    def _shares_prompts(self) -> bool:
        return self.soft_sharing is not None and self.soft_sharing.shares_prompts

    def _credits(self, round: Round, entry: RoundEntry, path: list[int]) -> list[str]:
        """Who was most sure of each accepted node."""
        if not path:
            return []
        if entry.num_chain:
            return [DRAFT_MODEL] * len(path)
        assert round.chosen is not None
        best = round.chosen.forest.best_source[entry.node_start : entry.node_end]
        return [self._drafting.names[source] for source in best[path].tolist()]

    def _relieve(self, round: Round, hungry: list[RoundEntry], now: float) -> None:
        """The target lacks blocks for these: first they go without drafts, then the youngest sequence makes room.

        The oldest sequence is never preempted while another runs, so it gets all blocks in the end: no livelock. A
        sequence that is longer than all blocks can never finish and fails. One that is alone, lacks blocks and would
        fit waits: they are held for a router that is gone, and the target frees them after a while.
        """
        self.counters.starved += len(hungry)
        needs_room = False
        for entry in hungry:
            entry.sequence.drafts.from_round = round.round_id + _DRAFTLESS_ROUNDS
            needs_room |= not len(entry.tree)
            # The target left the sequence as it was.
            entry.sequence.target.known = entry.target_known
        if not needs_room:
            return
        self._scheduler.feel_pressure()
        running = self._scheduler.running
        if len(running) > 1:
            victim = self._scheduler.preempt_youngest()
            self.counters.preempted += 1
            self._forget(victim)
            victim.rename(self._name_sequence())
            self._by_seq_id[victim.seq_id] = victim
            return
        room = self._total_blocks * self._block_size
        if running and round.size.num_running == 1 and running[0].num_tokens > room:
            self._fail(
                running[0],
                InvalidRequest(
                    "prompt",
                    f"{running[0].num_tokens} tokens with its output",
                    f"the target's KV cache holds {room} tokens",
                    code="context_length_exceeded",
                ),
                now,
            )

    def _restart(self, sequence: Sequence, now: float) -> None:
        sequence.target.lost()
        self._set_back(sequence, now)

    def _set_back(self, sequence: Sequence, now: float) -> None:
        sequence.target.num_setbacks += 1
        if sequence.target.num_setbacks >= _MAX_SETBACKS and not sequence.progress.is_ended:
            error = Unavailable(f"the target made no progress on the request in {_MAX_SETBACKS} rounds")
            self._fail(sequence, error, now)

    def _blame(self, round: Round) -> None:
        """The round failed, by the doing of one of its sequences or of none."""
        for entry in round.entries:
            sequence = entry.sequence
            sequence.target.num_failed_rounds += 1
            if sequence.target.num_failed_rounds >= _SUSPICIOUS_ROUNDS:
                sequence.drafts.from_round = round.round_id + _DRAFTLESS_ROUNDS
            if (
                sequence.target.num_failed_rounds >= _GIVEN_UP_ROUNDS
                and not sequence.progress.is_ended
                and not sequence.progress.is_cancelled
            ):
                reason = f"{_GIVEN_UP_ROUNDS} rounds of the request failed in a row, the last of them with it alone"
                self._fail(sequence, ModelError(reason), round.planned_at)

    def _fail(self, sequence: Sequence, error: PacelineError, now: float) -> None:
        self.counters.failed += 1
        self._events.append(RequestFailed(sequence.request_id, error))
        self._release(sequence, now)

    def _release(self, sequence: Sequence, now: float | None) -> None:
        """Forget an ended sequence here and, with the next batches, at every worker."""
        sequence.progress.is_ended = True
        del self._by_request[sequence.request_id]
        self._scheduler.remove(sequence, now)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._by_seq_id.pop(sequence.seq_id, None)
        if sequence.target.is_held:
            self._to_free.append(sequence.seq_id)
            sequence.target.is_held = False
        self._drafting.forget(sequence)

    def _take_events(self) -> list[RouterEvent]:
        events, self._events = self._events, []
        return events


def _note_times(
    sequence: Sequence, times: RequestTimes, round: Round, entry: RoundEntry, num_tokens: int, now: float
) -> None:
    """Of a round that emits tokens of the sequence; the one of its first token is the end of the prefill."""
    arrived_at = sequence.progress.arrived_at
    times.ended_s = now - arrived_at
    if sequence.progress.chunk_index == 0:
        times.started_s = (sequence.progress.started_at or arrived_at) - arrived_at
        times.first_token_s = times.ended_s
        return
    drafted_at = round.assembled_at or round.planned_at
    times.draft_s += drafted_at - round.planned_at
    times.verify_s += now - drafted_at
    if len(times.rounds) < sequence.request.timed_rounds:
        planned_s, drafted_s = round.planned_at - arrived_at, drafted_at - arrived_at
        times.rounds.append(RoundTimes(planned_s, drafted_s, times.ended_s, num_tokens, entry.num_verified))


def _snapshot(stats: SpeculationStats) -> SpeculationStats:
    return msgspec.structs.replace(stats, accepted_tokens=dict(stats.accepted_tokens))

"""The router core: decides what each round asks of drafters and target, and which tokens are committed.

No I/O, clock or threads: callers pass the time in and carry the messages. A round calls `plan_round`, `draft_locally`,
`assemble` and `commit`; requests may come and be cancelled at any moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from types import MappingProxyType

import msgspec

from actors.drafters.contract import CpuDrafter
from actors.drafters.registry import CACHE, OUROBOROS
from actors.errors import LinkError, ModelError, ObjectiveUnreachable, Overloaded
from actors.grammar.matcher import GrammarMatcher
from actors.messages import (
    DraftResult,
    GenerationRequest,
    RoundMasks,
    SequenceDelta,
    TokenMasks,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    WorkerInfo,
)
from actors.pool_names import FIRST_POOL
from actors.workers.demand import TargetDemand
from cache_service.automata.shared_phrases import SharedPhrases
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router import draft_depth, learning, planner
from cluster.router.acceptance_watch import AcceptanceWatch
from cluster.router.counters import RouterCounters
from cluster.router.cpu_drafting import CpuDrafting, check_required_rows
from cluster.router.draft_budget import USUAL_DRAFT_ROWS, most_draft_rows
from cluster.router.draft_choice import ChoiceLimits, DraftChoice
from cluster.router.draft_pools import DraftPools
from cluster.router.draft_scaling import DraftScaling
from cluster.router.draft_sources import DraftSources
from cluster.router.drafting import Drafting
from cluster.router.failed_rounds import GIVEN_UP_AFTER, count_failed_round, sequences_in_turn
from cluster.router.guarded_sink import GuardedSink, SharedLearning
from cluster.router.head_drafting import HeadDrafting
from cluster.router.load import AnswerCosts, router_load
from cluster.router.objective_scheduler import ObjectiveScheduler
from cluster.router.objectives import is_within
from cluster.router.open_requests import OpenRequests
from cluster.router.prefill_budget import PromptRound, next_prefill_rows, prefill_rows, prompt_round, rows_within
from cluster.router.proposals import Proposals
from cluster.router.round import Emitted, Round, RoundEntry, RoundSize, RouterEvent
from cluster.router.scheduler import Scheduler, plan_entries
from cluster.router.sending_ahead import SendingAhead
from cluster.router.sequence import DraftState, PoolState, Sequence
from cluster.router.step_time import StepTimeCurve
from cluster.router.target_blocks import TargetBlocks
from cluster.router.teaching import Teaching
from cluster.router.traffic import TrafficRecords
from cluster.router.verdicts import Verdicts
from cluster.router.worker_drafting import DraftShape, WorkerDrafting
from cluster.routing.router_load import RouterLoad

_ONE_POOL = MappingProxyType({FIRST_POOL: DraftShape()})
_NOTHING_SHARED = SharedLearning()


class RouterCore:
    """Owns every sequence of one target group. Tokens are committed only here; workers hold copies.

    Each accepted request ends exactly once: with a chunk that has a finish reason, or with a `RequestFailed`. Both are
    events that `plan_round`, `commit` and `end_overdue` return in order.

    `drafters` are the CPU drafters by name. `draft_shapes` names the pools of draft workers, one for each draft model,
    the first one "draft". `set_draft_workers` connects a pool: the first one is the sources "draft_model" and, where it
    is configured, "ouroboros", a pool X beside it the source "draft_model.X". A target with an EAGLE or MTP
    head is also the source "eagle". seq_id_base: ids of sequences follow it; None: drawn at random, so that no
    worker takes them for those of a router before this one. Raises InvalidRequest for drafters that require more rows
    than a round may have.
    """

    def __init__(
        self,
        target: WorkerInfo,
        config: RouterConfig,
        speculation: SpeculationConfig,
        drafters: Mapping[str, CpuDrafter],
        *,
        draft_shapes: Mapping[str, DraftShape] = _ONE_POOL,
        shared: SharedLearning = _NOTHING_SHARED,
        seq_id_base: int | None = None,
    ) -> None:
        check_required_rows(drafters.values(), speculation.max_rows or USUAL_DRAFT_ROWS, speculation.acceptance)
        self.counters = RouterCounters()
        self.step_times = StepTimeCurve(target.step_times, target.row_steps)
        self._config = config
        self._speculation = speculation
        self.max_model_len = target.max_model_len  # for new requests; a new incarnation of the target may have another
        self.draft_scaling = {pool: DraftScaling() for pool in draft_shapes}
        self._traffic = TrafficRecords(len(draft_shapes))
        self._sources = DraftSources(drafters, speculation.drafters, target.has_head, tuple(draft_shapes))
        self.source_names = names = self._sources.names  # who proposes drafts, by source index
        proposals = Proposals(names, target.vocab_size, self.counters)
        cache = shared.token_sink
        phrases = SharedPhrases(cache.index) if cache is not None and OUROBOROS in names else None
        sequences: dict[int, Sequence] = {}
        pools = {
            pool: WorkerDrafting(
                replace(shape, branch=1) if target.chain_only else shape,
                sequences,
                pool=index,
                names=names,
                proposals=proposals,
                counters=self.counters,
                phrases=phrases,
                scaling=self.draft_scaling[pool],
            )
            for index, (pool, shape) in enumerate(draft_shapes.items())
        }
        cpu = CpuDrafting(drafters, proposals, self.counters)
        self._drafting = Drafting(cpu, HeadDrafting(proposals), DraftPools(pools, self._traffic))
        self.acceptance = AcceptanceWatch(names)
        self._choice = DraftChoice(
            self._sources,
            ChoiceLimits(
                speculation.max_rows,
                most_draft_rows(config, speculation),
                config.max_running,
                target.vocab_size,
                target.chain_only,
            ),
            step_times=self.step_times,
            counters=self.counters,
            most_required=cpu.most_required,
            scalings=tuple(self.draft_scaling.values()),
        )
        self._scheduler = (
            ObjectiveScheduler(config, target.block_size, self.step_times)
            if config.objectives.are_set
            else Scheduler(config, target.block_size)
        )
        self._requests = OpenRequests(
            self._scheduler, self.counters, sequences, self._drafting.forget, seq_id_base=seq_id_base
        )
        self._verdicts = Verdicts(self._requests, self.counters, names, target.vocab_size)
        self._costs = AnswerCosts(self.counters)
        self._has_prefix_cache = target.has_prefix_cache
        self.blocks = TargetBlocks(target.block_size, self._scheduler, self._requests)
        self._teaching = Teaching(self._drafting, self._scheduler, shared, target.vocab_size)
        self.ahead = SendingAhead(
            "off" if target.chain_only else config.send_ahead,  # what is sent ahead is a tree of what may follow
            choice=self._choice,
            counters=self.counters,
            drafting=self._drafting,
            requests=self._requests,
            scheduler=self._scheduler,
        )
        self._sink = GuardedSink(
            shared.token_sink, self, self.counters, cache_source=names.index(CACHE) if CACHE in names else None
        )
        self.soft_sharing = shared.soft_sharing
        self._open: Round | None = None
        self._assembled: Round | None = None  # the last one
        self._prompts: PromptRound | None = None  # of the last round; None: it had none
        self._round_id = 0
        planner.warm_up()
        learning.warm_up()
        draft_depth.warm_up()

    # Requests

    def add(self, request: GenerationRequest, now: float, grammar: GrammarMatcher | None = None) -> None:
        """Accept a request. grammar: of `request.grammar`, at the beginning of the answer; None: it has none.

        Raises InvalidRequest if its prompt leaves no room for a token or its id is in use, Overloaded when the waiting
        queue is full and nothing of the request has been delivered yet."""
        self._requests.check(request, self.max_model_len)
        assert (grammar is None) == (not request.grammar)
        if self._speculation.acceptance == "rejection":
            sampling = msgspec.structs.replace(request.sampling, acceptance="rejection")
            request = msgspec.structs.replace(request, sampling=sampling)
        sequence = Sequence(
            request,
            seq_id=self._requests.new_seq_id(),
            arrival=self._requests.num_arrived,
            now=now,
            max_model_len=self.max_model_len,
            drafts=self._draft_state(request),
            grammar=grammar,
        )
        try:
            self._scheduler.enqueue(sequence, now)
        except Overloaded as error:
            if not request.asks_another:
                self.counters.refused += 1
                self.counters.unreachable[request.service_class] += isinstance(error, ObjectiveUnreachable)
            raise
        self._requests.open(sequence)
        self._sink.follow(request)
        if self.soft_sharing is not None and request.cache != "off":
            self.soft_sharing.follow(request.namespace)
        self._sink.watch(request.namespace)

    def cancel(self, request_id: str) -> bool:
        """The request ends with a "cancelled" chunk and frees its room within one round. False if it is not open any
        more."""
        return self._requests.cancel(request_id)

    def _draft_state(self, request: GenerationRequest) -> DraftState:
        most = self._speculation.max_draft_tokens
        allowed = self._sources.allowed(request)
        return DraftState(
            sources=replace(allowed, cpu=self._drafting.cpu.that_may_draft_for(request, allowed.cpu)),
            cpu_known=[0] * self._sources.num_cpu,
            max_tokens=most if request.max_draft_tokens is None else max(0, min(most, request.max_draft_tokens)),
            pools={source.pool: PoolState(source) for source in allowed.workers},
        )

    @property
    def has_work(self) -> bool:
        """Whether `plan_round` has something to do: sequences, undelivered events, or workers to notify."""
        return self._requests.has_work or self._drafting.remote.has_notices

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def target_demand(self, now: float) -> TargetDemand:
        """The longest wait for a first round, and the used share of the group's places or KV blocks."""
        used_share = self.num_running / self._config.max_running
        if self.num_running:
            used_share = max(used_share, self.blocks.used_share)
        return TargetDemand(self._scheduler.longest_wait_s(now), used_share)

    def load(self) -> RouterLoad:
        """Call it several times a second: it measures what requests cost between calls."""
        num_running, num_places = self.num_running, self._config.max_running
        self._costs.observe(self._requests.num_arrived - len(self._requests.by_id))
        rows = prefill_rows(self.step_times, num_running, self._config.max_prefill_rows)
        sequences = self._scheduler.sequences()
        return router_load(sequences, num_running, num_places, self.step_times, self._costs, rows)

    @property
    def prefix_cache_tokens(self) -> int:
        """Capacity of the target's prefix cache; 0: it has none, or has not answered yet."""
        return self.blocks.num_tokens if self._has_prefix_cache else 0

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools of draft workers, by index."""
        return self._drafting.remote.names

    def set_draft_workers(self, workers: Mapping[str, str] | Iterable[str], pool: str = FIRST_POOL) -> None:
        """The connected draft workers of a pool, with the model that each runs, if it is known. Sequences of a lost
        worker move; the others stay where they are.

        Where the models are others than before, what was learnt of the pool's drafts is dropped.
        """
        models = workers if isinstance(workers, Mapping) else dict.fromkeys(workers, "")
        if self._drafting.remote.set_workers(pool, models, self._scheduler.sequences()):
            index = self.pools.index(pool)
            self._choice.forget_pool(index)
            self._traffic.forget_pool(index)
            for source in self._sources.of_pools[index]:
                self.acceptance.forget(source)

    # One round

    def plan_round(self, now: float) -> tuple[Round | None, list[RouterEvent]]:
        """End cancelled and overdue requests, admit waiting ones, and plan what the next round computes.

        The round is None when there is nothing to send. It may have no entries and only tell workers to free sequences.
        Raises RuntimeError while another round is open.
        """
        if self._open is not None:
            raise RuntimeError(f"round {self._open.round_id} is open; commit or abandon it first")
        self._requests.end_overdue(now)
        self._scheduler.admit(self.blocks.free, now)
        limit_s = self._scheduler.round_limit_s(now)
        taking_part = self._scheduler.taking_part(limit_s)
        running = sequences_in_turn(taking_part, self._round_id)
        entries = plan_entries(running, self._most_prefill_rows(running, limit_s), self._scheduler.gives_way)
        if not entries:
            self.ahead.pause()
        if not entries and not self._requests.to_free and not self._drafting.remote.has_notices:
            return None, self._requests.take_events()
        self._round_id += 1
        num_emitting = sum(entry.emits for entry in entries)
        round = Round(
            self._round_id,
            now,
            entries,
            finished=self._requests.take_to_free(),
            size=RoundSize(sum(entry.rows for entry in entries), len(taking_part), num_emitting),
            traffic=self._traffic.of(entry.sequence.namespace for entry in entries),
        )
        self._open = round
        self._choice.set_budgets(round)
        self._drafting.remote.ask(round, self._choice.costs_of_drafts)
        self._drafting.head.ask(round, self._choice.costs_of_next_drafts)
        return round, self._requests.take_events()

    def _most_prefill_rows(self, sequences: SequenceOf[Sequence], limit_s: float) -> int:
        decoding = sum(sequence.num_uncomputed <= 1 for sequence in sequences)
        if decoding == len(sequences):
            return 0
        rows = next_prefill_rows(self.step_times, decoding, self._config.max_prefill_rows, self._prompts)
        return rows_within(self.step_times, decoding, rows, limit_s)

    def exchange(self, now: float) -> None:
        """Drop purged namespaces, and exchange what was learnt with other routers. Call it between rounds, and
        periodically while there are none. Takes about a millisecond at most, except after a purge."""
        self._sink.forget_ended(sequence.namespace for sequence in self._requests.by_id.values())
        if self.soft_sharing is not None:
            self.soft_sharing.tick(now)

    @property
    def has_exchange(self) -> bool:
        """Whether `exchange` can ever do anything."""
        return self._sink.is_there or self.soft_sharing is not None

    def drop(self, namespace: str) -> None:
        """Drop what rounds have taught of a namespace, here and at the draft workers. Call it between rounds."""
        if self.soft_sharing is not None:
            self.soft_sharing.drop(namespace)
        self._drafting.drop_namespace(namespace)
        self._choice.drop(namespace)
        self._traffic.drop(namespace)

    def end_overdue(self, now: float) -> list[RouterEvent]:
        """End cancelled and overdue requests while no round is planned, because the target is missing or has not
        answered.

        May be called at any time; a round whose drafts are being made is not disturbed.
        """
        if self._open is None or self._open.is_assembled:
            self._requests.end_overdue(now)
        return self._requests.take_events()

    def draft_locally(self, round: Round) -> None:
        """Run the CPU drafters, and propose the trees of the target's head. Errors cost only the drafts concerned."""
        self._drafting.head.propose(round)
        self._drafting.cpu.propose(round)

    def assemble(self, round: Round, results: Mapping[str, DraftResult | None]) -> VerifyBatch:
        """Merge all drafts, choose the nodes that pay, and write the batch for the target. If masks follow it, `masks`
        gives them.

        results: by draft worker; None or missing: no answer in time.
        """
        self._drafting.remote.take_results(round, results)
        self._choice.choose(round)
        round.is_assembled = True
        self._assembled = round
        return VerifyBatch(
            round.round_id,
            [_verify_item(round, entry) for entry in round.entries],
            round.finished,
            self._drafting.num_successors_of(round),
            masks_follow=any(entry.is_masked for entry in round.entries),
        )

    def masks(self) -> RoundMasks:
        """The masks of the batch that was assembled last. To be called before its round is committed, while the target
        computes the rows."""
        round = self._assembled
        assert round is not None
        masks: list[TokenMasks | None] = []
        for entry in round.entries:
            found = entry.sequence.grammar.masks(entry.tree) if entry.is_masked and entry.sequence.grammar else None
            masks.append(None if found is None else found.masks)
            entry.num_unmasked = 0 if found is None else found.num_unmasked
        return RoundMasks(round.round_id, masks)

    def plan_ahead(self, round: Round, now: float) -> VerifyAhead | None:
        """While the target computes this round: the message that sends the next one ahead, or None if the next one is
        planned when this one is done."""
        if round is not self._open or not round.is_assembled:
            return None
        self._requests.end_overdue(now)
        message = self.ahead.plan(round, self._round_id + 1, now)
        if message is not None:
            self._round_id = message.round_id
        return message

    def begin_ahead(self, batch: VerifyBatch, result: VerifyResult, now: float) -> tuple[Round, VerifyBatch] | None:
        """Open the round that was sent ahead behind `batch`, whose result has been committed; the target computes it
        already. Returns the round and its batch; None: there is none, or the target has declined it."""
        if self._open is not None:
            return None
        begun = self.ahead.begin(batch, result, now)
        if begun is not None:
            self._open = begun[0]
        return begun

    def commit(self, round: Round, result: VerifyResult, now: float) -> list[RouterEvent]:
        """Commit and emit the target's tokens, end finished requests, learn from the round.

        A round that is no longer open (abandoned, or its target lost) changes nothing. Raises LinkError when the result
        belongs to another round; the round stays open then.
        """
        if round is not self._open:
            return self._requests.take_events()
        if result.round_id != round.round_id:
            raise LinkError(f"the target answered round {result.round_id}, expected {round.round_id}")
        self._open = None
        self.blocks.observe(result)
        self.counters.count_round(result)
        if not result.is_new_shape:
            self.step_times.observe(result.rows, result.elapsed_s)
        self._prompts = prompt_round(round.entries, result)
        taken = self._verdicts.take(round, result, now)
        self._learn(round, result, taken.emitted, now)
        self.ahead.observe(round, result, taken.emitted, now)
        for sequence in taken.finished:
            self._count_answer(sequence, now)
            self._sink.finished(sequence)
            self._requests.release(sequence, now)
        if taken.starved:
            self.blocks.handle_out_of_blocks(round, taken.starved, now)
        return self._requests.take_events()

    def abandon_round(self, round: Round, is_cleared: bool = False, is_declined: bool = False) -> None:
        """The target did not answer, or failed (is_cleared: it has dropped every sequence), or has declined a round
        that was sent ahead, which says nothing against its sequences. Nothing is committed.

        Whether a silent target received the batch is unknown, so the next round sends the same deltas again. If it did
        receive them, it answers stale and is sent the sequences from 0. `failed_rounds` treats sequences whose rounds
        keep failing.
        """
        if round is not self._open:
            return
        self._open = None
        self.ahead.drop()
        self.ahead.pause()
        self.counters.abandoned_rounds += 1
        self._requests.to_free = round.finished + self._requests.to_free
        for entry in round.entries:
            entry.sequence.target.known = entry.target_known
        if is_cleared:
            for sequence in self._scheduler.held:
                sequence.target.lost()
        if not is_declined:
            self._count_failure(round)

    def target_lost(self) -> None:
        """The target is a new incarnation without any KV: every running sequence is sent again from 0.

        An open round is closed and counts as failed, so that a request that crashes its target is given up in the end.
        No token is lost or emitted twice: tokens are committed only here.
        """
        if self._open is not None:
            self._count_failure(self._open)
            self._open = None
        self.ahead.drop()
        self.ahead.pause()
        self._requests.to_free = []
        self.blocks.free = 0
        for sequence in self._scheduler.held:
            sequence.target.lost()
            sequence.target.is_held = False

    def _learn(self, round: Round, result: VerifyResult, emitted: list[Emitted], now: float) -> None:
        self._drafting.head.note_shape(round, result)
        verified, accepted = self._choice.learn(
            round, emitted, verify_s=result.elapsed_s, head_s=result.head_s, now=now
        )
        if verified is not None and accepted is not None:
            self.acceptance.observe(verified, accepted)
        self._drafting.cpu.observe(round, emitted, verified, accepted)
        self._drafting.remote.observe(round, emitted)
        self._drafting.head.observe(round, emitted, result)
        self._teaching.teach(round, result, emitted)
        self._sink.share(round, emitted)

    def _count_answer(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if request.num_output_in_prompt:
            return  # when its first token came, the router before knew
        self.counters.answers[request.service_class] += 1
        if is_within(self._config.objectives.of(request.service_class), sequence, now):
            self.counters.good_answers[request.service_class] += 1

    def _count_failure(self, round: Round) -> None:
        for sequence in count_failed_round(round):
            reason = f"{GIVEN_UP_AFTER} rounds of the request failed in a row, the last of them with it alone"
            self._requests.fail(sequence, ModelError(reason), round.planned_at)


def _verify_item(round: Round, entry: RoundEntry) -> VerifyItem:
    """The sequence's draft tree and the tokens that the target lacks, which count as sent from now on."""
    sequence = entry.sequence
    start = sequence.target.known
    # Prompts are masked, too, where the target may be done sooner than was planned: with blocks of its prefix cache, or
    # because it has carried out a round that failed here.
    may_emit = entry.emits or start == 0 or sequence.target.num_failed_rounds > 0
    entry.is_masked = sequence.grammar is not None and may_emit
    if start == 0 and sequence.progress.started_at is None:
        sequence.progress.started_at = round.planned_at
    delta = SequenceDelta(entry.seq_id, start, sequence.tokens(start))
    sequence.target.known = sequence.num_tokens
    sequence.target.is_held = True
    return VerifyItem(
        delta,
        entry.rows,
        draft=entry.tree if len(entry.tree.token_ids) else None,
        begin=sequence.begin if start == 0 else None,
        head_nodes=entry.head_nodes,
        head_min_confidence=round.asked.head_min_confidence,
        head_worth=round.asked.head_worth,
        head_levels=round.asked.head_levels,
    )

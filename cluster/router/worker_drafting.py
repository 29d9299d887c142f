"""Drafts of the draft workers: what to ask for, what to send along, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import DraftItem, DraftResult, SequenceDelta, VerifyResult, no_tokens
from cache_service.automata.shared_phrases import SharedPhrases
from cluster.router.counters import RouterCounters
from cluster.router.discarded import discarded_texts
from cluster.router.draft_depth import num_levels
from cluster.router.draft_scaling import DraftScaling
from cluster.router.draft_workers import DraftWorkers
from cluster.router.learning import first_rows_of
from cluster.router.proposals import Proposals
from cluster.router.round import Emitted, Round, RoundEntry
from cluster.router.sequence import Sequence

_CONTEXT_TOKENS = 16  # last tokens of a sequence that are looked up in the shared cache for a draft worker
_MAX_RUNS = 4  # phrases of the shared cache sent with one item


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Shape of the draft model's trees."""

    gamma: int = 4  # depth
    branch: int = 1  # guesses for each next token


class WorkerDrafting:
    def __init__(
        self,
        shape: DraftShape,
        sequences: Mapping[int, Sequence],
        workers: DraftWorkers,
        *,
        names: SequenceOf[str],
        proposals: Proposals,
        counters: RouterCounters,
        phrases: SharedPhrases | None,
        scaling: DraftScaling,
    ) -> None:
        """sequences: the router's own by id, a mapping that changes with it; names: source names by index; phrases: of
        the shared cache, for ouroboros; scaling: records how workers answer."""
        self._shape = shape
        self._sequences = sequences
        self._names = names
        self._proposals = proposals
        self._counters = counters
        self._phrases = phrases
        self._scaling = scaling
        self._workers = workers

    def ask(self, round: Round, row_price: Callable[[Round], float]) -> None:
        """Write draft batches for the sequences that emit, if waiting pays. Workers that the round does not wait for
        receive prompts of sequences that do not emit yet. row_price: the probability from which a node pays."""
        items: dict[str, list[DraftItem]] = {}
        if len(self._workers):
            asking = [
                (entry, worker_id)
                for entry in round.entries
                if entry.max_nodes
                and entry.sequence.drafts.sources.worker is not None
                and (worker_id := self._workers.worker_for(entry.sequence, round.round_id)) is not None
            ]
            if asking and round.traffic.draft_wait.pays(round.size.num_emitting):
                tokens_per_s = round.traffic.draft_wait.tokens_per_s(round.size.num_emitting) or 0.0
                min_confidence = round.traffic.depth.min_confidence(tokens_per_s, len(asking), row_price(round))
                for entry, worker_id in asking:
                    entry.draft_worker = worker_id
                    runs = self._runs(entry.sequence)
                    item = self._item(entry.sequence, self._max_nodes(entry), runs, min_confidence)
                    items.setdefault(worker_id, []).append(item)
                round.asked.draft_model = True
                round.asked.awaited = tuple(items)
                round.asked.num_workers = len(self._workers)
            seems_to_pay = round.traffic.draft_wait.seems_to_pay
            if round.asked.draft_model or (not asking and seems_to_pay(round.size.num_running)):
                self._send_prompts_ahead(round, items)
        round.asked.batches = self._workers.batches(items, round.round_id, is_idle=not round.entries)

    def _item(self, sequence: Sequence, max_nodes: int, runs: np.ndarray, min_confidence: float = 0.0) -> DraftItem:
        """An item with the tokens that the sequence's worker lacks, which count as sent from now on."""
        drafts = sequence.drafts
        start, drafts.worker_known = drafts.worker_known, sequence.num_tokens
        corrections, drafts.corrections = drafts.corrections, no_tokens()
        return DraftItem(
            SequenceDelta(sequence.seq_id, start, sequence.tokens(start)),
            max_nodes,
            begin=sequence.draft_begin if start == 0 else None,
            max_depth=self._shape.gamma,
            min_confidence=min_confidence,
            branch=self._shape.branch,
            method=drafts.sources.method,
            runs=runs,
            corrections=corrections,
        )

    def _max_nodes(self, entry: RoundEntry) -> int:
        if entry.sequence.drafts.sources.method == "lookahead":
            return entry.max_nodes  # phrases behind a draft cost nothing
        return min(self._shape.gamma * self._shape.branch, entry.max_nodes)

    def _runs(self, sequence: Sequence) -> np.ndarray:
        """Phrases from the shared cache that may follow, as `DraftItem.runs`; workers do not read the cache."""
        request, sources = sequence.request, sequence.drafts.sources
        if self._phrases is None or sources.worker is None or sources.method != "lookahead" or request.cache == "off":
            return no_tokens()
        namespaces = dict.fromkeys((sequence.namespace, *request.readable))
        last_tokens = sequence.tokens()[-_CONTEXT_TOKENS:]
        try:
            found = self._phrases.behind(namespaces, last_tokens, 2 * self._shape.gamma, _MAX_RUNS)
        except Exception:
            self._counters.count_drafter_error(self._names[sources.worker])
            return no_tokens()
        runs = [token for phrase in found for token in (int(last_tokens[-1]), *phrase, -1)]
        return np.array(runs, np.int32)

    def _send_prompts_ahead(self, round: Round, items: dict[str, list[DraftItem]]) -> None:
        for entry in round.entries:
            sequence, drafts = entry.sequence, entry.sequence.drafts
            if entry.emits or drafts.worker_known or drafts.sources.worker is None:
                continue
            if sequence.num_left < 2 or not drafts.max_tokens:
                continue
            worker_id = self._workers.worker_for(sequence, round.round_id)
            if worker_id is not None and worker_id not in round.asked.awaited:
                items.setdefault(worker_id, []).append(self._item(sequence, 0, no_tokens()))

    def take_results(self, round: Round, results: Mapping[str, DraftResult | None]) -> None:
        """results: by worker; None or missing: no answer in time."""
        for worker_id in round.asked.batches:
            self._take_result(round, worker_id, results.get(worker_id))

    def _take_result(self, round: Round, worker_id: str, result: DraftResult | None) -> None:
        is_awaited = worker_id in round.asked.awaited
        self._counters.awaited_drafts += is_awaited
        if result is None:
            if is_awaited:
                self._counters.late_drafts += 1
                self._scaling.observe_late()
                self._workers.count_miss(worker_id, round.round_id)
            return
        if result.round_id != round.round_id or len(result.seq_ids) != len(result.trees):
            return
        self._workers.count_answer(worker_id, round.round_id)
        if is_awaited:
            self._scaling.observe_answer(len(result.seq_ids), result.elapsed_s)
        self._counters.ready_drafts += result.num_ready
        self._counters.missed_drafts += result.num_ahead - result.num_ready
        for seq_id in result.stale_seq_ids:
            sequence = self._sequences.get(seq_id)
            if sequence is not None and sequence.drafts.worker == worker_id:
                self._counters.stale_drafts += 1
                sequence.drafts.worker_known = 0
        asked = {entry.seq_id: entry for entry in round.entries if entry.draft_worker == worker_id}
        for seq_id, tree in zip(result.seq_ids, result.trees, strict=True):
            entry = asked.pop(seq_id, None)
            source = None if entry is None else entry.sequence.drafts.sources.worker
            if entry is not None and source is not None:
                most = self._max_nodes(entry) if entry.is_coupled else min(self._shape.gamma, entry.max_nodes)
                self._proposals.add(entry, source, tree, max_nodes=most)
        if is_awaited:
            self._learn_time(round, worker_id, result)

    def _learn_time(self, round: Round, worker_id: str, result: DraftResult) -> None:
        if any(item.begin is not None for item in round.asked.batches[worker_id].items):
            return  # it computed prompts, too
        drafted = [tree for entry in round.entries if entry.draft_worker == worker_id for tree in _drafts_of(entry)]
        levels = max(map(num_levels, drafted), default=0)
        round.traffic.depth.observe_answer(result.elapsed_s, levels, is_parallel=result.is_parallel)

    def observe(self, round: Round, emitted: list[Emitted]) -> None:
        """Learn how likely drafts are right. Call it when the round's tokens are committed."""
        for index, first, _ in emitted:
            entry = round.entries[index]
            for tree in _drafts_of(entry):
                round.traffic.depth.observe_tree(tree, entry.sequence.tokens(first))

    def wants_corrections(self, round: Round) -> bool:
        """Whether a worker learns from the target predictions of this round."""
        return any(map(_wants_corrections, round.entries))

    def keep_corrections(self, entries: Iterable[RoundEntry], result: VerifyResult, token_ids: np.ndarray) -> None:
        """Keep target predictions after rejected draft tokens, to be sent with the sequences' next drafts. Call it when
        the round's tokens are committed.

        entries: those that emitted; token_ids: from `successors_of`.
        """
        wanting = list(filter(_wants_corrections, entries))
        if not wanting:
            return
        first_rows = first_rows_of(result)
        paths = {verdict.seq_id: verdict.path.tolist() for verdict in result.verdicts}
        for entry in wanting:
            row, num_nodes = first_rows[entry.seq_id]
            path = paths[entry.seq_id]
            if len(path) < num_nodes:
                entry.sequence.drafts.corrections = discarded_texts(
                    entry.sequence.tokens(),
                    entry.num_tokens,
                    path,
                    parents=entry.tree.parents[:num_nodes],
                    likeliest=token_ids[row : row + 1 + num_nodes, 0],
                )

    def drop_namespace(self, namespace: str) -> None:
        for sequence in self._sequences.values():
            if sequence.namespace == namespace:
                sequence.drafts.corrections = no_tokens()
        self._workers.drop_namespace(namespace)


def _drafts_of(entry: RoundEntry) -> list[DraftTree]:
    """What a draft worker has proposed for the sequence, at most one tree."""
    source = None if entry.draft_worker is None else entry.sequence.drafts.sources.worker
    if entry.chain is not None:
        return [entry.chain]
    return [tree for proposer, tree in entry.proposals if proposer == source]


def _wants_corrections(entry: RoundEntry) -> bool:
    is_lookahead = entry.sequence.drafts.sources.method == "lookahead"
    return is_lookahead and entry.draft_worker is not None and len(entry.tree.token_ids) > 0

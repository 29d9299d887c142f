"""Drafts of one pool of draft workers: what to ask for, what to send along, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import DraftBatch, DraftItem, DraftResult, SequenceDelta, VerifyResult, no_tokens
from cache_service.automata.shared_phrases import SharedPhrases
from cluster.router.counters import RouterCounters
from cluster.router.discarded import discarded_texts
from cluster.router.draft_depth import DraftCosts, num_right
from cluster.router.draft_scaling import DraftScaling
from cluster.router.draft_workers import DraftWorkers
from cluster.router.learning import first_rows_of
from cluster.router.proposals import Proposals
from cluster.router.round import Emitted, Round, RoundEntry
from cluster.router.sequence import PoolState, Sequence

_CONTEXT_TOKENS = 16  # last tokens of a sequence that are looked up in the shared cache for a draft worker
_MAX_RUNS = 4  # phrases of the shared cache sent with one item
_MOST_NEW_IN_A_ROW = 256  # answers of new shapes; a worker records 128 shapes, each of which is new twice


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Shape of the draft model's trees."""

    gamma: int = 4  # depth
    branch: int = 1  # guesses for each next token


Asking = list[tuple[RoundEntry, str]]  # entries that a pool can draft for, each with its worker


class WorkerDrafting:
    """Call `could_ask` and either `ask` or nothing, then `batches`, and `take_result` with each answer."""

    def __init__(
        self,
        shape: DraftShape,
        sequences: Mapping[int, Sequence],
        *,
        pool: int = 0,
        names: SequenceOf[str],
        proposals: Proposals,
        counters: RouterCounters,
        phrases: SharedPhrases | None,
        scaling: DraftScaling,
    ) -> None:
        """sequences: the router's own by id, a mapping that changes with it; pool: index of the pool; names: source
        names by index; phrases: of the shared cache, for ouroboros; scaling: records how workers answer."""
        self.workers = DraftWorkers(pool)
        self._shape = shape
        self._pool = pool
        self._sequences = sequences
        self._names = names
        self._proposals = proposals
        self._counters = counters
        self._phrases = phrases
        self._scaling = scaling
        self._new_in_a_row = 0  # answers of new shapes, since the last that was of none

    def could_ask(self, round: Round) -> Asking:
        """The entries that may be drafted for now."""
        if not len(self.workers):
            return []
        return [
            (entry, worker_id)
            for entry in round.entries
            if entry.max_nodes and (worker_id := self.workers.worker_for(entry.sequence, round.round_id)) is not None
        ]

    def ask(
        self, round: Round, asking: Asking, costs: DraftCosts, items: dict[str, list[DraftItem]]
    ) -> dict[str, np.ndarray]:
        """Ask the pool's workers, for whose answers the round waits: add to `items`, by worker. Returns what a forward
        is worth, by worker, as `DraftBatch.worth`."""
        depth, gamma = round.traffic.depths[self._pool], self._shape.gamma
        by_confidence = gamma, depth.min_confidence(costs.row_price)
        # Under rejection the time of a draft must not depend on its tokens, where they are drawn: see `draft_depth`.
        by_depth = depth.paying_levels(costs, len(asking), most=gamma), 0.0
        for entry, worker_id in asking:
            if entry.draft_workers and not entry.is_coupled:
                continue  # under rejection, one draft model drafts
            entry.draft_workers[self._pool] = worker_id
            sequence = entry.sequence
            held = sequence.drafts.pools[self._pool]
            runs, limits = self._runs(sequence, held), by_depth if self._is_drawn(entry, held) else by_confidence
            item = self._item(sequence, held, self._max_nodes(entry, held), runs, *limits)
            items.setdefault(worker_id, []).append(item)
        round.asked.awaited += tuple(items)
        round.asked.pools[self._pool] = len(self.workers)
        # Several workers draft at once: of the time that the round waits, each answers for its part.
        return {worker_id: depth.worth(costs, len(own) / len(asking)) for worker_id, own in items.items()}

    def batches(
        self, round: Round, items: dict[str, list[DraftItem]], worth: Mapping[str, np.ndarray]
    ) -> dict[str, DraftBatch]:
        """The batches to send: `items`, and what workers are to be told. worth: from `ask`."""
        return self.workers.batches(items, worth, round.round_id, is_idle=not round.entries)

    def _item(
        self,
        sequence: Sequence,
        held: PoolState,
        max_nodes: int,
        runs: np.ndarray,
        max_depth: int,
        min_confidence: float = 0.0,
    ) -> DraftItem:
        """An item with the tokens that the sequence's worker lacks, which count as sent from now on."""
        start, held.known = held.known, sequence.num_tokens
        corrections, held.corrections = held.corrections, no_tokens()
        return DraftItem(
            SequenceDelta(sequence.seq_id, start, sequence.tokens(start)),
            max_nodes,
            begin=sequence.draft_begin if start == 0 else None,
            max_depth=max_depth,
            min_confidence=min_confidence,
            branch=self._shape.branch,
            method=held.source.method,
            runs=runs,
            corrections=corrections,
        )

    def _is_drawn(self, entry: RoundEntry, held: PoolState) -> bool:
        """Whether the worker draws tokens from a distribution that it sends."""
        return not entry.is_coupled and held.source.method == "tree"

    def _max_nodes(self, entry: RoundEntry, held: PoolState) -> int:
        if held.source.method == "lookahead":
            return entry.max_nodes  # phrases behind a draft cost nothing
        return min(self._shape.gamma * self._shape.branch, entry.max_nodes)

    def _runs(self, sequence: Sequence, held: PoolState) -> np.ndarray:
        """Phrases from the shared cache that may follow, as `DraftItem.runs`; workers do not read the cache."""
        request = sequence.request
        if self._phrases is None or held.source.method != "lookahead" or request.cache == "off":
            return no_tokens()
        namespaces = dict.fromkeys((sequence.namespace, *request.readable))
        last_tokens = sequence.tokens()[-_CONTEXT_TOKENS:]
        try:
            found = self._phrases.behind(namespaces, last_tokens, 2 * self._shape.gamma, _MAX_RUNS)
        except Exception:
            self._counters.count_drafter_error(self._names[held.source.source])
            return no_tokens()
        runs = [token for phrase in found for token in (int(last_tokens[-1]), *phrase, -1)]
        return np.array(runs, np.int32)

    def send_prompts_ahead(self, round: Round, items: dict[str, list[DraftItem]]) -> None:
        """Send workers that the round does not wait for prompts of sequences that do not emit yet."""
        for entry in round.entries:
            sequence, drafts = entry.sequence, entry.sequence.drafts
            held = drafts.pools.get(self._pool)
            if entry.emits or held is None or held.known or sequence.num_left < 2 or not drafts.max_tokens:
                continue
            worker_id = self.workers.worker_for(sequence, round.round_id)
            if worker_id is not None and worker_id not in round.asked.awaited:
                items.setdefault(worker_id, []).append(self._item(sequence, held, 0, no_tokens(), self._shape.gamma))

    def take_result(self, round: Round, worker_id: str, result: DraftResult | None) -> None:
        """result: None: no answer in time."""
        is_awaited = worker_id in round.asked.awaited
        self._counters.awaited_drafts += is_awaited
        if result is None:
            if is_awaited:
                self._counters.late_drafts += 1
                self._scaling.observe_late()
                self.workers.count_miss(worker_id, round.round_id)
            return
        if result.round_id != round.round_id or len(result.seq_ids) != len(result.trees):
            return
        self.workers.count_answer(worker_id, round.round_id)
        is_usual = is_awaited and self._is_usual(result)
        if is_awaited:
            round.asked.is_new_shape |= not is_usual
            self._scaling.observe_answer(len(result.seq_ids), result.elapsed_s if is_usual else 0.0)
        self._counters.ready_drafts += result.num_ready
        self._counters.missed_drafts += result.num_ahead - result.num_ready
        for seq_id in result.stale_seq_ids:
            sequence = self._sequences.get(seq_id)
            held = None if sequence is None else sequence.drafts.pools.get(self._pool)
            if held is not None and held.worker == worker_id:
                self._counters.stale_drafts += 1
                held.known = 0
        asked = {entry.seq_id: entry for entry in self._drafted_by(worker_id, round)}
        for seq_id, tree in zip(result.seq_ids, result.trees, strict=True):
            entry = asked.pop(seq_id, None)
            if entry is not None:
                held = entry.sequence.drafts.pools[self._pool]
                is_drawn = self._is_drawn(entry, held)
                most = min(self._shape.gamma, entry.max_nodes) if is_drawn else self._max_nodes(entry, held)
                self._proposals.add(entry, held.source.source, tree, max_nodes=most)
        if is_usual:
            self._learn_time(round, worker_id, result)

    def _is_usual(self, result: DraftResult) -> bool:
        """Whether the time of an awaited answer tells what drafts take: its shapes are not new, or always are.
        Counts the call as an answer."""
        self._new_in_a_row = self._new_in_a_row + 1 if result.is_new_shape else 0
        return not 0 < self._new_in_a_row <= _MOST_NEW_IN_A_ROW

    def _learn_time(self, round: Round, worker_id: str, result: DraftResult) -> None:
        if any(item.begin is not None for item in round.asked.batches[worker_id].items):
            return  # it computed prompts, too
        depth = round.traffic.depths[self._pool]
        depth.observe_answer(result.elapsed_s, result.num_forwards, is_parallel=result.is_parallel)

    def _drafted_by(self, worker_id: str, round: Round) -> list[RoundEntry]:
        return [entry for entry in round.entries if entry.draft_workers.get(self._pool) == worker_id]

    def _drafts_of(self, entry: RoundEntry) -> list[DraftTree]:
        """What the pool has proposed for the sequence, at most one tree."""
        if self._pool not in entry.draft_workers:
            return []
        source = entry.sequence.drafts.pools[self._pool].source.source
        if entry.chain is not None and entry.chain_source == source:
            return [entry.chain]
        return [tree for proposer, tree in entry.proposals if proposer == source]

    def right_tokens(self, entry: RoundEntry, first: int) -> int | None:
        """How many tokens of the entry's draft were right; None: it has no draft. first: position of the first emitted
        token."""
        return next((num_right(tree, entry.sequence.tokens(first)) for tree in self._drafts_of(entry)), None)

    def observe(self, round: Round, emitted: list[Emitted]) -> None:
        """Learn how likely drafts are right. Call it when the round's tokens are committed."""
        for index, first, _ in emitted:
            entry = round.entries[index]
            for tree in self._drafts_of(entry):
                round.traffic.depths[self._pool].observe_tree(tree, entry.sequence.tokens(first))

    def wants_corrections(self, round: Round) -> bool:
        """Whether a worker learns from the target predictions of this round."""
        return any(map(self._wants_corrections, round.entries))

    def keep_corrections(self, entries: Iterable[RoundEntry], result: VerifyResult, token_ids: np.ndarray) -> None:
        """Keep target predictions after rejected draft tokens, to be sent with the sequences' next drafts. Call it when
        the round's tokens are committed.

        entries: those that emitted; token_ids: from `successors_of`.
        """
        wanting = list(filter(self._wants_corrections, entries))
        if not wanting:
            return
        first_rows = first_rows_of(result)
        paths = {verdict.seq_id: verdict.path.tolist() for verdict in result.verdicts}
        for entry in wanting:
            row, num_nodes = first_rows[entry.seq_id]
            path = paths[entry.seq_id]
            if len(path) < num_nodes:
                entry.sequence.drafts.pools[self._pool].corrections = discarded_texts(
                    entry.sequence.tokens(),
                    entry.num_tokens,
                    path,
                    parents=entry.tree.parents[:num_nodes],
                    likeliest=token_ids[row : row + 1 + num_nodes, 0],
                )

    def drop_namespace(self, namespace: str) -> None:
        for sequence in self._sequences.values():
            held = sequence.drafts.pools.get(self._pool)
            if held is not None and sequence.namespace == namespace:
                held.corrections = no_tokens()
        self.workers.drop_namespace(namespace)

    def _wants_corrections(self, entry: RoundEntry) -> bool:
        is_asked = self._pool in entry.draft_workers and len(entry.tree.token_ids) > 0
        return is_asked and entry.sequence.drafts.pools[self._pool].source.method == "lookahead"

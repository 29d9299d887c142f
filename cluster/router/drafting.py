"""Where drafts come from: asks draft workers, the router's own drafters and the target's head for trees."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters.contract import CpuDrafter, DraftContext, Outcome, VerifiedRows
from actors.drafters.registry import AUTO, DRAFT_MODEL, EAGLE, MODEL_DRAFTER_NAMES, OUROBOROS
from actors.messages import DraftItem, DraftResult, GenerationRequest, VerifyResult, no_tokens
from cache_service.automata.shared_phrases import SharedPhrases
from cluster.router.counters import RouterCounters
from cluster.router.discarded import discarded_texts
from cluster.router.draft_scaling import DraftScaling
from cluster.router.draft_workers import DraftWorkers
from cluster.router.learning import first_rows_of
from cluster.router.merged_trees import MAX_SOURCES, has_tree_shape
from cluster.router.rejection_chain import is_chain
from cluster.router.round import Emitted, Round, RoundEntry
from cluster.router.sequence import Sequence

logger = logging.getLogger(__name__)

_MATCHED = 16  # last tokens of a sequence that are looked for in the shared cache on behalf of a draft worker
_MAX_RUNS = 4  # that it is told of


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The trees asked of the draft model."""

    gamma: int = 4  # depth
    branch: int = 1  # guesses for each next token


class Drafting:
    """The sources of drafts by index: the CPU drafters in their order, the target's head if it has one, then the draft
    model of the workers, by lookahead if that is configured, and by trees.

    The head drafts at the end of a round, from what the target has just computed, for the round that follows: its trees
    come with the target's result, and are proposed if nothing has been committed since.

    Whatever a source does wrong costs only its own drafts and is counted. `sequences` are those of the router by id;
    the mapping is the router's own and changes with it.
    """

    def __init__(
        self,
        drafters: Mapping[str, CpuDrafter],
        configured: tuple[str, ...],
        gamma: int,
        branch: int,
        vocab_size: int,
        has_head: bool,
        sequences: Mapping[int, Sequence],
        counters: RouterCounters,
        phrases: SharedPhrases | None = None,
        scaling: DraftScaling | None = None,
    ) -> None:
        """configured: the drafters of requests that name none; gamma and branch: depth of the trees asked
        of the draft model, and its guesses for each next token; has_head: of the target;
        phrases: of the shared cache, for the draft model's lookahead;
        scaling: told how workers answer."""
        others = MODEL_DRAFTER_NAMES
        if not set(others).isdisjoint(drafters) or len(drafters) + len(others) + 1 > MAX_SOURCES:
            most = MAX_SOURCES - len(others) - 1
            raise ValueError(f"drafters: at most {most} drafters, none named {', '.join(others)}")
        self.num_drafters = len(drafters)  # on the CPU
        self.head = len(drafters) if has_head else None  # its source index
        self.names = [*drafters, *([EAGLE] if has_head else [])]
        self.lookahead = len(self.names) if OUROBOROS in configured else None  # its source index
        self.names += [*([OUROBOROS] if self.lookahead is not None else []), DRAFT_MODEL]
        self.draft_model = len(self.names) - 1  # its source index
        self._drafters = list(drafters.values())
        self._configured = configured
        self._gamma = gamma
        self._branch = branch
        self._vocab_size = vocab_size
        self._sequences = sequences
        self._counters = counters
        self._phrases = phrases
        self._scaling = scaling or DraftScaling()
        self._learners = {i: drafter for i, drafter in enumerate(self._drafters) if drafter.num_successors}
        # Nodes that CPU drafters require of a sequence, by their source indices.
        self.most_required = {i: d.most_required for i, d in enumerate(self._drafters) if d.most_required}
        self._workers = DraftWorkers()
        self._reported: set[str] = set()  # drafters whose failure has been logged

    @property
    def has_notices(self) -> bool:
        """Whether workers are still to be told of sequences that have ended."""
        return self._workers.has_notices()

    def set_workers(self, worker_ids: SequenceOf[str], sequences: Iterable[Sequence]) -> None:
        self._workers.set_workers(worker_ids, list(sequences))

    def sources_of(self, request: GenerationRequest) -> tuple[tuple[int, ...], bool, bool, bool]:
        """The CPU drafters (indices) that the request may use, and whether it may use the draft model, the head, and
        the draft model by lookahead. The draft model drafts in one way only: lookahead goes before trees, because it is
        no part of "auto", so that whoever has it has named it."""
        names = self._configured if request.drafters is None else request.drafters
        every = AUTO in names
        chosen = tuple(index for index in range(self.num_drafters) if every or self.names[index] in names)
        wants_lookahead = self.lookahead is not None and (every or OUROBOROS in names)
        wants_trees = every or DRAFT_MODEL in names
        wants_head = self.head is not None and (every or EAGLE in names)
        if request.sampling.acceptance == "rejection":
            # Its rule needs draft distributions, which only a draft model has that draws from them.
            chosen, wants_head, wants_lookahead = (), False, False
        return chosen, wants_trees or wants_lookahead, wants_head, wants_lookahead

    def ask_workers(self, round: Round) -> None:
        """Draft batches for the sequences that emit, if waiting for them pays; and the prompts of those that will,
        to workers that nobody waits for."""
        items: dict[str, list[DraftItem]] = {}
        if len(self._workers):
            asking = [
                (entry, worker_id)
                for entry in round.entries
                if entry.max_nodes
                and entry.sequence.drafts.wants_draft_model
                and (worker_id := self._workers.worker_for(entry.sequence, round.round_id)) is not None
            ]
            if asking and round.traffic.draft_wait.pays(round.size.num_emitting):
                for entry, worker_id in asking:
                    entry.draft_worker = worker_id
                    item = self._workers.item_for(
                        entry.sequence, self._most_nodes(entry), self._gamma, self._branch, self._runs(entry.sequence)
                    )
                    items.setdefault(worker_id, []).append(item)
                round.asked.draft_model = True
                round.asked.awaited = tuple(items)
                round.asked.num_workers = len(self._workers)
            seems_to_pay = round.traffic.draft_wait.seems_to_pay
            if round.asked.draft_model or (not asking and seems_to_pay(round.size.num_running)):
                self._send_prompts_ahead(round, items)
        is_idle = not round.entries
        round.asked.batches = self._workers.batches(items, round.round_id, is_idle)

    def _most_nodes(self, entry: RoundEntry) -> int:
        """Of a tree asked of the draft model. Phrases behind a draft cost it nothing."""
        return (
            entry.max_nodes
            if entry.sequence.drafts.wants_lookahead
            else min(self._gamma * self._branch, entry.max_nodes)
        )

    def _runs(self, sequence: Sequence) -> np.ndarray | None:
        """What the shared cache knows to follow, for a worker that has no part in the cache."""
        request = sequence.request
        if self._phrases is None or not sequence.drafts.wants_lookahead or request.cache == "off":
            return None
        namespaces = dict.fromkeys((sequence.namespace, *request.readable))
        last_tokens = sequence.tokens()[-_MATCHED:]
        try:
            found = self._phrases.behind(namespaces, last_tokens, 2 * self._gamma, _MAX_RUNS)
        except Exception:
            self._drafter_failed(self.draft_model if self.lookahead is None else self.lookahead)
            return None
        runs = [token for phrase in found for token in (int(last_tokens[-1]), *phrase, -1)]
        return np.array(runs, np.int32)

    def ask_head(self, round: Round) -> None:
        """Have the target's head draft the next round of the sequences that emit, if that pays. Prompts it sees in any
        case, or it could not begin to draft later."""
        asking = []
        for entry in round.entries:
            sequence = entry.sequence
            most = min(
                sequence.drafts.max_tokens, sequence.num_left - 2
            )  # a token comes of this round, one of the next
            if not sequence.drafts.wants_head or most < 1:
                continue
            if entry.rows > 1 or not entry.emits:
                entry.head_nodes = 0
            if entry.emits and entry.max_nodes:
                asking.append((entry, most))
        if self.head is not None and asking and round.traffic.head_wait.pays(round.size.num_emitting):
            round.asked.head = True
            for entry, most in asking:
                entry.head_nodes = most

    def take_head_drafts(self, round: Round, result: VerifyResult) -> None:
        """Keep the head's trees for the next round. Call it when the round's tokens are committed."""
        if not result.drafted_seq_ids and not result.drafts:
            return
        if len(result.drafted_seq_ids) != len(result.drafts):
            self._counters.invalid_head_drafts += 1
            return
        asked = {entry.seq_id: entry for entry in round.entries if entry.head_nodes > 0}
        for seq_id, tree in zip(result.drafted_seq_ids, result.drafts, strict=True):
            entry = asked.pop(seq_id, None)
            if entry is None:
                self._counters.unknown_sequences += 1
            elif entry.sequence.num_tokens > entry.num_tokens:  # else it emitted nothing
                entry.sequence.drafts.head_tree = tree
                entry.sequence.drafts.head_length = entry.sequence.num_tokens

    def _propose_head_trees(self, round: Round, head: int) -> None:
        for entry in round.entries:
            sequence, most = entry.sequence, entry.max_nodes
            tree = sequence.drafts.head_tree
            if tree is None or not most or not entry.is_coupled or sequence.drafts.head_length != entry.num_tokens:
                continue
            # Likeliest nodes come first: the beginning is the best tree of that size.
            self._take_tree(entry, head, tree.first(most), most)

    def draft_locally(self, round: Round) -> None:
        """Run the CPU drafters, and propose what the head has drafted. Whatever one of them does wrong costs only its
        own drafts."""
        if self.head is not None:
            self._propose_head_trees(round, self.head)
        for index, drafter in enumerate(self._drafters):
            entries = [
                entry
                for entry in round.entries
                if entry.max_nodes and entry.is_coupled and index in entry.sequence.drafts.cpu
            ]
            if entries:
                self._ask_drafter(index, drafter, entries)

    def take_results(self, round: Round, results: Mapping[str, DraftResult | None]) -> None:
        """What the draft workers answered; None or missing: nothing in time."""
        for worker_id in round.asked.batches:
            self._take_drafts(round, worker_id, results.get(worker_id))

    def tell(
        self,
        round: Round,
        emitted: list[Emitted],
        verified: np.ndarray | None,
        accepted: np.ndarray | None,
    ) -> None:
        """Tell the CPU drafters what became of the round. verified, accepted: nodes by [entry, source], or None."""
        outcomes: list[list[Outcome]] = [[] for _ in self._drafters]
        for index, first, _ in emitted:
            sequence = round.entries[index].sequence
            if not sequence.drafts.cpu:
                continue
            tokens = sequence.tokens(first)
            tried = verified[index].tolist() if verified is not None else None
            right = accepted[index].tolist() if accepted is not None else None
            for drafter in sequence.drafts.cpu:
                outcomes[drafter].append(
                    Outcome(sequence.seq_id, tried[drafter] if tried else 0, right[drafter] if right else 0, tokens)
                )
        for drafter, told in enumerate(outcomes):
            if told:
                try:
                    self._drafters[drafter].observe(told)
                except Exception:
                    self._drafter_failed(drafter)

    @property
    def num_successors(self) -> int:
        """Next tokens of every row that the drafters want to learn from; 0: none of them learns."""
        return max((drafter.num_successors for drafter in self._learners.values()), default=0)

    def num_successors_of(self, round: Round) -> int:
        """Next tokens of every row of the round that anyone wants, draft workers included; 0: nobody does."""
        return self.num_successors or int(any(map(_corrects, round.entries)))

    def teach(self, rows: VerifiedRows) -> None:
        """Let the drafters that learn see what the target thought."""
        for index, drafter in self._learners.items():
            try:
                drafter.remember(rows)
            except Exception:
                self._drafter_failed(index)

    def keep_corrections(self, entries: Iterable[RoundEntry], result: VerifyResult, token_ids: np.ndarray) -> None:
        """What the target had in mind at draft nodes that it refused goes to the sequences' workers with their next
        drafts. entries: that emitted; token_ids: of `successors_of`. Call it when the round's tokens are committed."""
        correcting = list(filter(_corrects, entries))
        if not correcting:
            return
        first_rows = first_rows_of(result)
        paths = {verdict.seq_id: verdict.path.tolist() for verdict in result.verdicts}
        for entry in correcting:
            row, num_nodes = first_rows[entry.seq_id]
            path = paths[entry.seq_id]
            if len(path) < num_nodes:
                likeliest = token_ids[row : row + 1 + num_nodes, 0]
                entry.sequence.drafts.corrections = discarded_texts(
                    entry.sequence.tokens(), entry.num_tokens, path, entry.tree.parents[:num_nodes], likeliest
                )

    def drop(self, namespace: str) -> None:
        """Have the drafters and workers forget what they have learnt in a namespace."""
        for sequence in self._sequences.values():
            if sequence.namespace == namespace:
                sequence.drafts.corrections = no_tokens()
        for index, drafter in enumerate(self._drafters):
            try:
                drafter.drop_namespace(namespace)
            except Exception:
                self._drafter_failed(index)
        self._workers.drop(namespace)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or gets another id: free it at the drafters now, at its worker with a next batch."""
        self._workers.forget(sequence)
        for drafter in sequence.drafts.cpu:
            self._forget_at_drafter(drafter, sequence)

    def _send_prompts_ahead(self, round: Round, items: dict[str, list[DraftItem]]) -> None:
        for entry in round.entries:
            sequence = entry.sequence
            if entry.emits or sequence.drafts.worker_known or not sequence.drafts.wants_draft_model:
                continue
            if sequence.num_left < 2 or not sequence.drafts.max_tokens:
                continue
            worker_id = self._workers.worker_for(sequence, round.round_id)
            if worker_id is not None and worker_id not in round.asked.awaited:
                items.setdefault(worker_id, []).append(self._workers.item_for(sequence, 0, self._gamma, self._branch))

    def _ask_drafter(self, index: int, drafter: CpuDrafter, entries: list[RoundEntry]) -> None:
        contexts = []
        most_required = self.most_required.get(index, 0)
        for entry in entries:
            sequence = entry.sequence
            contexts.append(
                DraftContext(
                    entry.seq_id,
                    sequence.tokens(),
                    sequence.drafts.cpu_known[index],
                    sequence.begin.num_prompt_tokens,
                    entry.max_nodes,
                    sequence.begin.sampling,
                    sequence.namespace,
                    sequence.request.prediction_token_ids,
                    most_required if entry.max_required else 0,
                    sequence.num_left - 1,
                    readable=sequence.request.readable,
                    reads_cache=sequence.request.cache != "off",
                )
            )
        try:
            trees = drafter.propose(contexts)
            if len(trees) != len(entries):
                raise ValueError(f"{len(trees)} trees for {len(entries)} contexts")
        except Exception:
            self._drafter_failed(index)
            for entry in entries:
                self._forget_at_drafter(index, entry.sequence)
            return
        for entry, tree in zip(entries, trees, strict=True):
            entry.sequence.drafts.cpu_known[index] = entry.num_tokens
            self._take_tree(entry, index, tree, entry.max_nodes, most_required if entry.max_required else 0)

    def _drafter_failed(self, index: int) -> None:
        name = self.names[index]
        self._counters.drafter_errors[name] += 1
        if name not in self._reported:
            self._reported.add(name)
            logger.warning(
                "drafter %s failed; its drafts are left out, further failures are only counted", name, exc_info=True
            )

    def _forget_at_drafter(self, index: int, sequence: Sequence) -> None:
        sequence.drafts.cpu_known[index] = 0
        try:
            self._drafters[index].forget(sequence.seq_id)
        except Exception:
            self._drafter_failed(index)

    def _take_tree(
        self, entry: RoundEntry, source: int, tree: DraftTree, max_nodes: int, max_required: int = 0
    ) -> None:
        """Keep a proposal if its arrays can be read; what they say is checked when trees are merged."""
        if not isinstance(tree, DraftTree):
            self._counters.invalid_trees[self.names[source]] += 1
        elif has_tree_shape(tree, max_nodes, max_required):
            if len(tree):
                entry.proposals.append((source, tree))
        else:
            self._counters.invalid_trees[self.names[source]] += 1

    def _take_drafts(self, round: Round, worker_id: str, result: DraftResult | None) -> None:
        is_awaited = worker_id in round.asked.awaited
        self._counters.awaited_drafts += is_awaited
        if result is None:
            if is_awaited:
                self._counters.late_drafts += 1
                self._scaling.observe_late()
                self._workers.missed(worker_id, round.round_id)
            return
        if result.round_id != round.round_id or len(result.seq_ids) != len(result.trees):
            self._counters.invalid_draft_results += 1
            return
        self._workers.answered(worker_id, round.round_id)
        if is_awaited:
            self._scaling.observe_answer(len(result.seq_ids), result.elapsed_s)
        self._counters.ready_drafts += result.num_ready
        self._counters.missed_drafts += result.num_ahead - result.num_ready
        for seq_id in result.stale_seq_ids:
            sequence = self._sequences.get(seq_id)
            if sequence is None or sequence.drafts.worker != worker_id:
                self._counters.unknown_sequences += 1
                continue
            self._counters.stale_drafts += 1
            sequence.drafts.worker_known = 0
        asked = {entry.seq_id: entry for entry in round.entries if entry.draft_worker == worker_id}
        for seq_id, tree in zip(result.seq_ids, result.trees, strict=True):
            entry = asked.pop(seq_id, None)
            if entry is None:
                self._counters.unknown_sequences += 1
            elif entry.is_coupled:
                source = self.draft_model
                if self.lookahead is not None and entry.sequence.drafts.wants_lookahead:
                    source = self.lookahead
                self._take_tree(entry, source, tree, self._most_nodes(entry))
            else:
                self._take_chain(entry, tree)

    def _take_chain(self, entry: RoundEntry, tree: DraftTree) -> None:
        if not has_tree_shape(tree, min(self._gamma, entry.max_nodes)) or not is_chain(tree, self._vocab_size):
            self._counters.invalid_trees[DRAFT_MODEL] += 1
        elif len(tree):
            entry.proposals.append((self.draft_model, tree))


def _corrects(entry: RoundEntry) -> bool:
    """Whether a draft worker with a phrase pool is to hear what the target thinks of the entry's draft."""
    return entry.sequence.drafts.wants_lookahead and entry.draft_worker is not None and len(entry.tree) > 0

"""Which drafts a round verifies: the rows it may spend, the nodes that pay, and what their outcome teaches."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import numpy as np

from actors.draft_tree import DraftTree
from cluster.router.calibration import SourceCalibration
from cluster.router.counters import RouterCounters
from cluster.router.draft_budget import draft_rows
from cluster.router.draft_depth import DraftCosts
from cluster.router.draft_record import DraftRecord
from cluster.router.draft_scaling import DraftScaling
from cluster.router.draft_sources import DraftSources
from cluster.router.draft_wait import RoundTimes
from cluster.router.merged_trees import MergedTrees, Proposal, SequenceLimits, best_paths, merge_trees
from cluster.router.planner import (
    choose_nodes,
    most_nodes_that_can_pay,
    price_of_a_row,
    tally_nodes,
)
from cluster.router.rejection_chain import parent_confidence
from cluster.router.round import Emitted, Round
from cluster.router.step_time import StepTimeCurve

PlannerDecision = Literal[
    "drafted",  # drafts are verified
    "explored",  # drafts are verified beyond what seems to pay, to measure
    "declined",  # there were drafts, and none of them pays
    "nothing_proposed",
    "no_row_pays",  # even a sure draft would not: the target is busy enough
    "not_wanted",  # prompts alone, requests without drafts, last tokens
]

_LAST_EXPLORE_ROUNDS = 128  # between rounds that verify more than seems to pay, after a while
_IDLE_EXPLORE_ROUNDS = 512  # and where drafts never pay
_HEAD_WEIGHT = 0.1  # weight of a new measurement of the head's time
# Factor on the time of a row: the guesses that are chosen are those whose probability is overestimated most.
# In a replay of 144 answers with steps of 4 rows, 1.3 gives 0.8 % more tokens a second than 1, and fewer on no task.
_ROW_CAUTION = 1.3


@dataclass(frozen=True, slots=True)
class ChoiceLimits:
    max_rows: int | None  # draft nodes of all sequences in a round, the required ones included; None: by step times
    most_rows: int  # where they are by step times
    max_sequences: int  # in a round
    vocab_size: int
    chain_only: bool = False  # the target verifies one path of each sequence


class DraftChoice:
    """A round calls `set_budgets`, then `choose` when the drafts are there, and `learn` at its end."""

    def __init__(
        self,
        sources: DraftSources,
        limits: ChoiceLimits,
        *,
        step_times: StepTimeCurve,
        counters: RouterCounters,
        most_required: Mapping[int, int],
        scalings: SequenceOf[DraftScaling],
    ) -> None:
        """most_required: nodes that a source requires of a sequence, by its index, if it does; scalings: by pool of
        draft workers, told of the rounds that asked it."""
        self._names = list(sources.names)
        self._head = sources.head
        self._of_pools = sources.of_pools  # source indices by pool; a sequence has drafts of one of a pool's only
        self._pool_of = sources.pool_of
        self._calibration = SourceCalibration(
            len(self._names), limits.max_sequences, num_chains=len(sources.of_pools), models=sources.models
        )
        self._limits = limits
        self._vocab_size = limits.vocab_size
        self._chain_only = limits.chain_only
        self._step_times = step_times
        self._counters = counters
        self._most_required = {} if limits.chain_only else most_required  # required nodes are beside the guesses
        self._scalings = scalings
        self._head_s = 0.0  # typical time of the head in a round that asks it

    def set_budgets(self, round: Round) -> None:
        """Set the sequences' node budgets: 0 when not even sure nodes would pay, as on a target at full load."""
        wanted = 0
        for entry in round.entries:
            sequence = entry.sequence
            if entry.emits and sequence.drafts.sources and sequence.drafts.from_round <= round.round_id:
                # The last token is the target's own: a draft for it could never be emitted.
                entry.max_nodes = max(0, min(sequence.drafts.max_tokens, sequence.num_left - 1))
                wanted += entry.max_nodes
        max_rows = draft_rows(self._step_times, self._limits.max_rows, self._limits.most_rows)
        wanted = min(wanted, max_rows)
        round.budget.wanted = wanted
        if not wanted:
            return
        traffic = round.traffic
        traffic.explore_in -= 1
        if traffic.explore_in <= 0:
            round.budget.explores = True
            traffic.explore_in = traffic.explore_rounds
        round.budget.rows = wanted
        if not round.budget.explores:
            verify_s = self._step_times.times_of_drafts(round.size.num_rows, round.size.num_running, wanted + 1)
            most = most_nodes_that_can_pay(float(round.size.num_running), traffic.draft_wait.overhead_s, verify_s)
            round.budget.rows = min(wanted, most)
        if self._most_required and round.budget.rows:
            num_required = self._grant_required(round, max_rows)
            round.budget.rows = min(round.budget.rows, max_rows - num_required)
        for entry in round.entries:
            entry.max_nodes = min(entry.max_nodes, round.budget.rows)

    def _grant_required(self, round: Round, max_rows: int) -> int:
        """Let drafters require rows of as many sequences as there is room for; returns how many rows, at most.

        They may take half of a round's rows, or as many as one sequence needs: rows that find guesses are worth nothing
        without rows that verify them. Where that is not enough for all, sequences take turns.
        """
        first = round.round_id % len(round.entries)
        granted = 0
        for entry in round.entries[first:] + round.entries[:first]:
            if not entry.max_nodes or not entry.is_coupled:
                continue
            wanted = sum(self._most_required.get(drafter, 0) for drafter in entry.sequence.drafts.sources.cpu)
            if granted and granted + wanted > max_rows // 2:
                continue
            entry.max_required = wanted
            granted += wanted
        return granted

    def choose(self, round: Round) -> None:
        """Merge the proposals of every sequence and keep the nodes that pay."""
        fixed_s = round.traffic.draft_wait.overhead_s
        if round.asked.pools:
            fixed_s += round.traffic.draft_wait.expected_wait_s(round.size.num_emitting, tuple(round.asked.pools))
        if round.asked.head:
            fixed_s += self._head_s
        chain_tokens, chain_rows = self._cut_chains(round, fixed_s)
        self._choose_nodes(round, chain_tokens, chain_rows, fixed_s)
        if round.entries:
            self._counters.planner_rounds[_decision_of(round)] += 1

    def learn(
        self, round: Round, emitted: list[Emitted], verify_s: float, head_s: float, now: float
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Feed the calibration, and what waiting for draft workers and for the head has brought. Returns verified and
        accepted nodes by [entry, source], int32, or None where no merged tree was verified."""
        chosen = round.chosen
        verified = accepted = None
        masks = np.zeros(0, np.int64)  # sources of the verified nodes
        if chosen is not None:
            was_verified, was_accepted = _outcome(round, emitted, len(chosen))
            nodes = chosen.nodes[was_verified]
            masks = nodes["sources"].astype(np.int64)
            credited = np.bincount(nodes["best_source"], minlength=len(self._names)).tolist()
            self._counters.drafted_tokens.update(dict(zip(self._names, credited, strict=True)))
            verified, accepted, expected = tally_nodes(chosen, was_verified, was_accepted, self._calibration)
            for index, _, _ in emitted:
                record = round.entries[index].sequence.drafts.record
                if record is not None:
                    record.add(verified[index].tolist(), accepted[index].tolist(), expected[index].tolist())
        self._learn_chains(round, emitted)
        self._calibration.end_round(round.entries[index].sequence.namespace for index, _, _ in emitted)
        # A draft of a new shape takes many times as long as the next: learnt from, it would keep rounds from asking.
        if emitted and not round.is_ahead and not round.asked.is_new_shape:
            outside_s = max(0.0, now - round.planned_at - verify_s - head_s)
            num_tokens = sum(round.entries[index].sequence.num_tokens - first for index, first, _ in emitted)
            share = self._share_of_decoding(round)
            decoding_s = verify_s * share
            self._learn_draft_wait(round, emitted, num_tokens, masks, (outside_s, decoding_s), now)
            if self._head is not None and (round.asked.head or self._has_head_drafts(round)):
                num_gained = self._gained(round, emitted, [self._head])
                rows_s = self._seconds_of_rows(round, _num_of(masks, [self._head]), decoding_s)
                # The head drafts at the end of one round what the next one verifies; either half is a round's share.
                of_round = RoundTimes(head_s * share, outside_s + decoding_s - rows_s, rows_s)
                round.traffic.head_wait.observe(round.size.num_emitting, True, num_tokens, num_gained, of_round)
                if round.asked.head:
                    weight = _HEAD_WEIGHT if self._head_s else 1.0
                    self._head_s += (head_s * share - self._head_s) * weight
        return verified, accepted

    def _learn_chains(self, round: Round, emitted: list[Emitted]) -> None:
        for index, _, path in emitted:
            entry = round.entries[index]
            if entry.num_chain:
                is_accepted = np.arange(entry.num_verified) < len(path)
                confidence = parent_confidence(entry.tree)[: entry.num_verified]
                curve = self._calibration.chain_curve(entry.sequence.namespace, self._pool_of[entry.chain_source])
                self._calibration.chain.observe(curve, confidence, is_accepted)
                self._counters.drafted_tokens[self._names[entry.chain_source]] += entry.num_verified

    def _gained(self, round: Round, emitted: list[Emitted], sources: SequenceOf[int]) -> int:
        """Accepted nodes attributable to these sources."""
        if round.chosen is None:
            return 0
        masks = round.chosen.nodes["sources"]
        own = sum(1 << source for source in sources)
        return sum(
            _attributable(own, masks[entry.node_start : entry.node_end][path].tolist())
            for entry, path in ((round.entries[index], path) for index, _, path in emitted)
            if path and not entry.num_chain
        )

    def _learn_draft_wait(
        self,
        round: Round,
        emitted: list[Emitted],
        num_tokens: int,
        masks: np.ndarray,
        times: tuple[float, float],
        now: float,
    ) -> None:
        """masks: sources of the verified nodes. times: outside of the target, and of the target without the share of
        prompts. Without the draft models, the rows of what they alone proposed would not have been computed either."""
        outside_s, decoding_s = times
        wait, asked = round.traffic.draft_wait, tuple(round.asked.pools)

        def brought_by(pools: tuple[int, ...]) -> tuple[int, RoundTimes]:
            """Tokens that these pools gained, and the round's times with what they cost."""
            rows_s = self._seconds_of_rows(round, self._rows_of_pools(round, emitted, masks, pools), decoding_s)
            return self._gained_by_pools(round, emitted, pools), RoundTimes(outside_s, decoding_s - rows_s, rows_s)

        of_all = brought_by(asked)
        wait.observe(round.size.num_emitting, asked, num_tokens, *of_all)
        for pool, num_workers in round.asked.pools.items():
            num_sequences = sum(pool in entry.draft_workers for entry in round.entries)
            if not num_sequences:
                continue  # of several pools, another one drafts for all
            gained, of_round = of_all if len(asked) == 1 else brought_by((pool,))
            parts = of_round.parts(wait.overhead_s)
            self._scalings[pool].observe_round(num_sequences, num_workers, num_tokens, gained, parts, now)

    def _rows_of_pools(self, round: Round, emitted: list[Emitted], masks: np.ndarray, pools: tuple[int, ...]) -> int:
        """Verified nodes that nobody but these pools proposed."""
        sources = [source for pool in pools for source in self._of_pools[pool]]
        entries = (round.entries[index] for index, _, _ in emitted)
        in_chains = sum(entry.num_verified for entry in entries if entry.num_chain and entry.chain_source in sources)
        return in_chains + _num_of(masks, sources)

    def _seconds_of_rows(self, round: Round, num_rows: int, decoding_s: float) -> float:
        """What so many of the round's draft rows cost of the target's time."""
        if not num_rows:
            return 0.0
        rows = round.size.num_rows + sum(entry.num_verified for entry in round.entries)
        others_s = self._step_times.seconds(max(1, rows - num_rows))
        return (1.0 - others_s / self._step_times.seconds(rows)) * decoding_s

    def _gained_by_pools(self, round: Round, emitted: list[Emitted], pools: tuple[int, ...]) -> int:
        """Accepted nodes that would not have been without these pools."""
        sources = [source for pool in pools for source in self._of_pools[pool]]
        in_chains = sum(
            len(path)
            for index, _, path in emitted
            if round.entries[index].num_chain and round.entries[index].chain_source in sources
        )
        return in_chains + self._gained(round, emitted, sources)

    def drop(self, namespace: str) -> None:
        """Drop a namespace's calibration."""
        self._calibration.drop(namespace)

    def forget_pool(self, pool: int) -> None:
        """Drop what has been learnt of the drafts of a pool of draft workers."""
        for source in self._of_pools[pool]:
            self._calibration.forget_source(source)
        self._calibration.forget_chains(pool)
        self._scalings[pool].clear()

    def _has_head_drafts(self, round: Round) -> bool:
        return any(source == self._head for entry in round.entries for source, _ in entry.proposals)

    def _share_of_decoding(self, round: Round) -> float:
        """Share of the target's time in the round that it would have taken without prompts."""
        rows = self._step_times.seconds(round.size.num_rows)
        return self._step_times.seconds(min(round.size.num_rows, round.size.num_running)) / rows

    def _cut_chains(self, round: Round, fixed_s: float) -> tuple[float, int]:
        """Shorten the draft model's chains under rejection; returns their expected accepted tokens and their rows.
        Where one is left, other proposals for its sequence are not verified in this round.

        Whether node i is verified may depend on the nodes before it but never on its own token, or the emitted tokens
        would no longer follow the target's law. So a node is judged by the confidence of its parent, against a price
        that no draft of this round has a part in, and stop tokens stay. For the same reason other proposals have no
        say in whether a chain is verified.
        """
        chains = [entry for entry in round.entries if entry.chain is not None]
        if not chains:
            return 0.0, 0
        room = round.budget.rows // max(1, sum(not entry.is_coupled and entry.emits for entry in round.entries))
        verify_s = self._step_times.times_of_drafts(round.size.num_rows, round.size.num_running, room + 1)
        price = price_of_a_row(float(round.size.num_running), fixed_s, verify_s)
        expected, rows = 0.0, 0
        for entry in chains:
            tree = entry.chain
            assert tree is not None
            curve = self._calibration.chain_curve(entry.sequence.namespace, self._pool_of[entry.chain_source])
            count = 0
            for confidence in parent_confidence(tree)[: min(room, entry.max_nodes)].tolist():
                probability = self._calibration.chain.probability(curve, confidence)
                if probability < price:
                    break
                expected += probability
                count += 1
            entry.num_chain = count
            entry.tree = tree.first(count)
            rows += count
        return expected, rows

    def merge(self, round: Round) -> MergedTrees | None:
        """One tree for each entry, of all that is proposed for it beside a chain that is verified; None: nothing is.
        Where the target verifies chains only, the best path of the tree."""
        proposals: list[Proposal] = []
        stop_tokens: list[int] = []
        stop_start = [0]
        for index, entry in enumerate(round.entries):
            if entry.proposals and not entry.num_chain:
                if entry.sequence.drafts.record is None:
                    entry.sequence.drafts.record = DraftRecord(len(self._names))
                group = self._calibration.group(entry.sequence.namespace)
                is_only = len(entry.sequence.drafts.sources) == 1
                proposals.extend(
                    Proposal(index, source, tree, group=group, is_only=is_only) for source, tree in entry.proposals
                )
                stop_tokens.extend(entry.sequence.stop_tokens)
            stop_start.append(len(stop_tokens))
        if not proposals:
            return None
        limits = SequenceLimits(
            np.array([entry.max_nodes for entry in round.entries], np.int32),
            np.array([entry.sequence.num_left - 1 for entry in round.entries], np.int32),
            np.array(stop_tokens, np.int32),
            np.array(stop_start, np.int32),
        )
        merged, is_valid_tree = merge_trees(proposals, limits, self._calibration, self._vocab_size)
        self._counters.proposed_nodes += len(merged)
        if not is_valid_tree.all():
            for proposal, is_valid in zip(proposals, is_valid_tree.tolist(), strict=True):
                if not is_valid:
                    self._counters.invalid_trees[self._names[proposal.source]] += 1
        return best_paths(merged) if self._chain_only else merged

    @property
    def requires_rows(self) -> bool:
        """Whether a drafter requires rows of every round."""
        return bool(self._most_required)

    def costs_of_drafts(self, round: Round, tokens_per_s: float = 0.0) -> DraftCosts:
        """The costs of drafts that this round verifies. tokens_per_s: what such rounds have emitted, 0 if unknown; a
        token of each sequence at least."""
        return self._costs_of_drafts(round.size.num_rows, round, tokens_per_s)

    def costs_of_next_drafts(self, round: Round, tokens_per_s: float) -> DraftCosts:
        """The costs of drafts that the next round verifies. Prompts that end in this one make no row of that one
        dearer."""
        num_rows = round.size.num_running if all(entry.emits for entry in round.entries) else round.size.num_rows
        return self._costs_of_drafts(num_rows, round, tokens_per_s)

    def _costs_of_drafts(self, num_rows: int, round: Round, tokens_per_s: float) -> DraftCosts:
        """num_rows: of a round without drafts."""
        num_running = round.size.num_running
        verify_s = self._step_times.times_of_drafts(num_rows, num_running, round.budget.rows + 1)
        target_s = float(verify_s[0])
        emitted = max(float(num_running), tokens_per_s * target_s)
        row_price = min(1.0, _ROW_CAUTION * price_of_a_row(emitted, 0.0, verify_s))
        return DraftCosts(emitted / target_s, row_price, target_s)

    def _choose_nodes(self, round: Round, chain_tokens: float, chain_rows: int, fixed_s: float) -> None:
        merged = self.merge(round)
        if merged is None:
            return
        max_nodes = np.array([entry.max_nodes for entry in round.entries], np.int32)
        num_required = int(np.count_nonzero(merged.nodes["is_required"]))
        room = min(len(merged) - num_required, max(0, round.budget.rows - chain_rows))
        expected_tokens = round.size.num_running + chain_tokens
        taken = chain_rows + num_required  # whatever is chosen
        verify_s = self._step_times.times_of_drafts(
            round.size.num_rows + taken, round.size.num_running + taken, room + 1
        )
        verify_s = verify_s[0] + _ROW_CAUTION * (verify_s - verify_s[0])
        chosen = choose_nodes(merged, max_nodes, expected_tokens, fixed_s, verify_s=verify_s)
        if round.budget.explores:
            most = _LAST_EXPLORE_ROUNDS if len(chosen) > num_required else _IDLE_EXPLORE_ROUNDS
            round.traffic.explore_rounds = min(most, round.traffic.explore_rounds * 2)
            rows = round.size.num_rows + chain_rows + len(chosen)
            beyond = self._step_times.next_unsure_rows(rows) - (round.size.num_rows + taken)
            chosen = choose_nodes(merged, max_nodes, expected_tokens, fixed_s, verify_s=verify_s, min_rows=beyond)
        round.chosen = chosen
        start = chosen.start.tolist()
        token_ids, parents = (np.ascontiguousarray(chosen.nodes[field]) for field in ("token_id", "parent"))
        confidence = chosen.nodes["probability"].astype(np.float32)
        for index, entry in enumerate(round.entries):
            if start[index + 1] > start[index]:
                entry.node_start, entry.node_end = start[index], start[index + 1]
                nodes = slice(entry.node_start, entry.node_end)
                entry.tree = DraftTree(token_ids[nodes], parents[nodes], confidence[nodes])


def _decision_of(round: Round) -> PlannerDecision:
    if any(len(entry.tree) for entry in round.entries):
        return "explored" if round.budget.explores else "drafted"
    if any(entry.proposals or entry.chain for entry in round.entries):
        return "declined"
    if round.budget.rows:
        return "nothing_proposed"
    return "no_row_pays" if round.budget.wanted else "not_wanted"


def _outcome(round: Round, emitted: list[Emitted], num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Which nodes of the round's trees were verified, and which of them accepted: bool [num_nodes] each."""
    was_verified, was_accepted = np.zeros(num_nodes, np.bool_), np.zeros(num_nodes, np.bool_)
    for index, _, path in emitted:
        entry = round.entries[index]
        if entry.num_chain:
            continue
        was_verified[entry.node_start : entry.node_start + entry.num_verified] = True
        if path:
            was_accepted[entry.node_start : entry.node_end][path] = True
    return was_verified, was_accepted


def _num_of(masks: np.ndarray, sources: SequenceOf[int]) -> int:
    """Nodes that nobody but these sources proposed. masks: sources of each node, int64 [n]."""
    own = sum(1 << source for source in sources)
    return int(np.count_nonzero((masks & ~own) == 0)) if own else 0


def _attributable(own: int, masks: list[int]) -> int:
    """Accepted nodes attributable to the sources of the mask `own`: everything from the first node that only they
    proposed. masks: sources of the nodes of an accepted path."""
    return next((len(masks) - index for index, mask in enumerate(masks) if mask and not mask & ~own), 0)

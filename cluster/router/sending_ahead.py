"""Rounds sent ahead: the router sends the next round while the target computes one, so that the target never waits.

What may follow a sequence is one tree, of what its drafters propose behind its committed tokens. When a round is done,
the target walks that tree with the emitted tokens; what lies behind them is the draft of the next round. The router
does the same with the result (`actors.round_ahead`), so a round sent ahead is committed like any other.

Only rounds in which all running sequences decode are followed by one sent ahead, and only where drafts come from CPU
drafters or nowhere: the rejection rule, draft heads and draft models need the tokens before they draft, and grammars
before they mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import AheadItem, VerifyAhead, VerifyBatch, VerifyResult
from actors.round_ahead import Picked, is_carried_out, parents_behind, pick, warm_up
from cluster.router.ahead_trial import AheadTrial
from cluster.router.counters import RouterCounters
from cluster.router.draft_choice import DraftChoice
from cluster.router.drafting import Drafting
from cluster.router.merged_trees import MergedTrees
from cluster.router.open_requests import OpenRequests
from cluster.router.round import Emitted, Round, RoundEntry, RoundSize
from cluster.router.scheduler import Scheduler
from cluster.router.sequence import Sequence

_KEPT_WEIGHT = 0.2
_PROBES = 16  # rounds; one of so many is sent ahead though it will hardly be carried out, which costs a message
_GAIN_WEIGHT = 0.2  # weight of a new measurement of what a draft brings
_FIRST_PROMISES = 16.0  # tokens that are taken as promised and brought before any were
_PROMISE_DECAY = 0.97  # with each round
_MOST_TRUST = 4.0


@dataclass(frozen=True, slots=True)
class _Sent:
    message: VerifyAhead
    planned: Round  # as if it followed the tokens that were committed when it was sent
    index_of: dict[int, int]  # entry of `planned`, by sequence id
    merged: MergedTrees | None  # the trees in the message


class _Promises:
    """What drafts of rounds that were sent ahead have promised by their probabilities, and brought. Those are taken
    from behind deep nodes, of which the calibration sees few: they may be too high, and too low in text that repeats
    itself."""

    def __init__(self) -> None:
        self._promised, self._brought = _FIRST_PROMISES, _FIRST_PROMISES

    @property
    def trust(self) -> float:
        return min(_MOST_TRUST, self._brought / self._promised)

    def observe(self, promised: float, brought: float) -> None:
        self._promised = self._promised * _PROMISE_DECAY + promised
        self._brought = self._brought * _PROMISE_DECAY + brought


class SendingAhead:
    """A round calls `plan` while the target computes it, then `begin` with its result, and `observe` when it is
    committed."""

    def __init__(
        self,
        mode: Literal["auto", "on", "off"],
        *,
        choice: DraftChoice,
        counters: RouterCounters,
        drafting: Drafting,
        requests: OpenRequests,
        scheduler: Scheduler,
    ) -> None:
        self.trial = AheadTrial()
        self._mode = mode
        self._choice = choice
        self._counters = counters
        self._drafting = drafting
        self._requests = requests
        self._scheduler = scheduler
        self._promises = _Promises()
        # Share of what drafts bring that those of a round sent ahead bring, typically. All, until rounds have shown it:
        # the target declines those that are too poor.
        self._kept = 1.0
        self._sent: _Sent | None = None
        self._committed_at: float | None = None  # when the last round ended, if the next followed at once
        if mode != "off":
            warm_up()

    @property
    def is_on(self) -> bool:
        return self._mode == "on" or (self._mode == "auto" and self.trial.is_on)

    def plan(self, round: Round, round_id: int, now: float) -> VerifyAhead | None:
        """The message that sends the round after `round` ahead; None: it is planned when `round` is done."""
        self.drop()
        if not self.is_on or not self._may_follow(round, now):
            return None
        planned = _tentative_round(round_id, round, now)
        if not planned.entries:
            return None
        self._choice.set_budgets(planned)
        count = len(planned.entries)
        share = planned.budget.rows // count or min(1, planned.budget.rows)
        room = [min(entry.max_nodes, share) for entry in planned.entries]
        gains = [
            entry.sequence.drafts.gain if nodes else 0.0 for entry, nodes in zip(planned.entries, room, strict=True)
        ]
        most_lost = self.trial.wait_share * (count + sum(gains))  # what the target would compute while it waits
        if (1.0 - self._kept) * sum(gains) > most_lost and round_id % _PROBES:
            return None
        for entry in planned.entries:
            drafts = entry.sequence.drafts
            # Deeper than a round's draft: what lies before the emitted tokens is used up.
            entry.max_nodes = min(2 * drafts.max_tokens, entry.sequence.num_left - 1) if entry.max_nodes else 0
        self._drafting.cpu.propose(planned)
        merged = self._choice.merge(planned)
        message = VerifyAhead(
            round_id,
            round.round_id,
            [
                AheadItem(entry.seq_id, None if merged is None else merged.tree(index), room[index], gains[index])
                for index, entry in enumerate(planned.entries)
            ],
            self._requests.take_to_free(),
            self._drafting.num_successors_of(planned),
            self._choice.costs_of_drafts(planned).row_price,
            most_lost,
            self._promises.trust,
        )
        self._counters.ahead_sent += 1
        self._sent = _Sent(message, planned, {entry.seq_id: i for i, entry in enumerate(planned.entries)}, merged)
        return message

    def _may_follow(self, round: Round, now: float) -> bool:
        """Whether the next round can be planned before this one's result: everyone decodes, by CPU drafts alone."""
        running = self._scheduler.running
        if self._scheduler.may_admit:
            return False
        if len(self._scheduler.taking_part(self._scheduler.round_limit_s(now))) < len(running):
            return False
        # A round that explores is planned with its drafts at hand.
        if round.traffic.explore_in <= 1 or self._choice.requires_rows or self._drafting.remote.has_workers:
            return False
        taking_part = {entry.seq_id for entry in round.entries}
        return all(sequence.seq_id in taking_part for sequence in running) and all(
            entry.emits
            and entry.rows == 1
            and entry.is_coupled
            and entry.sequence.drafts.sources.head is None
            and entry.sequence.grammar is None
            and entry.sequence.begin.num_logprobs < 0
            and not entry.sequence.target.num_failed_rounds
            for entry in round.entries
        )

    def begin(self, batch: VerifyBatch, result: VerifyResult, now: float) -> tuple[Round, VerifyBatch] | None:
        """The round that the target computes after `batch`, and its batch. Call it when `batch` is committed.

        None: no round was sent ahead, or the target has declined it. Sequences that have ended, or that the target has
        lost, have no entries; the target's results for them are ignored.
        """
        sent = self._sent
        picked = None if sent is None else pick(sent.message, batch, result)
        if sent is not None and picked is not None:
            gain = sum(item.gain for item in sent.message.items)
            if gain:
                self._kept += _KEPT_WEIGHT * (1.0 - picked.lost / gain - self._kept)
        if sent is None or picked is None or not is_carried_out(sent.message, picked):
            self._counters.ahead_declined += picked is not None
            self.drop()
            return None
        self._counters.ahead_used += 1
        self._sent = None
        entries: list[RoundEntry] = []
        places: list[int] = []  # in `picked`
        for place, item in enumerate(picked.batch.items):
            sequence = sent.planned.entries[sent.index_of[item.delta.seq_id]].sequence
            length = item.delta.start + len(item.delta.token_ids)
            is_there = not sequence.progress.is_ended and sequence.seq_id == item.delta.seq_id
            if is_there and sequence.num_tokens == length and sequence.target.known == item.delta.start:
                entries.append(_decoding_entry(sequence, item.tree, target_known=item.delta.start))
                places.append(place)
                sequence.target.known = length
        count = len(entries)
        round = Round(
            sent.message.round_id,
            now,
            entries,
            sent.message.finished,
            RoundSize(count, len(self._scheduler.running), count),
            sent.planned.traffic,
        )
        round.is_ahead = round.is_assembled = True
        round.assembled_at = now
        if sent.merged is not None:
            round.chosen = _chosen(sent, sent.merged, picked, entries, places)
        return round, picked.batch

    def drop(self) -> None:
        """The round that was sent ahead is not begun."""
        if self._sent is not None:
            self._requests.to_free = self._sent.message.finished + self._requests.to_free
            self._sent = None

    def observe(self, round: Round, result: VerifyResult, emitted: list[Emitted], now: float) -> None:
        """Learn from a committed round."""
        if round.is_ahead:
            promised = 0.0 if round.chosen is None else float(round.chosen.nodes["probability"].sum(dtype=np.float64))
            self._promises.observe(promised, sum(len(path) for _, _, path in emitted))
        for index, _, path in emitted:
            drafts = round.entries[index].sequence.drafts
            # Drafts of rounds sent ahead are worse than those that are made when the tokens are known.
            if not round.is_ahead or len(path) > drafts.gain:
                drafts.gain += _GAIN_WEIGHT * (len(path) - drafts.gain)
        is_decoding = bool(round.entries) and all(entry.emits and entry.rows == 1 for entry in round.entries)
        if is_decoding and self._committed_at is not None and not result.is_new_shape:
            tokens = sum(round.entries[index].sequence.num_tokens - first for index, first, _ in emitted)
            self.trial.observe(tokens, now - self._committed_at, result.elapsed_s, not round.is_ahead)
        self._committed_at = now if is_decoding else None

    def pause(self) -> None:
        """No round follows at once, or none that can be compared."""
        self._committed_at = None


def _decoding_entry(sequence: Sequence, tree: DraftTree, target_known: int) -> RoundEntry:
    return RoundEntry(
        sequence,
        sequence.seq_id,
        sequence.num_tokens,
        rows=1,
        emits=True,
        is_coupled=True,
        target_known=target_known,
        max_nodes=len(tree.token_ids),
        tree=tree,
    )


def _tentative_round(round_id: int, round: Round, now: float) -> Round:
    """The round after `round`, as if it followed the tokens that are committed now."""
    entries = [
        _decoding_entry(entry.sequence, DraftTree.empty(), entry.sequence.num_tokens)
        for entry in round.entries
        # A sequence with one token left ends with `round`.
        if not entry.sequence.progress.is_ended and entry.sequence.num_left > 1
    ]
    count = len(entries)
    return Round(round_id, now, entries, [], RoundSize(count, count, count), round.traffic)


def _chosen(
    sent: _Sent, merged: MergedTrees, picked: Picked, entries: list[RoundEntry], places: list[int]
) -> MergedTrees | None:
    """The nodes of the round, with their probabilities after the tokens that were emitted; None: there are none."""
    start = np.zeros(len(entries) + 1, np.int32)
    parts = []
    for index, (entry, place) in enumerate(zip(entries, places, strict=True)):
        kept, root = picked.nodes[place], picked.roots[place]
        of_sequence = sent.index_of[entry.seq_id]
        tree = merged.nodes[merged.start[of_sequence] : merged.start[of_sequence + 1]]
        nodes = tree[kept]
        if len(kept):
            nodes["parent"] = parents_behind(tree["parent"], kept)
            nodes["depth"] -= tree["depth"][root]
            for field in ("best_confidence", "uncalibrated_probability", "probability"):
                nodes[field] = np.minimum(1.0, nodes[field] / max(float(tree[field][root]), 1e-9))
        parts.append(nodes)
        start[index + 1] = start[index] + len(kept)
        entry.node_start, entry.node_end = int(start[index]), int(start[index + 1])
    return MergedTrees(start, np.concatenate(parts)) if start[-1] else None

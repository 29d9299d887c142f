"""Applies the target's verdicts to the sequences of a round."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from actors.errors import InvalidRequest, Unavailable
from actors.messages import TARGET, Verdict, VerifyResult
from cluster.router.counters import RouterCounters
from cluster.router.emission import accepted_path, emit_tokens, note_rows, within_masks
from cluster.router.open_requests import OpenRequests
from cluster.router.prompt_scores import take_in
from cluster.router.round import Emitted, Round, RoundEntry
from cluster.router.sequence import Sequence

logger = logging.getLogger(__name__)

_MAX_SETBACKS = 16  # consecutive rounds without progress after which a request fails


class TakenVerdicts(NamedTuple):
    emitted: list[Emitted]
    finished: list[Sequence]
    starved: list[RoundEntry]  # the target had no KV blocks for them


class Verdicts:
    def __init__(
        self, requests: OpenRequests, counters: RouterCounters, source_names: SequenceOf[str], vocab_size: int
    ) -> None:
        self._requests = requests
        self._counters = counters
        self._source_names = source_names
        self._vocab_size = vocab_size
        self._has_warned = False

    def take(self, round: Round, result: VerifyResult, now: float) -> TakenVerdicts:
        """Commit and emit tokens. Sequences that the target lost, or with an invalid verdict, start over."""
        verdicts = {verdict.seq_id: verdict for verdict in result.verdicts}
        stale, starved = set(result.stale_seq_ids), set(result.starved_seq_ids)
        taken = TakenVerdicts([], [], [])
        for index, entry in enumerate(round.entries):
            sequence = entry.sequence
            if sequence.progress.is_cancelled or sequence.progress.is_ended:
                continue  # emits nothing more
            if entry.seq_id in stale:
                self._counters.stale_sequences += 1
                self._restart(sequence, now)
                continue
            if entry.seq_id in starved:
                taken.starved.append(entry)
                continue
            verdict = verdicts.get(entry.seq_id)
            path = accepted_path(entry, verdict, self._vocab_size)
            if verdict is None or path is None:
                self._warn(entry, verdict)
                self._restart(sequence, now)
                continue
            if sequence.begin.num_prompt_logprobs >= 0 and not take_in(entry, verdict):
                self._warn(entry, verdict)
                self._restart(sequence, now)
                continue
            path, verdict = within_masks(entry, path, verdict)
            entry.num_verified = verdict.num_nodes
            note_rows(sequence, entry, verdict)
            if verdict.next_token < 0:
                if not sequence.target.compute_prompt(verdict.num_computed):
                    self._count_setback(sequence, now)
                continue
            emitted = Emitted(index, sequence.num_tokens, path)
            try:
                has_finished = self._emit(round, entry, path, verdict, now=now)
            except InvalidRequest as error:
                self._requests.fail(sequence, error, now)
                continue
            taken.emitted.append(emitted)
            if has_finished:
                taken.finished.append(sequence)
        return taken

    def _emit(self, round: Round, entry: RoundEntry, path: list[int], verdict: Verdict, *, now: float) -> bool:
        """Returns whether the sequence has finished. Raises what `emit_tokens` raises."""
        progress, counters = entry.sequence.progress, self._counters
        if progress.chunk_index == 0 and progress.started_at is not None:
            progress.first_at = now
            counters.queue_time.observe(progress.started_at - progress.arrived_at)
            counters.prefill_time.observe(now - progress.started_at)
        chunk = emit_tokens(round, entry, path, verdict, source_names=self._source_names, now=now)
        for source in chunk.sources:
            if source is not TARGET:
                counters.accepted_tokens[source] += 1
        counters.draft_tokens += entry.num_verified
        counters.emitted_tokens += len(chunk.token_ids)
        self._requests.emit(chunk)
        return chunk.finish_reason is not None

    def _warn(self, entry: RoundEntry, verdict: Verdict | None) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the verdict on sequence %d is absent or impossible, it starts over; the next ones are not logged: %r",
                entry.seq_id,
                verdict,
            )

    def _restart(self, sequence: Sequence, now: float) -> None:
        sequence.target.lost()
        self._count_setback(sequence, now)

    def _count_setback(self, sequence: Sequence, now: float) -> None:
        sequence.target.num_setbacks += 1
        if sequence.target.num_setbacks >= _MAX_SETBACKS and not sequence.progress.is_ended:
            error = Unavailable(f"the target made no progress on the request in {_MAX_SETBACKS} rounds")
            self._requests.fail(sequence, error, now)

"""Teaches drafters and draft workers from the rows of a round."""

from __future__ import annotations

from actors.messages import VerifyResult
from cluster.router.drafting import Drafting
from cluster.router.guarded_sink import SharedLearning
from cluster.router.learning import rows_of_prompt, rows_of_round, successors_of
from cluster.router.round import Emitted, Round
from cluster.router.scheduler import Scheduler
from cluster.router.sequence import Sequence

_MAX_TAUGHT_ROWS = 2048  # prompt rows a round: drafters learn about half a million a second, and all sequences wait


class Teaching:
    def __init__(self, drafting: Drafting, scheduler: Scheduler, shared: SharedLearning, vocab_size: int) -> None:
        self._drafting = drafting
        self._scheduler = scheduler
        self._soft_sharing = shared.soft_sharing
        self._vocab_size = vocab_size

    def teach(self, round: Round, result: VerifyResult, emitted: list[Emitted]) -> None:
        """Drafters and draft workers learn from every row the target computed; drafters also from finished prompts."""
        if not self._drafting.num_successors_of(round):
            return
        count = self._drafting.cpu.num_successors
        entries = [round.entries[found.entry_index] for found in emitted]
        if count:
            self._teach_prompts([entry.sequence for entry in entries], count)
        successors = successors_of(result, self._vocab_size)
        if successors is None:
            return
        self._drafting.remote.keep_corrections(entries, result, successors[0])
        if count:
            for rows in rows_of_round(result, entries, successors, self._shares_prompts):
                self._drafting.cpu.remember(rows)

    def _teach_prompts(self, sequences: list[Sequence], num_successors: int) -> None:
        """Teach a part of a long prompt each round; sequences with the same prompt share the work."""
        left = _MAX_TAUGHT_ROWS
        for sequence in sequences:
            last = sequence.num_prompt - 1
            if sequence.drafts.num_taught >= last or not left:
                continue
            begin = max(other.drafts.num_taught for other in self._scheduler.running if other.has_prompt_of(sequence))
            end = min(last, begin + left)
            sequence.drafts.num_taught = end
            if begin < end:
                rows = rows_of_prompt(
                    sequence.tokens()[: sequence.num_prompt],
                    num_successors,
                    begin,
                    end,
                    namespace=sequence.namespace,
                    seq_id=sequence.seq_id,
                    may_share=self._shares_prompts and sequence.request.cache == "read_write",
                )
                self._drafting.cpu.remember(rows)
                left -= end - begin

    @property
    def _shares_prompts(self) -> bool:
        return self._soft_sharing is not None and self._soft_sharing.shares_prompts

"""The target's KV blocks, and what happens when sequences lack them."""

from __future__ import annotations

from actors.errors import InvalidRequest
from actors.messages import VerifyResult
from cluster.router.failed_rounds import suspend_drafts
from cluster.router.open_requests import OpenRequests
from cluster.router.round import Round, RoundEntry
from cluster.router.scheduler import Scheduler


class TargetBlocks:
    """`free` and `total`: as the target last reported; 0 before its first answer."""

    def __init__(self, block_size: int, scheduler: Scheduler, requests: OpenRequests) -> None:
        """block_size: tokens per block."""
        self.free = 0
        self.total = 0
        self._block_size = block_size
        self._scheduler = scheduler
        self._requests = requests

    def observe(self, result: VerifyResult) -> None:
        self.free, self.total = result.free_blocks, result.total_blocks

    @property
    def used_share(self) -> float:
        return 1.0 - self.free / self.total if self.total else 0.0

    @property
    def num_tokens(self) -> int:
        """That the target's KV cache holds."""
        return self.total * self._block_size

    def handle_out_of_blocks(self, round: Round, starved: list[RoundEntry], now: float) -> None:
        """Starved sequences first go without drafts; if that is not enough, the youngest sequence is preempted.

        The oldest sequence is never preempted while another runs, so it gets all blocks in the end: no livelock. A
        sequence longer than all blocks can never finish and fails. One that runs alone, lacks blocks and would fit
        waits: a lost router holds them, and the target frees them after a while.
        """
        needs_room = False
        for entry in starved:
            suspend_drafts(entry.sequence, round.round_id)
            needs_room |= not len(entry.tree.token_ids)
            entry.sequence.target.known = entry.target_known  # the target left the sequence as it was
        if not needs_room:
            return
        self._scheduler.note_memory_pressure()
        running = self._scheduler.running
        if len(self._scheduler.held) > 1:
            self._requests.preempt_youngest()
            return
        room = self.num_tokens
        if running and round.size.num_running == 1 and running[0].num_tokens > room:
            length = f"{running[0].num_tokens} tokens with its output"
            limit = f"the target's KV cache holds {room} tokens"
            self._requests.fail(
                running[0], InvalidRequest("prompt", length, limit, code="context_length_exceeded"), now
            )

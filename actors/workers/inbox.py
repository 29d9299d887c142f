"""The messages of a worker's link, in the order in which they are handled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from actors.errors import LinkError
from actors.links.server import Peer
from actors.messages import MasksSource, Message, RoundMasks, VerifyBatch

MASKS_TIMEOUT_S = 5.0  # a router computes them in milliseconds; meanwhile all other routers wait
_SLICE_S = 0.2  # delay of a stop while masks are waited for
_MOST_WAITING = 1024  # messages; a router has few on their way


class Inbox:
    """Takes messages off the link. A round that waits for its masks takes them out of turn; what arrives before them
    waits. For one thread."""

    def __init__(
        self,
        receive: Callable[[float], tuple[Peer, Message] | None],
        has_stopped: Callable[[], bool] = lambda: False,
        timeout_s: float = MASKS_TIMEOUT_S,
    ) -> None:
        """receive: gives the next message within so many seconds. timeout_s: the longest wait for masks."""
        self.receive = receive
        self.waiting: deque[tuple[Peer, Message]] = deque()
        self._has_stopped = has_stopped
        self._timeout_s = timeout_s

    def next(self, timeout_s: float) -> tuple[Peer, Message] | None:
        """The message that has waited longest, or the next one of the link within so many seconds."""
        return self.waiting.popleft() if self.waiting else self.receive(timeout_s)

    def masks_of(self, peer: Peer, batch: VerifyBatch) -> MasksSource | None:
        """What waits for the masks of this router's batch; None: none follow."""
        return partial(self._wait_for_masks, peer, batch.round_id) if batch.masks_follow else None

    def _wait_for_masks(self, peer: Peer, round_id: int) -> RoundMasks:
        for index, (sender, message) in enumerate(self.waiting):
            if sender == peer and isinstance(message, RoundMasks) and message.round_id == round_id:
                del self.waiting[index]
                return message
        until = time.monotonic() + self._timeout_s
        while (left := until - time.monotonic()) > 0 and not self._has_stopped():
            received = self.receive(min(left, _SLICE_S))
            if received is None:
                continue
            sender, message = received
            if sender != peer or not isinstance(message, RoundMasks):
                self._keep(sender, message, round_id)
            elif message.round_id == round_id:  # else it belongs to a round that has ended
                return message
        raise LinkError(f"the masks of round {round_id} did not come within {self._timeout_s:g} s")

    def _keep(self, sender: Peer, message: Message, round_id: int) -> None:
        if len(self.waiting) >= _MOST_WAITING:
            raise LinkError(f"{len(self.waiting)} messages wait for the masks of round {round_id}; that is the limit")
        self.waiting.append((sender, message))

"""The actor of one rank of a target group. Its process does not import Ray Serve, which would delay its start."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ray.util import get_node_ip_address

from actors.imports import collecting_no_garbage
from actors.logs import ObservabilityConfig, configure_logging
from actors.workers.directory import WorkerEntry
from actors.workers.gpus import rank_device
from actors.workers.registration import Registration
from actors.workers.settings import TargetSettings

if TYPE_CHECKING:
    from actors.workers.target_worker import TargetWorker


@dataclass(frozen=True, slots=True)
class RankHealth:
    failure: str | None
    num_batches: int  # progress; only rank 0 counts
    # Duration of the current batch; 0 between batches, and on other ranks. In a hanging group, rank 0 shows it, because
    # it waits for the others.
    busy_s: float
    process_id: int
    turn_s: float = 0.0  # duration of the loop's current turn, in a batch or not


class TargetRank:
    """Actor of one rank. Rank 0 registers in the directory when the whole group serves."""

    def __init__(
        self, settings: TargetSettings, rank: int, incarnation: int, observability: ObservabilityConfig | None = None
    ) -> None:
        if observability is not None:
            configure_logging(observability, f"target rank {rank}")
        with collecting_no_garbage():
            from actors.workers.target_worker import TargetWorker  # only here: the group's own process computes nothing

        device = rank_device(settings.options.device)
        if device != settings.options.device:
            settings = replace(settings, options=settings.options.model_copy(update={"device": device}))
        self._worker: TargetWorker = TargetWorker(settings, rank, incarnation)
        self._incarnation = incarnation
        self._model = settings.fingerprint
        self._registration: Registration | None = None

    def open_meeting(self) -> tuple[str, int]:
        """Host and port on rank 0's node by which the ranks find each other."""
        return self._worker.open_meeting(get_node_ip_address())

    def load(self, meeting: tuple[str, int] | None) -> None:
        self._worker.load(meeting)

    def start(self, directory_name: str, worker_id: str) -> None:
        self._worker.start(get_node_ip_address())
        if self._worker.server is not None:
            entry = WorkerEntry(
                role="target",
                worker_id=worker_id,
                address=self._worker.server.address,
                incarnation=self._incarnation,
                model=self._model,
            )
            self._registration = Registration(directory_name, entry, self._worker.server)

    def health(self) -> RankHealth:
        failure, loop = self._worker.failure, self._worker.loop
        if loop is None:
            return RankHealth(failure, 0, 0.0, os.getpid())
        return RankHealth(failure, loop.num_batches, loop.busy_s, os.getpid(), turn_s=loop.turn_s)

    def announce_leaving(self) -> None:
        if self._registration is not None:
            self._registration.announce_leaving()

    def stop(self) -> None:
        if self._registration is not None:
            self._registration.leave()
        self._worker.stop()

"""The ranks of a draft worker on Ray: rank 0 is the replica of its deployment, the others are actors beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from actors.engine.rank_group import join_group, leave_group, open_meeting
from actors.engine.shared_ring import RingWriter
from actors.errors import Unavailable
from actors.logs import ObservabilityConfig, configure_logging
from actors.models.loader import choose_device
from actors.workers.draft_worker import DraftFollower
from actors.workers.gpus import rank_device
from actors.workers.rank_options import rank_options
from actors.workers.settings import DraftSettings

_LOAD_WITHIN_S = 600.0  # ranks load at different speeds
_ANSWER_WITHIN_S = 5.0
_SAY_WITHIN_S = 2.0  # after a failed load, what went wrong on another rank


class DraftRank:
    """Actor of rank 1 or higher."""

    def __init__(self, settings: DraftSettings, rank: int, observability: ObservabilityConfig | None) -> None:
        if observability is not None:
            configure_logging(observability, f"draft rank {rank}")
        device = rank_device(settings.options.device)
        settings = replace(settings, options=settings.options.model_copy(update={"device": device}))
        self._follower = DraftFollower(settings, rank)

    def load(self, meeting: tuple[str, int]) -> None:
        self._follower.load(meeting, _LOAD_WITHIN_S)

    def failure(self) -> str | None:
        return self._follower.failure


class DraftRanks:
    """Ranks 1 and up of a draft worker, whose rank 0 is this process. They are gone with it."""

    def __init__(
        self, settings: DraftSettings, group: PlacementGroup | None, observability: ObservabilityConfig | None
    ) -> None:
        """group: with a bundle for each rank."""
        self._options = settings.options
        remote_rank = ray.remote(DraftRank)
        self._ranks = [
            remote_rank.options(**rank_options(settings.options, group, rank)).remote(settings, rank, observability)
            for rank in range(1, settings.options.tensor_parallel)
        ]
        self._loads: list[ray.ObjectRef[None]] = []

    def join(self, host: str) -> RingWriter:
        """Enter the group as rank 0, and let the others load; the caller loads next. Raises Ray's error if one did not
        start."""
        ray.get([rank.failure.remote() for rank in self._ranks], timeout=_LOAD_WITHIN_S)
        store = open_meeting(host, _LOAD_WITHIN_S)
        self._loads = [rank.load.remote((host, store.port)) for rank in self._ranks]
        ranks, device = self._options.tensor_parallel, choose_device(self._options.device)
        ring = join_group(store, 0, ranks, device, _LOAD_WITHIN_S)
        assert isinstance(ring, RingWriter)
        return ring

    def load_error(self) -> Exception | None:
        """The error of another rank, which makes rank 0's load fail as well; None if none has."""
        done, _ = ray.wait(self._loads, num_returns=len(self._loads), timeout=_SAY_WITHIN_S) if self._loads else ([], 0)
        for load in done:
            try:
                ray.get(load)
            except RayTaskError as error:
                return error.cause if isinstance(error.cause, Exception) else error
            except RayError as error:
                return error
        return None

    async def check(self) -> None:
        """Raises Unavailable if a rank follows no more or is silent, Ray's error when one is gone."""
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                failures = await asyncio.gather(*(rank.failure.remote() for rank in self._ranks))
        except TimeoutError:
            raise Unavailable(f"draft worker: a rank did not answer within {_ANSWER_WITHIN_S:g} s") from None
        for rank, failure in enumerate(failures, 1):
            if failure is not None:
                raise Unavailable(f"draft rank {rank}: {failure}")

    def end(self) -> None:
        """Kill the actors and leave the group."""
        for rank in self._ranks:
            ray.kill(rank)
        leave_group()

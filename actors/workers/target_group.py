"""The target group on Ray: the Serve deployment that owns an actor for each rank."""

from __future__ import annotations

import asyncio
import logging
import secrets

import ray
from ray import serve
from ray.util import get_current_placement_group

from actors.errors import Unavailable
from actors.logs import ObservabilityConfig, configure_logging
from actors.workers.autoscaling import AutoscalingConfig, TargetPolicy, replica_options
from actors.workers.demand_reader import DemandReader
from actors.workers.quiet_watch import LONGEST_LEAVE_S, QuietWatch
from actors.workers.rank_options import rank_bundle, rank_options
from actors.workers.settings import TargetSettings
from actors.workers.target_rank import RankHealth, TargetRank

logger = logging.getLogger(__name__)

_LEAVE_POLL_S = 0.05
_STOP_S = 5.0


def check_ranks(ranks: list[RankHealth], batch_limit_s: float) -> None:
    """Raises Unavailable if a rank no longer serves, or if a batch or another turn of its loop exceeds the limit."""
    for rank, health in enumerate(ranks):
        if health.failure is not None:
            raise Unavailable(f"target rank {rank}: {health.failure}")
        if health.busy_s > batch_limit_s:
            raise Unavailable(
                f"target rank {rank}: a batch has been running for {health.busy_s:.1f} s, "
                f"the limit is {batch_limit_s:g} s"
            )
        if health.turn_s > batch_limit_s:
            raise Unavailable(
                f"target rank {rank}: its loop has stood still for {health.turn_s:.1f} s, outside of a batch; "
                f"the limit is {batch_limit_s:g} s"
            )


class TargetGroup:
    """Serve deployment whose replicas are the groups. It starts the ranks, and fails its health check if one of them is
    gone, silent for `health_timeout_s` or busy with a batch for longer than `batch_limit_s`, so that Serve restarts the
    whole group. It handles no HTTP requests. Before it stops, it notifies the routers, and answers until its router has
    left."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: TargetSettings,
        directory_name: str,
        *,
        batch_limit_s: float,
        observability: ObservabilityConfig | None = None,
    ) -> None:
        if observability is not None:
            configure_logging(observability, "target")
        self._demand = DemandReader(directory_name, lambda directory: directory.target_demand.remote())
        self._batch_limit_s = batch_limit_s
        self._health_timeout_s = settings.options.health_timeout_s
        self._is_healthy = True
        incarnation = secrets.randbits(62)
        worker_id = f"target-{incarnation:x}"
        group = get_current_placement_group()
        remote_rank = ray.remote(TargetRank)
        self._ranks = []
        for rank in range(settings.options.tensor_parallel):
            options = rank_options(settings.options, group, rank + 1)
            self._ranks.append(remote_rank.options(**options).remote(settings, rank, incarnation, observability))
        try:
            async with asyncio.timeout(settings.options.start_timeout_s):
                meeting = await self._ranks[0].open_meeting.remote() if len(self._ranks) > 1 else None
                await asyncio.gather(*(rank.load.remote(meeting) for rank in self._ranks))
                # Rank 0 last: it is in the directory only when the others listen.
                await asyncio.gather(*(rank.start.remote(directory_name, worker_id) for rank in self._ranks[1:]))
                await self._ranks[0].start.remote(directory_name, worker_id)
        except TimeoutError:
            limit_s = settings.options.start_timeout_s
            raise Unavailable(f"the target group did not start within {limit_s:g} s") from None

    async def health(self) -> list[RankHealth]:
        """Health of every rank. Raises Unavailable when one does not answer in time, Ray's error when one is gone."""
        return list(await asyncio.gather(*map(self._health_of, range(len(self._ranks)))))

    async def check_health(self) -> None:
        try:
            check_ranks(await self.health(), self._batch_limit_s)
        except Exception:
            self._is_healthy = False
            raise
        self._is_healthy = True

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Signals of `TargetPolicy`: the routers' demand on all groups, and the number of groups that was set by hand.
        Empty while the directory does not answer, so that the number of groups stays."""
        demand = await self._demand.read()
        if demand is None:
            return {}
        return {"queue_s": demand.queue_s, "used_share": demand.used_share, "held": demand.held}

    async def _health_of(self, rank: int) -> RankHealth:
        try:
            async with asyncio.timeout(self._health_timeout_s):
                return await self._ranks[rank].health.remote()
        except TimeoutError:
            raise Unavailable(f"target rank {rank}: no answer within {self._health_timeout_s:g} s") from None

    async def __del__(self) -> None:
        if not self._is_healthy:
            return  # rank 0 may wait for a hanging rank; Ray kills all ranks
        try:
            async with asyncio.timeout(LONGEST_LEAVE_S + _STOP_S):
                await self._ranks[0].announce_leaving.remote()
                await self._wait_until_quiet()
                await self._ranks[0].stop.remote()
        except Exception as error:
            logger.info("the target group was gone before it was stopped: %r", error)

    async def _wait_until_quiet(self) -> None:
        watch = QuietWatch()
        while True:
            health = await self._health_of(0)
            if watch.is_over(health.num_batches, bool(health.busy_s)):
                return
            await asyncio.sleep(_LEAVE_POLL_S)


def target_group_application(
    settings: TargetSettings,
    directory_name: str,
    *,
    batch_limit_s: float,
    scaling: AutoscalingConfig | None = None,
    observability: ObservabilityConfig | None = None,
) -> serve.Application:
    """The target groups of one model as a Serve application: `groups` of them, or up to `max_groups` by `TargetPolicy`.

    Serve restarts a group if a batch takes longer than `batch_limit_s`, or if a rank does not answer within
    `health_timeout_s`, three times in a row. The placement group of each has a bundle for the replica and one for each
    rank. When it is removed, Ray kills the ranks, including hanging ones.
    """
    options = settings.options
    scaling = scaling or AutoscalingConfig()
    limits = {"queue_s": scaling.target_queue_s, "used_share": scaling.target_used_share}
    deployment = serve.deployment(TargetGroup).options(
        name="TargetGroup",
        **replica_options(options.groups, options.most_groups, scaling=scaling, policy=TargetPolicy, limits=limits),
        ray_actor_options={"num_cpus": 0.1},
        placement_group_bundles=[{"CPU": 0.1}, *([rank_bundle(options)] * options.tensor_parallel)],
        placement_group_strategy="STRICT_PACK",  # ranks exchange activations twice a layer
        health_check_period_s=1.0,
        health_check_timeout_s=options.health_timeout_s + 5.0,
        graceful_shutdown_wait_loop_s=0.1,  # there are no requests to wait for
        graceful_shutdown_timeout_s=LONGEST_LEAVE_S + _STOP_S + 1.0,
    )
    return deployment.bind(settings, directory_name, batch_limit_s=batch_limit_s, observability=observability)

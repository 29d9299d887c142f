"""Target groups and draft workers of a simulated cluster that come and go by the policies of production."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.workers.autoscaling import DraftPolicy, TargetPolicy
from actors.workers.demand import combined_drafts, combined_targets
from cluster.config import ClusterConfig
from cluster.simulate.draft_workers import DraftPool
from cluster.simulate.events import Events
from cluster.simulate.rounds import Group
from cluster.simulate.scaling import Autoscaler


class ClusterScaling:
    """What the configuration lets vary."""

    def __init__(
        self,
        events: Events,
        config: ClusterConfig,
        groups: Mapping[str, Group],
        draft_pool: DraftPool,
        *,
        start_s: float,
        start_group: Callable[[], object],
        stop_group: Callable[[Group], object],
        scales_drafts: bool,
    ) -> None:
        """groups: those that take requests, a mapping that changes with start_group and stop_group. start_s: until one
        that is wanted is there."""
        self._events = events
        self._groups = groups
        self._draft_pool = draft_pool
        self._start_s = start_s
        self._start_group = start_group
        self._stop_group = stop_group
        self._drafted_s: dict[str, float] = {}  # by worker, when it was last looked at
        scaling, target, draft = config.autoscaling, config.target, config.draft
        delays = {"upscale_delay_s": scaling.upscale_delay_s, "downscale_delay_s": scaling.downscale_delay_s}
        if target.most_groups > target.groups:
            self._group_scaler = Autoscaler(
                events,
                TargetPolicy(
                    fewest=target.groups,
                    most=target.most_groups,
                    queue_s=scaling.target_queue_s,
                    used_share=scaling.target_used_share,
                    **delays,
                ),
                look_back_s=scaling.look_back_s,
                current=lambda: len(groups),
                signals=self._target_signals,
                resize=self._resize_groups,
            )
        if scales_drafts and draft_pool.workers and draft.most_workers > draft.workers:
            self._worker_scaler = Autoscaler(
                events,
                DraftPolicy(
                    fewest=draft.workers,
                    most=draft.most_workers,
                    busy_share=scaling.draft_busy_share,
                    late_share=scaling.draft_late_share,
                    min_gain=scaling.draft_min_gain,
                    **delays,
                ),
                look_back_s=scaling.look_back_s,
                current=lambda: len(draft_pool.workers),
                signals=self._draft_signals,
                resize=self._resize_workers,
            )

    def _target_signals(self) -> Mapping[str, float]:
        told = [demand for group in self._groups.values() if (demand := group.target_demand()) is not None]
        demand = combined_targets(told)
        return {"queue_s": demand.queue_s, "used_share": demand.used_share}

    def _draft_signals(self) -> Mapping[str, float] | None:
        workers = self._draft_pool.workers
        if not workers:
            return None
        demand = combined_drafts(group.draft_demand() for group in self._groups.values())
        before, self._drafted_s = self._drafted_s, {name: worker.server.busy_s for name, worker in workers.items()}
        shares = [min(1.0, busy_s - before.get(name, busy_s)) for name, busy_s in self._drafted_s.items()]
        return {
            "busy_share": sum(shares) / len(shares),
            "late_share": demand.late_share,
            "gain": demand.gain,
            "loss": demand.loss,
        }

    def _resize_groups(self, wanted: int) -> None:
        for _ in range(wanted - len(self._groups)):
            self._events.after(self._start_s, self._start_wanted_group)
        for group in list(self._groups.values())[wanted:]:
            self._stop_group(group)

    def _start_wanted_group(self) -> None:
        if len(self._groups) < self._group_scaler.target:
            self._start_group()

    def _resize_workers(self, wanted: int) -> None:
        for _ in range(wanted - len(self._draft_pool.workers)):
            self._events.after(self._start_s, self._start_wanted_worker)
        for _ in range(len(self._draft_pool.workers) - wanted):
            self._draft_pool.stop_youngest()

    def _start_wanted_worker(self) -> None:
        if len(self._draft_pool.workers) < self._worker_scaler.target:
            self._draft_pool.start()

"""The draft workers on Ray: a Serve deployment whose replicas are the workers."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ray import serve
from ray.util import get_node_ip_address

from actors.errors import Unavailable
from actors.logs import ObservabilityConfig, configure_logging
from actors.workers.autoscaling import AutoscalingConfig, DraftPolicy, replica_options
from actors.workers.demand import DraftDemand
from actors.workers.directory import DemandReader, WorkerEntry
from actors.workers.quiet_watch import LONGEST_LEAVE_S, QuietWatch
from actors.workers.registration import Registration
from actors.workers.settings import DraftSettings

if TYPE_CHECKING:
    from actors.workers.draft_worker import DraftWorker

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_TURN_LIMIT_S = 120.0  # limit of a turn of the worker's loop: on a CPU, a long prompt takes many seconds
_LEAVE_POLL_S = 0.05


class DraftReplica:
    """Serve deployment: waits for the draft model's directory, then serves the model and registers it.

    It handles no HTTP requests. Until the model exists, the cluster decodes without this worker. Before it stops, it
    tells the routers, and answers until they send nothing more.
    """

    def __init__(
        self, settings: DraftSettings, directory_name: str, observability: ObservabilityConfig | None = None
    ) -> None:
        if observability is not None:
            configure_logging(observability, "draft")
        self._settings = settings
        self._directory_name = directory_name
        self._worker: DraftWorker | None = None
        self._registration: Registration | None = None
        self._error: str | None = None
        self._demand = DemandReader(directory_name, lambda directory: directory.draft_demand.remote())
        self._held = 0
        self._recorded = (time.monotonic(), 0.0)  # when the busy share was last recorded, and the busy time then
        self._stopping = threading.Event()
        self._starting = threading.Thread(target=self._start, name="draft worker start", daemon=True)
        self._starting.start()

    def health(self) -> dict[str, object]:
        batches = self._worker.loop.num_batches if self._worker is not None else 0
        return {"process_id": os.getpid(), "serving": self._worker is not None, "num_batches": batches}

    def check_health(self) -> None:
        if self._error is not None:
            raise Unavailable(f"draft worker: {self._error}")
        if self._worker is not None and self._worker.failure is not None:
            raise Unavailable(f"draft worker: {self._worker.failure}")
        if self._worker is not None and self._worker.loop.turn_s > _TURN_LIMIT_S:
            raise Unavailable(f"draft worker: its loop has stood still for {self._worker.loop.turn_s:.1f} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Signals of `DraftPolicy`: this worker's busy share since the last call, the routers' demand, which is 0
        while the directory does not answer, and the number of workers that was set by hand."""
        demand = await self._demand.read() or DraftDemand(held=self._held)
        self._held = demand.held
        return {
            "held": demand.held,
            "busy_share": self._busy_share(),
            "late_share": demand.late_share,
            "gain": demand.gain,
            "loss": demand.loss,
        }

    def __del__(self) -> None:
        self._stopping.set()
        if self._registration is not None:
            self._registration.announce_leaving()
            self._wait_until_quiet()
            self._registration.leave()
        if self._worker is not None:
            self._worker.stop()

    def _busy_share(self) -> float:
        now, busy_s = time.monotonic(), self._worker.loop.busy_total_s if self._worker is not None else 0.0
        (before, busy_before_s), self._recorded = self._recorded, (now, busy_s)
        return min(1.0, max(0.0, busy_s - busy_before_s) / max(now - before, 1e-3))

    def _wait_until_quiet(self) -> None:
        worker, watch = self._worker, QuietWatch()
        while worker is not None and worker.failure is None:
            if watch.is_over(worker.loop.num_batches, worker.loop.busy_s > 0.0):
                return
            time.sleep(_LEAVE_POLL_S)

    def _start(self) -> None:
        try:
            path = Path(self._settings.source.path)
            while not path.is_dir():
                if self._stopping.wait(_LOOK_AGAIN_S):
                    return
            from actors.workers.draft_worker import DraftWorker  # only where a model is loaded: it takes seconds

            started = time.monotonic()
            incarnation = secrets.randbits(62)
            worker = DraftWorker(self._settings, incarnation, get_node_ip_address())
            entry = WorkerEntry("draft", f"draft-{incarnation:x}", worker.server.address, incarnation)
            self._registration = Registration(self._directory_name, entry, worker.server)
            self._worker = worker
            logger.info("draft model %s serves after %.1f s", path, time.monotonic() - started)
        except Exception as error:
            logger.exception("the draft worker could not start")
            self._error = f"{type(error).__name__}: {error}"


def draft_pool_application(
    settings: DraftSettings,
    directory_name: str,
    scaling: AutoscalingConfig,
    observability: ObservabilityConfig | None = None,
) -> serve.Application:
    """`workers` draft workers, or as many up to `max_workers` as `DraftPolicy` finds worth having."""
    options = settings.options
    gpus = (options.gpus or 1.0) if options.device.startswith("cuda") else 0
    limits = {
        "busy_share": scaling.draft_busy_share,
        "late_share": scaling.draft_late_share,
        "min_gain": scaling.draft_min_gain,
    }
    deployment = serve.deployment(DraftReplica).options(
        name="DraftPool",
        **replica_options(options.workers, options.most_workers, scaling=scaling, policy=DraftPolicy, limits=limits),
        ray_actor_options={"num_cpus": 0.5, "num_gpus": gpus},
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.1,  # there are no requests to wait for
        graceful_shutdown_timeout_s=LONGEST_LEAVE_S + 10.0,
    )
    return deployment.bind(settings, directory_name, observability)

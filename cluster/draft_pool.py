"""The draft workers on Ray: a Serve deployment whose replicas are the workers."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from pathlib import Path

from ray import serve
from ray.util import get_node_ip_address

from actors.draft_worker import DraftSettings, DraftWorker
from actors.errors import Unavailable
from cluster.config import ObservabilityConfig
from cluster.directory import WorkerEntry
from cluster.logs import configure_logging
from cluster.registration import Registration

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0


class DraftReplica:
    """Serve deployment: waits for the draft model to be there, then serves it and says so in the directory.

    It carries no requests. Until the model is there the cluster decodes without this worker.
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
        self._stopping = threading.Event()
        self._starting = threading.Thread(target=self._start, name="draft worker start", daemon=True)
        self._starting.start()

    def health(self) -> dict[str, object]:
        batches = self._worker.num_batches if self._worker is not None else 0
        return {"process_id": os.getpid(), "serving": self._worker is not None, "num_batches": batches}

    def check_health(self) -> None:
        if self._error is not None:
            raise Unavailable(f"draft worker: {self._error}")
        if self._worker is not None and self._worker.failure is not None:
            raise Unavailable(f"draft worker: {self._worker.failure}")

    def __del__(self) -> None:
        self._stopping.set()
        if self._registration is not None:
            self._registration.leave()
        if self._worker is not None:
            self._worker.stop()

    def _start(self) -> None:
        try:
            path = Path(self._settings.source.path)
            while not path.is_dir():
                if self._stopping.wait(_LOOK_AGAIN_S):
                    return
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
    settings: DraftSettings, directory_name: str, workers: int, observability: ObservabilityConfig | None = None
) -> serve.Application:
    gpu = settings.device.startswith("cuda")
    deployment = serve.deployment(DraftReplica).options(
        name="DraftPool",
        num_replicas=workers,
        ray_actor_options={"num_cpus": 0.5, "num_gpus": 1 if gpu else 0},
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=5.0,
    )
    return deployment.bind(settings, directory_name, observability)

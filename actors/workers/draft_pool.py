"""The draft workers on Ray: a Serve deployment for each draft model, whose replicas are the workers."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup

from actors.drafters.registry import OUROBOROS
from actors.errors import ModelError, PacelineError, Unavailable
from actors.home import paceline_home
from actors.imports import collecting_no_garbage
from actors.links.heartbeat import Heartbeat
from actors.logs import ObservabilityConfig, configure_logging
from actors.models.catalog import resolve_model
from actors.pool_names import deployment_of
from actors.workers.autoscaling import AutoscalingConfig, DraftPolicy, replica_options
from actors.workers.demand import DraftDemand
from actors.workers.demand_reader import DemandReader
from actors.workers.directory_actor import DirectoryHandle, find_directory
from actors.workers.gpus import SEE_ALL_GPUS, rank_device
from actors.workers.model_changes import WantedModel
from actors.workers.quiet_watch import LONGEST_LEAVE_S
from actors.workers.rank_options import rank_bundle
from actors.workers.settings import DraftSettings

if TYPE_CHECKING:
    from actors.workers.registered_draft import RegisteredDraft

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_TURN_LIMIT_S = 120.0  # limit of a turn of the worker's loop: on a CPU, a long prompt takes many seconds
_DIRECTORY_S = 2.0
_STOP_WITHIN_S = 5.0  # a model that is being loaded is not waited for


class DraftReplica:
    """Serve deployment: waits for the draft model's directory, then serves the model and registers it.

    It handles no HTTP requests. Until the model exists, the cluster decodes without this worker. Before it stops, it
    tells the routers, and answers until they send nothing more. It does the same before it loads another model, which
    `paceline scale` may ask for, and then registers as another worker.
    """

    def __init__(
        self, settings: DraftSettings, directory_name: str, observability: ObservabilityConfig | None = None
    ) -> None:
        if observability is not None:
            configure_logging(observability, "draft")
        self._group: PlacementGroup | None = None  # of several ranks
        if settings.options.tensor_parallel > 1:
            device = rank_device(settings.options.device)
            settings = replace(settings, options=settings.options.model_copy(update={"device": device}))
            self._group = get_current_placement_group()
        self._observability = observability
        self._configured = settings
        self._directory_name = directory_name
        self._directory: DirectoryHandle | None = None
        self._name = secrets.token_hex(8)  # in the directory's turns
        self._served: RegisteredDraft | None = None
        self._loaded = settings  # of the model that was loaded last
        self._followed = 0  # number of the last `WantedModel` that was loaded or refused
        self._error: str | None = None
        self._demand = DemandReader(directory_name, lambda directory: directory.draft_demand.remote(settings.pool))
        self._held = 0
        self._recorded = (time.monotonic(), 0.0)  # when the busy share was last recorded, and the busy time then
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft model", daemon=True)
        self._thread.start()

    def health(self) -> dict[str, object]:
        served = self._served
        batches = served.worker.loop.num_batches if served is not None else 0
        return {"process_id": os.getpid(), "serving": served is not None, "num_batches": batches}

    async def check_health(self) -> None:
        served = self._served
        if self._error is not None:
            raise Unavailable(f"draft worker: {self._error}")
        if served is not None and served.worker.failure is not None:
            raise Unavailable(f"draft worker: {served.worker.failure}")
        if served is not None and served.worker.loop.turn_s > _TURN_LIMIT_S:
            raise Unavailable(f"draft worker: its loop has stood still for {served.worker.loop.turn_s:.1f} s")
        if served is not None and served.ranks is not None:
            await served.ranks.check()

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
        self._thread.join(_STOP_WITHIN_S)
        served, self._served = self._served, None
        if served is not None:
            served.leave()

    def _busy_share(self) -> float:
        served = self._served
        now, busy_s = time.monotonic(), served.worker.loop.busy_total_s if served is not None else 0.0
        (before, busy_before_s), self._recorded = self._recorded, (now, busy_s)
        return min(1.0, max(0.0, busy_s - busy_before_s) / max(now - before, 1e-3))

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                wanted = self._wanted()
                if self._served is None:
                    self._start(wanted)
                elif wanted is not None and wanted.number != self._followed:
                    self._follow(wanted)
                self._stopping.wait(_LOOK_AGAIN_S)
        except Exception as error:
            logger.exception("the draft worker could not load its model")
            self._error = f"{type(error).__name__}: {error}"

    def _wanted(self) -> WantedModel | None:
        """None while the directory does not answer. A serving worker is notified with its heartbeats."""
        if self._served is not None:
            return self._served.wanted
        try:
            if self._directory is None:
                self._directory = find_directory(self._directory_name)
            wanted: WantedModel = ray.get(
                self._directory.wanted_model.remote(self._configured.pool), timeout=_DIRECTORY_S
            )
        except (RayError, ValueError, TimeoutError):
            self._directory = None
            return None
        return wanted

    def _start(self, wanted: WantedModel | None) -> None:
        """Load the model that is wanted, else that of the configuration as soon as it is there."""
        if wanted is not None and wanted.spec and wanted.number != self._followed:
            try:
                self._load(self._settings_of(wanted), wanted.number)
            except Exception as error:
                self._refuse(wanted, _reason(wanted, error))
        elif self._configured.source.path.is_dir():
            self._load(self._configured, self._followed if wanted is None else wanted.number)

    def _load(self, settings: DraftSettings, number: int) -> None:
        with collecting_no_garbage():
            from actors.workers.registered_draft import RegisteredDraft  # only to load a model: it takes seconds

        self._served = RegisteredDraft(settings, self._directory_name, number, self._group, self._observability)
        self._loaded, self._followed = settings, number

    def _follow(self, wanted: WantedModel) -> None:
        """Change to the wanted model, if it is this worker's turn."""
        if self._runs(wanted) or not self._tell("take_turn", self._name):
            return
        turn = Heartbeat(
            lambda: self._tell("take_turn", self._name, True), _LOOK_AGAIN_S, "turn to change the draft model"
        )
        try:
            self._change(wanted)
        finally:
            turn.stop()
            self._tell("end_turn", self._name)

    def _runs(self, wanted: WantedModel) -> bool:
        """Whether this worker runs the wanted model already, which its entry then says."""
        served = self._served
        if served is None or (wanted.spec or self._configured.source.spec) != served.settings.source.spec:
            return False
        served.renumber(wanted.number)
        self._followed = wanted.number
        return True

    def _change(self, wanted: WantedModel) -> None:
        """Raises what loading the model raises that was there before.

        No frame may refer to the worker that ends, or to an error with the frames of a failed load: two models at a
        time may be more than the device has room for.
        """
        try:
            settings = self._settings_of(wanted)  # what is no model is refused without a pause
        except Exception as error:
            self._refuse(wanted, _reason(wanted, error))
            return
        before, number = self._loaded, self._followed
        self._unload()
        reason = self._try_load(wanted, settings)
        if reason is not None:
            self._unload()
            self._load(before, number)
            self._refuse(wanted, reason)

    def _try_load(self, wanted: WantedModel, settings: DraftSettings) -> str | None:
        """Load the wanted model. Returns why it cannot be loaded, None if it is."""
        try:
            self._load(settings, wanted.number)
        except Exception as error:
            reason = _reason(wanted, error)
            _clear_frames(error)
            return reason
        return None

    def _settings_of(self, wanted: WantedModel) -> DraftSettings:
        """Raises ModelError where there is no such model, or it cannot draft here."""
        from actors.models.loader import check_draft_ranks, read_model_info, refuse_encoder

        source = self._configured.source
        if wanted.spec:
            source = resolve_model(wanted.spec, paceline_home())
        elif not source.path.is_dir():
            raise ModelError(f"draft model {source.spec!r}: {source.path} is not there yet")
        read_model_info(source)
        check_draft_ranks(source, self._configured.options.tensor_parallel)
        if self._configured.needs_lookahead:
            refuse_encoder(source, f"drafter {OUROBOROS!r}")
        return replace(self._configured, source=source)

    def _unload(self) -> None:
        """End the worker and give back its memory."""
        served, self._served = self._served, None
        if served is not None:
            served.leave()
        del served
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _refuse(self, wanted: WantedModel, reason: str) -> None:
        self._followed = wanted.number
        self._tell("refuse_model", self._name, wanted.number, reason)

    def _tell(self, method: str, *arguments: object) -> object:
        """The directory's answer; None if there is none."""
        try:
            directory = self._directory or find_directory(self._directory_name)
            call = getattr(directory, method).remote(self._configured.pool, *arguments)
            return ray.get(call, timeout=_DIRECTORY_S)
        except (RayError, ValueError, TimeoutError):
            self._directory = None  # it may have been recreated
            return None


def _reason(wanted: WantedModel, error: Exception) -> str:
    """Why the wanted model cannot be loaded, which is logged with the error's frames."""
    reason = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    logger.error("draft model %r cannot be loaded: %s", wanted.spec, reason, exc_info=error)
    return reason


def _clear_frames(error: BaseException | None) -> None:
    """Drop the variables of an error's frames, since they may keep parts of a model in memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def draft_pool_application(
    settings: DraftSettings,
    directory_name: str,
    scaling: AutoscalingConfig,
    observability: ObservabilityConfig | None = None,
) -> serve.Application:
    """`workers` draft workers, or as many up to `max_workers` as `DraftPolicy` finds worth having.

    The placement group of a worker of several ranks has a bundle for each, the first one for the replica. When it is
    removed, Ray kills the ranks, including hanging ones.
    """
    options = settings.options
    gpus = (options.gpus or 1.0) if options.device.startswith("cuda") else 0
    limits = {
        "busy_share": scaling.draft_busy_share,
        "late_share": scaling.draft_late_share,
        "min_gain": scaling.draft_min_gain,
    }
    actor_options: dict[str, object] = {"num_cpus": 0.5, "num_gpus": gpus}
    placing: dict[str, object] = {}
    if options.tensor_parallel > 1:
        placing["placement_group_bundles"] = [rank_bundle(options)] * options.tensor_parallel
        placing["placement_group_strategy"] = "STRICT_PACK"  # ranks exchange activations twice a layer
        actor_options["runtime_env"] = {"env_vars": SEE_ALL_GPUS}
    deployment = serve.deployment(DraftReplica).options(
        name=deployment_of(settings.pool),
        **replica_options(options.workers, options.most_workers, scaling=scaling, policy=DraftPolicy, limits=limits),
        ray_actor_options=actor_options,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.1,  # there are no requests to wait for
        graceful_shutdown_timeout_s=LONGEST_LEAVE_S + _STOP_WITHIN_S + 10.0,
        **placing,
    )
    return deployment.bind(settings, directory_name, observability)

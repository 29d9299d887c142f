"""A draft worker with its entry in the directory."""

from __future__ import annotations

import logging
import secrets
import time

from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup

from actors.logs import ObservabilityConfig
from actors.workers.directory import WorkerEntry
from actors.workers.draft_ranks import DraftRanks
from actors.workers.draft_worker import DraftWorker
from actors.workers.model_changes import WantedModel
from actors.workers.quiet_watch import QuietWatch
from actors.workers.registration import Registration
from actors.workers.settings import DraftSettings

logger = logging.getLogger(__name__)

_LEAVE_POLL_S = 0.05


class RegisteredDraft:
    """Loads the model, opens the link and registers. Raises what loading a model raises."""

    def __init__(
        self,
        settings: DraftSettings,
        directory_name: str,
        model_number: int,
        group: PlacementGroup | None = None,
        observability: ObservabilityConfig | None = None,
    ) -> None:
        """model_number: of the `WantedModel` that this is. group: with a bundle for each rank of several.
        observability: of the other ranks."""
        started = time.monotonic()
        incarnation = secrets.randbits(62)
        self.settings = settings
        self.ranks: DraftRanks | None = None  # the others of several
        if settings.options.tensor_parallel > 1:
            self.ranks = DraftRanks(settings, group, observability)
        self.worker = self._load(get_node_ip_address(), incarnation)
        entry = WorkerEntry(
            "draft",
            f"draft-{incarnation:x}",
            self.worker.server.address,
            incarnation,
            model=settings.source.spec,
            pool=settings.pool,
            model_number=model_number,
        )
        self._registration = Registration(directory_name, entry, self.worker.server)
        logger.info("draft model %s serves after %.1f s", settings.source.path, time.monotonic() - started)

    def _load(self, host: str, incarnation: int) -> DraftWorker:
        if self.ranks is None:
            return DraftWorker(self.settings, incarnation, host)
        try:
            return DraftWorker(self.settings, incarnation, host, self.ranks.join(host))
        except Exception as error:
            reason = self.ranks.load_error()
            self.ranks.end()
            raise reason or error from None

    @property
    def wanted(self) -> WantedModel | None:
        """What the directory last said that this pool's workers are to run; None until it has said so."""
        return self._registration.wanted

    def renumber(self, model_number: int) -> None:
        """The model that it runs is wanted again."""
        self._registration.update(model_number=model_number)

    def leave(self) -> None:
        """Tell the routers, answer until they send nothing more, and stop."""
        self._registration.announce_leaving()
        watch = QuietWatch()
        while self.worker.failure is None and not watch.is_over(
            self.worker.loop.num_batches, self.worker.loop.busy_s > 0.0
        ):
            time.sleep(_LEAVE_POLL_S)
        self._registration.leave()
        self.worker.stop()
        if self.ranks is not None:
            self.ranks.end()

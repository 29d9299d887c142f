"""A draft worker without Ray: a draft model behind a link, in its own thread; and what its other ranks do."""

from __future__ import annotations

import logging
import threading

import torch

from actors.build import build_draft_engine, build_draft_runner
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.rank_forwards import follow_forwards
from actors.draft_model.warm_up import warm_up
from actors.engine.model_runner import ModelRunner
from actors.engine.rank_group import Leader, begin_rounds, find_meeting, join_group, leave_group
from actors.engine.shared_ring import RingReader, RingWriter
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import WorkerInfo
from actors.models.loader import choose_device
from actors.workers.gpus import use_device
from actors.workers.settings import DraftSettings
from actors.workers.worker_loop import WorkerLoop

logger = logging.getLogger(__name__)


class DraftWorker:
    """Loads the model and opens the link. No client is admitted before `server.allow`."""

    def __init__(self, settings: DraftSettings, incarnation: int, host: str, ring: RingWriter | None = None) -> None:
        """ring: of `join_group`, which the caller has entered as rank 0, while each other rank is a `DraftFollower`;
        None: the worker is whole."""
        torch.set_num_threads(settings.options.threads)
        use_device(settings.options.device)
        self._device = settings.options.device
        self._leader = leader = None if ring is None else Leader(ring)
        engine = build_draft_engine(settings.source, settings.options, target=settings.target, leader=leader)
        if leader is not None:
            begin_rounds()
        warm_up(engine, settings.options.gamma, settings.options.branch)
        pool = engine.pool
        self.server = LinkServer(LinkKeys.generate(), [], host)
        info = WorkerInfo(
            role="draft",
            incarnation=incarnation,
            vocab_size=0,
            max_model_len=pool.num_blocks * pool.block_size,
            block_size=pool.block_size,
            total_blocks=pool.num_blocks,
        )
        work_ahead = engine.work_ahead if settings.options.ahead and isinstance(engine, DraftEngine) else None
        keep_alive = None if leader is None else leader.keep_alive
        self.loop = WorkerLoop(engine, self.server, info, keep_alive, work_ahead)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run, name="draft worker", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the worker no longer serves, or None while it does."""
        return None if self._thread.is_alive() else "the serving thread has ended"

    def stop(self) -> None:
        """End the loop and close the link. Ends the other ranks' work, too."""
        self.loop.stop()
        self._thread.join(timeout=10.0)
        self.server.close()

    def _run(self) -> None:
        try:
            use_device(self._device)
            self.loop.run()
            if self._leader is not None:
                self._leader.stop()
                leave_group()
        except Exception:
            logger.exception("the draft worker ended")
            self.server.close()  # routers wait for it no more


class DraftFollower:
    """Rank 1 or higher of a draft worker: computes its part of the forwards of rank 0, in its own thread."""

    def __init__(self, settings: DraftSettings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._error: str | None = None

    def load(self, meeting: tuple[str, int], timeout_s: float) -> None:
        """Load the model together with the other ranks, and begin to follow. meeting: host and port of rank 0's store.
        timeout_s: for each wait for another rank."""
        options = self._settings.options
        torch.set_num_threads(options.threads)
        use_device(options.device)
        store, device = find_meeting(*meeting, timeout_s), choose_device(options.device)
        try:
            ring = join_group(store, self._rank, options.tensor_parallel, device, timeout_s)
            runner = build_draft_runner(self._settings.source, options)
        except Exception:
            leave_group()  # the others wait for it no more
            raise
        begin_rounds()
        assert isinstance(ring, RingReader)
        threading.Thread(target=self._follow, args=(runner, ring), name="draft rank", daemon=True).start()

    @property
    def failure(self) -> str | None:
        """Why the rank follows no more, or None."""
        return self._error

    def _follow(self, runner: ModelRunner, ring: RingReader) -> None:
        try:
            use_device(self._settings.options.device)
            follow_forwards(runner, ring)
            leave_group()
        except Exception as error:
            logger.exception("draft rank %d ended", self._rank)
            self._error = f"{type(error).__name__}: {error}"

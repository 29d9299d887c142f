"""One rank of a target group without Ray: loads the model, then serves batches in its own thread."""

from __future__ import annotations

import logging
import threading

import torch

from actors.build import build_target_engine
from actors.engine.rank_group import (
    LeadingRank,
    begin_rounds,
    find_meeting,
    follow,
    join_group,
    leave_group,
    open_meeting,
)
from actors.engine.shared_ring import RingReader, RingWriter
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import record_rounds, warm_up
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import WorkerInfo
from actors.models.loader import choose_device, length_limits, load_config
from actors.workers.gpus import use_device
from actors.workers.settings import TargetSettings
from actors.workers.worker_loop import Engine, WorkerLoop

logger = logging.getLogger(__name__)


class TargetWorker:
    """Rank `rank` of a target group. `load` on all ranks at once, then `start`.

    Its threads use the device of the settings' options as their current one.
    """

    def __init__(self, settings: TargetSettings, rank: int, incarnation: int) -> None:
        self.server: LinkServer | None = None  # rank 0 only
        self._settings = settings
        self._rank = rank
        self._incarnation = incarnation
        self._engine: TargetEngine | None = None
        self.loop: WorkerLoop | None = None  # rank 0 only
        self._leading: LeadingRank | None = None
        self._thread: threading.Thread | None = None
        self._meeting: torch.distributed.TCPStore | None = None  # rank 0 of several
        self._ring: RingWriter | RingReader | None = None  # of several ranks
        self._error: str | None = None
        self._step_times: list[tuple[int, float]] = []

    def open_meeting(self, host: str) -> tuple[str, int]:
        """On rank 0, before `load`: host and port by which the ranks find each other."""
        self._meeting = open_meeting(host, self._settings.options.start_timeout_s)
        return host, self._meeting.port

    def load(self, meeting: tuple[str, int] | None) -> None:
        """Load the model, together with the other ranks, and warm it up. meeting: the result of `open_meeting`."""
        options = self._settings.options
        torch.set_num_threads(options.threads)
        use_device(options.device)
        if options.tensor_parallel > 1:
            assert meeting is not None, "ranks need a place to meet"
            limit_s = options.start_timeout_s
            store = self._meeting or find_meeting(*meeting, limit_s)
            device = choose_device(options.device)
            self._ring = join_group(store, self._rank, options.tensor_parallel, device, limit_s)
        self._engine = build_target_engine(
            self._settings.source, options, rank=self._rank, limits=self._settings.limits
        )
        self._step_times = warm_up(self._engine)
        record_rounds(self._engine, self._settings.limits)
        if options.tensor_parallel > 1:
            begin_rounds()

    def start(self, host: str) -> None:
        """Start serving. Rank 0 listens on `host`. No client is admitted before `server.allow`."""
        assert self._engine is not None, "load first"
        if self._rank > 0:
            self._thread = threading.Thread(target=self._follow, name=f"target rank {self._rank}", daemon=True)
        else:
            self.server = LinkServer(LinkKeys.generate(), [], host)
            engine: Engine = self._engine  # type: ignore[assignment]
            keep_alive = None
            if isinstance(self._ring, RingWriter):
                self._leading = LeadingRank(self._engine, self._ring)
                engine, keep_alive = self._leading, self._leading.keep_alive  # type: ignore[assignment]
            self.loop = WorkerLoop(engine, self.server, self._info(), keep_alive)
            self._thread = threading.Thread(target=self._lead, name="target rank 0", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the rank no longer serves, or None while it does."""
        if self._error is None and self._thread is not None and not self._thread.is_alive():
            return "the serving thread has ended"
        return self._error

    def stop(self) -> None:
        """End the loop and close the link. Rank 0 stops the other ranks."""
        if self.loop is not None:
            self.loop.stop()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        if self.server is not None:
            self.server.close()

    def _info(self) -> WorkerInfo:
        assert self._engine is not None
        settings, options = self._settings, self._engine.options
        longest = settings.options.max_model_len or length_limits(load_config(settings.source))[0]
        return WorkerInfo(
            role="target",
            incarnation=self._incarnation,
            vocab_size=self._engine.vocab_size,
            max_model_len=min(longest, options.num_slots),
            block_size=options.block_size,
            total_blocks=options.num_blocks,
            step_times=self._step_times,
            has_head=self._engine.has_head,
            row_steps=self._engine.row_steps,
            chain_only=self._engine.chain_only,
            has_prefix_cache=self._engine.pool.prefix_cache,
        )

    def _lead(self) -> None:
        assert self.loop is not None
        try:
            use_device(self._settings.options.device)
            self.loop.run()
            if self._leading is not None:
                self._leading.stop()
                leave_group()
        except Exception as error:
            logger.exception("target rank 0 ended")
            self._error = f"{type(error).__name__}: {error}"
            if self.server is not None:
                self.server.close()  # routers go to other groups at once

    def _follow(self) -> None:
        assert self._engine is not None
        assert isinstance(self._ring, RingReader)
        try:
            use_device(self._settings.options.device)
            follow(self._engine, self._ring)
            leave_group()
        except Exception as error:
            logger.exception("target rank %d ended", self._rank)
            self._error = f"{type(error).__name__}: {error}"

"""A draft worker without Ray: a draft model behind a link, in its own thread."""

from __future__ import annotations

import logging
import threading

import numpy as np
import torch

from actors.build import build_draft_engine
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart, WorkerInfo
from actors.workers.settings import DraftSettings
from actors.workers.worker_loop import WorkerLoop

logger = logging.getLogger(__name__)


class DraftWorker:
    """Loads the model and opens the link. No client is admitted before `server.allow`."""

    def __init__(self, settings: DraftSettings, incarnation: int, host: str) -> None:
        torch.set_num_threads(settings.options.threads)
        engine = build_draft_engine(settings.source, settings.options, target=settings.target)
        _warm_up(engine)
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
        self.loop = WorkerLoop(engine, self.server, info, work_ahead=work_ahead)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run, name="draft worker", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the worker no longer serves, or None while it does."""
        return None if self._thread.is_alive() else "the serving thread has ended"

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join(timeout=10.0)
        self.server.close()

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception:
            logger.exception("the draft worker ended")


def _warm_up(engine: DraftEngine | RetokenizedDraftEngine) -> None:
    """Make one sampled guess: the first one allocates the cache and compiles kernels."""
    tokens = np.ones(2, dtype=np.int32)
    begin = SequenceStart(SamplingParams(seed=0, temperature=1.0, top_k=8, top_p=0.9), len(tokens), "warm-up")
    engine.draft(DraftBatch(0, [DraftItem(SequenceDelta(1, 0, tokens), 1, begin)]))
    engine.draft(DraftBatch(0, [], [1]))

"""The sources of drafts of one router by index, and which of them may draft for a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from actors.drafters.registry import (
    AUTO,
    DRAFT_MODEL,
    EAGLE,
    OUROBOROS,
    SOURCES,
    DraftSource,
    source_of_pool,
)
from actors.messages import DraftMethod, GenerationRequest
from actors.pool_names import FIRST_POOL
from cluster.router.merged_trees import MAX_SOURCES


@dataclass(frozen=True, slots=True)
class WorkerSource:
    """The source that the draft workers of a pool serve for one sequence."""

    source: int
    method: DraftMethod = "tree"  # what the workers are asked for
    pool: int = 0  # index of the pool


@dataclass(frozen=True, slots=True)
class AllowedSources:
    """Indices of the sources that may draft for one sequence."""

    cpu: tuple[int, ...] = ()
    head: int | None = None
    workers: tuple[WorkerSource, ...] = ()  # at most one of each pool

    def __len__(self) -> int:
        return len(self.cpu) + (self.head is not None) + len(self.workers)


class DraftSources:
    """Sources in order: CPU drafters, the target's head if it has one, ouroboros if configured, the draft models."""

    def __init__(
        self,
        cpu_names: Iterable[str],
        configured: tuple[str, ...],
        has_head: bool,
        pools: tuple[str, ...] = (FIRST_POOL,),
    ) -> None:
        """configured: the drafters of requests that name none; pools: names of the pools of draft workers.

        Raises ValueError for too many CPU drafters, or for one with the name of a source that runs elsewhere.
        """
        cpu = [SOURCES.get(name, DraftSource(name, "router")) for name in cpu_names]
        further = [replace(SOURCES[DRAFT_MODEL], name=source_of_pool(pool)) for pool in pools[1:]]
        elsewhere = [source for source in SOURCES.values() if source.place != "router"]
        others = [source.name for source in (*elsewhere, *further)]
        most = MAX_SOURCES - len(others) - 1
        if len(cpu) > most or any(source.name in others for source in cpu):
            raise ValueError(f"drafters: at most {most} drafters, none named {', '.join(others)}")
        self._configured = configured
        is_there = {EAGLE: has_head, OUROBOROS: OUROBOROS in configured, DRAFT_MODEL: True}
        self._sources = [*cpu, *(source for source in elsewhere if is_there[source.name]), *further]
        self.names = tuple(source.name for source in self._sources)
        self.num_cpu = len(cpu)
        self.models = range(self.num_cpu, len(self.names))
        self.head = self.names.index(EAGLE) if has_head else None
        first = self.names.index(DRAFT_MODEL)
        self.pool_of = {first + index: index for index in range(len(pools))}  # pool of each source on draft workers
        if OUROBOROS in self.names:
            self.pool_of[self.names.index(OUROBOROS)] = 0
        self.of_pools = tuple(  # source indices by pool
            tuple(source for source in sorted(self.pool_of) if self.pool_of[source] == pool)
            for pool in range(len(pools))
        )

    def allowed(self, request: GenerationRequest) -> AllowedSources:
        names = self._configured if request.drafters is None else request.drafters
        allowed = [
            (index, source) for index, source in enumerate(self._sources) if AUTO in names or source.name in names
        ]
        cpu = tuple(index for index, source in allowed if source.place == "router")
        head = next((index for index, source in allowed if source.place == "target"), None)
        workers: dict[int, WorkerSource] = {}
        for index, source in allowed:
            if source.place == "draft_worker":
                workers.setdefault(self.pool_of[index], WorkerSource(index, source.method, self.pool_of[index]))
        return AllowedSources(cpu, head, tuple(workers.values()))

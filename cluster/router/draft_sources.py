"""The sources of drafts of one router by index, and which of them may draft for a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.drafters.registry import AUTO, DRAFT_MODEL, EAGLE, OUROBOROS, SOURCES, DraftSource
from actors.messages import DraftMethod, GenerationRequest
from cluster.router.merged_trees import MAX_SOURCES


@dataclass(frozen=True, slots=True)
class AllowedSources:
    """Indices of the sources that may draft for one sequence."""

    cpu: tuple[int, ...] = ()
    head: int | None = None
    worker: int | None = None  # the source that its draft worker serves
    method: DraftMethod = "tree"  # what the draft worker is asked for

    def __len__(self) -> int:
        return len(self.cpu) + (self.head is not None) + (self.worker is not None)


class DraftSources:
    """Sources in order: CPU drafters, the target's head if it has one, ouroboros if configured, the draft model."""

    def __init__(self, cpu_names: Iterable[str], configured: tuple[str, ...], has_head: bool) -> None:
        """configured: the drafters of requests that name none.

        Raises ValueError for too many CPU drafters, or for one with the name of a source that runs elsewhere.
        """
        cpu = [SOURCES.get(name, DraftSource(name, "router")) for name in cpu_names]
        others = [source.name for source in SOURCES.values() if source.place != "router"]
        most = MAX_SOURCES - len(others) - 1
        if len(cpu) > most or any(source.name in others for source in cpu):
            raise ValueError(f"drafters: at most {most} drafters, none named {', '.join(others)}")
        self._configured = configured
        is_there = {EAGLE: has_head, OUROBOROS: OUROBOROS in configured, DRAFT_MODEL: True}
        self._sources = [*cpu, *(SOURCES[name] for name in others if is_there[name])]
        self.names = tuple(source.name for source in self._sources)
        self.num_cpu = len(cpu)
        self.head = self.names.index(EAGLE) if has_head else None

    def allowed(self, request: GenerationRequest) -> AllowedSources:
        names = self._configured if request.drafters is None else request.drafters
        is_rejection = request.sampling.acceptance == "rejection"
        allowed = [
            (index, source)
            for index, source in enumerate(self._sources)
            if (AUTO in names or source.name in names) and (source.under_rejection != "none" or not is_rejection)
        ]
        cpu = tuple(index for index, source in allowed if source.place == "router")
        head = next((index for index, source in allowed if source.place == "target"), None)
        worker = next(((index, source) for index, source in allowed if source.place == "draft_worker"), None)
        if worker is None:
            return AllowedSources(cpu, head)
        return AllowedSources(cpu, head, worker[0], worker[1].method)

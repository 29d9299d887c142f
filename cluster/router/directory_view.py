"""A router's copy of the directory's state. Answers contain only changes."""

from __future__ import annotations

from actors.workers.directory import Mark, Told, WorkerEntry


class DirectoryView:
    """Draft workers, the router's own target group, and whether others serve."""

    def __init__(self) -> None:
        self.mark: Mark | None = None  # for the next question
        self.target_id: str | None = None  # the target group assigned to this router
        self.longest_wait_s = 0.0  # of the directory, before it answers
        self._drafts: dict[str, WorkerEntry] = {}
        self._targets: tuple[WorkerEntry, ...] = ()

    @property
    def entries(self) -> list[WorkerEntry]:
        return [*self._drafts.values(), *self._targets]

    async def workers(self) -> tuple[list[WorkerEntry], str | None]:
        """For `keep_connected`."""
        return self.entries, self.target_id

    def take(self, told: Told) -> None:
        if told.is_whole:
            self._drafts.clear()
        self._drafts.update((entry.worker_id, entry) for entry in told.drafts)
        for worker_id in told.gone:
            self._drafts.pop(worker_id, None)
        self._targets, self.target_id, self.mark = told.targets, told.target_id, told.mark
        self.longest_wait_s = told.longest_wait_s

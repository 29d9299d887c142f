"""The newest entries of a log, in memory."""

from __future__ import annotations

from collections import deque

import msgspec

from cache_service.store.store import LogView

MAX_TAIL_BYTES = 1 << 20
"""Frames that a tail keeps, so that its readers may come later."""


class News(msgspec.Struct, array_like=True, frozen=True):
    """What has changed in a log since the last news of it."""

    name: str  # of the log's key, or of an epoch's; "": no news, a sign of life
    epoch: str | None = None
    version: int = 0  # the manifest's
    after: str | None = None  # id before the first of `entries`; None: it is not followed any more
    is_anchored: bool = False  # whether the entry with that id was in the log
    entries: list[tuple[str, bytes]] = []


class LogTail:
    """What followed after an entry, as far as it has been told of. Not thread-safe."""

    def __init__(self) -> None:
        self.num_news = 0
        self.epoch: str | None = None
        self._version = 0
        self._after = ""
        self._is_anchored = False  # whether the entry `_after` was in the log
        self._entries: deque[tuple[str, bytes]] = deque()
        self._num_bytes = 0

    def take(self, news: News) -> None:
        self.num_news += 1
        self.epoch, self._version = news.epoch, news.version
        if self.num_news == 1 or news.after != self._last_id:
            self._entries.clear()
            self._after, self._is_anchored, self._num_bytes = news.after or "", news.is_anchored, 0
        self._is_anchored = self._is_anchored or (not self._entries and news.is_anchored)
        self._entries.extend(news.entries)
        self._num_bytes += sum(len(frame) for _, frame in news.entries)
        while self._num_bytes > MAX_TAIL_BYTES:
            self._drop_oldest()

    def view(self, begin: str, max_entries: int, epoch: str | None, version: int) -> LogView | None:
        """As `Store.read_log`, with an empty frame in place of `begin`'s; None if that is not known here.

        epoch, version: the reader's; it may have asked the server for something newer.
        """
        if not self.num_news or self.epoch != epoch or self._version < version:
            return None
        entries: list[tuple[str, bytes]] = []
        is_anchored = False
        for entry in reversed(self._entries):
            is_anchored = entry[0] == begin
            if is_anchored:
                break
            entries.append(entry)
        if not is_anchored and begin != self._after:
            return None
        if is_anchored or self._is_anchored:
            entries.append((begin, b""))
        return LogView(self.epoch, self._version, entries[: -max_entries - 1 : -1])

    def forget_until(self, entry_id: str) -> None:
        """Drop an entry of a view, or the one it began at, with those before it."""
        while self._after != entry_id:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._after, frame = self._entries.popleft()
        self._is_anchored = True
        self._num_bytes -= len(frame)

    @property
    def _last_id(self) -> str:
        return self._entries[-1][0] if self._entries else self._after

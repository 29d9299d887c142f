"""Asks the directory what routers want of draft workers and target groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from ray.exceptions import RayError

from actors.workers.demand import DraftDemand, TargetDemand
from actors.workers.directory_actor import DirectoryHandle, find_directory

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0

Demand = TypeVar("Demand", bound=DraftDemand | TargetDemand)


class DemandReader(Generic[Demand]):
    """Reads the routers' demand from the directory of that name, which is looked up again after a failure. Where the
    directory has very many callers, an answer is returned as many times as it says."""

    def __init__(self, directory_name: str, ask: Callable[[DirectoryHandle], Awaitable[Demand]]) -> None:
        self._directory_name = directory_name
        self._ask = ask
        self._directory: DirectoryHandle | None = None
        self._last: Demand | None = None
        self._times_left = 0  # for which the last answer is good

    async def read(self) -> Demand | None:
        """None while the directory does not answer."""
        self._times_left -= 1
        if self._times_left > 0:
            return self._last
        try:
            directory = self._directory or await asyncio.to_thread(find_directory, self._directory_name)
            self._directory = directory
            async with asyncio.timeout(_TIMEOUT_S):
                self._last = await self._ask(directory)
            self._times_left = self._last.stretch
            return self._last
        except (RayError, ValueError, TimeoutError) as error:
            logger.warning("the directory did not say what routers want of workers: %r", error)
            self._directory = None
            return None

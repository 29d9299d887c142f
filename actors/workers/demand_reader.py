"""What workers that scale ask the directory: how much routers want of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from ray.exceptions import RayError

from actors.workers.directory import DirectoryHandle, find_directory

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0

Demand = TypeVar("Demand")


class DemandReader(Generic[Demand]):
    """Asks the directory of that name, which is looked for anew when it did not answer."""

    def __init__(self, directory_name: str, ask: Callable[[DirectoryHandle], Awaitable[Demand]]) -> None:
        self._directory_name = directory_name
        self._ask = ask
        self._directory: DirectoryHandle | None = None

    async def read(self) -> Demand | None:
        """None while the directory does not say."""
        try:
            directory = self._directory or await asyncio.to_thread(find_directory, self._directory_name)
            self._directory = directory
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._ask(directory)
        except (RayError, ValueError, TimeoutError) as error:
            logger.warning("the directory did not say what routers want of workers: %r", error)
            self._directory = None
            return None

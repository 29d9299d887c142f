"""Options of an engine, target or draft, as `actors.build` derives them from configuration and memory."""

from __future__ import annotations

from dataclasses import dataclass

from actors.options import Exactness


@dataclass(frozen=True, slots=True)
class EngineOptions:
    num_blocks: int
    block_size: int = 16
    prefix_cache: bool = True
    exact: Exactness = "default"

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

"""Size and manner of an engine, target or draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Exactness = Literal["default", "bitwise"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    num_blocks: int
    block_size: int = 16
    prefix_cache: bool = True
    exact: Exactness = "default"

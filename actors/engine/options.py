"""Options of an engine, target or draft, as `actors.build` derives them from configuration and memory."""

from __future__ import annotations

from dataclasses import dataclass

from actors.options import AttentionBackend, Exactness


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The most that a round may hold."""

    prefill_rows: int = 256
    sequences: int = 16
    draft_rows: int = 64
    tree_rows: int = 16  # draft rows of one sequence, without those that a drafter requires
    successors: int = 0  # likeliest next tokens of each row that drafters learn from


@dataclass(frozen=True, slots=True)
class EngineOptions:
    num_blocks: int
    block_size: int = 16
    prefix_cache: bool = True
    exact: Exactness = "default"
    attention: AttentionBackend | None = None  # None: by device
    max_cached_states: int = 16  # of prefixes, where the target has recurrent layers
    is_eager: bool = False  # layers are neither fused (CPU) nor compiled (CUDA), launches not recorded

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

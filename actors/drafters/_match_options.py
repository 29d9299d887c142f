"""Options of drafters that continue a match: its shortest length, and the size of its draft."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from actors.drafters._options import between

_MOST = 1_000_000  # limit of each option: greater values mean the same
LenThreshold = Annotated[int, between(1, _MOST)]
LenBias = Annotated[int, between(0, _MOST)]
NPredicts = Annotated[int | None, between(1, _MOST)]
Alpha = Annotated[float | None, between(0, _MOST)]


@dataclass(frozen=True, slots=True)
class MatchOptions:
    """Options of SAM-Decoding (Hu et al. 2024), under its names."""

    len_threshold: int = 1  # a match shorter than this drafts nothing
    len_bias: int = 0  # subtracted from the length of every match
    n_predicts: int | None = None  # limit of a draft's nodes; None: as many as are asked for
    alpha: float | None = None  # limit of 1 + floor(alpha * match length) nodes; None: no such limit

    def room(self, max_nodes: int) -> int:
        """Limit of a draft's nodes."""
        room = max(max_nodes, 0)
        return room if self.n_predicts is None else min(room, self.n_predicts)

    def room_for(self, length: int, max_nodes: int) -> int:
        """Limit of the nodes drafted from a match of that length."""
        trusted = length - self.len_bias
        if trusted < self.len_threshold:
            return 0
        room = self.room(max_nodes)
        return room if self.alpha is None else min(room, 1 + math.floor(self.alpha * trusted))

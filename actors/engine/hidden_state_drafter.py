"""The target engine's interface to a drafter that reads its hidden states, such as an EAGLE or MTP head."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from actors.draft_tree import DraftTree
from actors.draft_worth import no_worth
from actors.engine.feature_tap import FeatureTap
from actors.engine.recorded_launches import RecordedLaunches


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Positions of one sequence with new features, and the token after each of them."""

    begin: int  # the first of them
    token_ids: np.ndarray  # int64 [n]: tokens at begin + 1 .. begin + n
    feature_rows: np.ndarray  # int64 [n]: rows of the target's forward
    slots: np.ndarray  # int64 [begin + n]: the sequence's slots
    max_nodes: int  # limit of the tree after the last token; 0: no tree
    min_confidence: float = 0.0  # path probability from which a node may be drafted behind
    worth: np.ndarray = field(default_factory=no_worth)  # of a forward, as of `draft_worth.pays`; the same of all
    levels: int | None = None  # to expand where launches do not wait for confidences; the same of all; None: all


class HiddenStateDrafter(Protocol):
    """Has keys and values in the same slots as the target, and drafts from features of the last rows."""

    is_parallel: bool  # whether one forward gives trees of any depth
    num_forwards: int  # for the trees of the last `propose`: 1 and the levels of the deepest; 0: there was none to grow
    launched_new: bool  # whether launches of the last `propose` were not yet recorded, as in `RecordedLaunches`
    tap: FeatureTap  # on the target's model
    launches: RecordedLaunches | None  # given by the engine where it records its own

    def computed(self, slots: np.ndarray) -> None:
        """The target has overwritten these slots (int64)."""
        ...

    def propose(self, asked: Sequences[HeadRows]) -> list[DraftTree]:
        """A tree for each of `asked`, from the features that `tap` kept since it was opened; empty for max_nodes 0."""
        ...

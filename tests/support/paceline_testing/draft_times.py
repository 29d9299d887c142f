"""Times of rows that do not depend on how busy the machine is."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.router.draft_wait import DraftWait
from cluster.router.step_time import StepTimeCurve


def let_drafts_pay(patch: pytest.MonkeyPatch) -> None:
    """In this process, rows and waiting cost next to nothing, so that the planner has drafts verified."""
    patch.setattr(StepTimeCurve, "times", lambda _, first, count: 0.01 + 1e-6 * np.arange(first, first + count))
    patch.setattr(DraftWait, "pays", lambda self, num_emitting: True)

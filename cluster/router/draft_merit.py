"""How right the drafts of one pool of draft workers are in one namespace."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.97  # factor on both sums with each draft
_FIRST_DRAFTS = 8.0  # asked for anyway until this much is known
_LEAST_SHARE = 0.25  # of the best pool's right tokens, below which a pool is left out
_TRIES, _PERIOD = 4, 64  # of so many drafts that are left out, the last few are asked for all the same


@dataclass(slots=True)
class DraftMerit:
    """Right tokens of a draft, typically. Learnt whatever the planner chose of the draft."""

    drafts: float = 0.0
    right: float = 0.0
    num_left_out: int = 0

    @property
    def tokens(self) -> float:
        """Right tokens of a draft; 0 if none is known."""
        return self.right / self.drafts if self.drafts else 0.0

    def observe(self, num_right: int) -> None:
        """Take in a draft: how many of its tokens the target has then emitted."""
        self.drafts = self.drafts * _DECAY + 1.0
        self.right = self.right * _DECAY + num_right

    def is_wanted(self, best: float) -> bool:
        """Whether to ask this pool for a draft beside one of so many right tokens. Counts the call as a draft."""
        if self.drafts < _FIRST_DRAFTS or self.tokens >= _LEAST_SHARE * best:
            return True
        self.num_left_out += 1
        return self.num_left_out % _PERIOD >= _PERIOD - _TRIES

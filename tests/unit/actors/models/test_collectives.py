"""The check of sums through symmetric memory: any order of the ranks passes it, and a wrong sum does not."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from actors.models import collectives
from actors.models.collectives import checked_partial

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_checked_has_the_same_sum_in_any_order_of_the_ranks(dtype):
    parts = [checked_partial(4096, rank, CPU, dtype) for rank in range(16)]
    assert len({tuple(part.tolist()) for part in parts}) == 16
    right = torch.stack(parts).double().sum(0)
    for order in (range(16), reversed(range(16))):
        total = torch.zeros(4096, dtype=dtype)
        for rank in order:
            total = total + parts[rank]
        assert torch.equal(total.double(), right)
    for order in permutations(range(4)):
        first, second, third, fourth = (parts[rank] for rank in order)
        assert torch.equal((first + second) + (third + fourth), parts[0] + parts[1] + parts[2] + parts[3])


class Memory:
    def __init__(self, wrong_at: int | None) -> None:
        self._wrong_at = wrong_at

    def can_sum(self, partial: torch.Tensor) -> bool:
        return True

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Of two ranks with the same partials."""
        total = 2 * partial
        if self._wrong_at is not None:
            total[self._wrong_at] += 1
        return total


@pytest.mark.parametrize(("wrong_at", "is_right"), [(None, True), (17, False)])
def test_a_sum_that_differs_in_one_place_is_refused(monkeypatch, wrong_at, is_right):
    monkeypatch.setattr(collectives, "_library_sum", lambda partial: partial + partial)
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: 1)
    assert collectives._sums_right(Memory(wrong_at), 1 << 10, CPU, torch.bfloat16) is is_right

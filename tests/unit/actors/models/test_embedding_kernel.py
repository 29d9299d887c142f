"""A rank's share of an embedding by one kernel, against torch's operations."""

from __future__ import annotations

import pytest
import torch

from actors.models.shards import _own_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first_id", "count"), [(0, 5), (4, 3), (40, 0)])
def test_rows_of_other_ranks_are_zeros(triton_device, dtype, first_id, count):
    from actors.models.embedding_kernel import launch

    weight = torch.randn(count, 1500, generator=torch.Generator().manual_seed(1)).to(dtype).to(triton_device)
    ids = torch.tensor([[0, 6, 4, 5, 39, 40, 6]], device=triton_device)
    rows = torch.full((1, 7, 1500), 7.0, dtype=dtype, device=triton_device)
    launch(ids, weight, rows, first_id)
    assert torch.equal(rows, _own_rows(weight.__getitem__, ids, weight, first_id))

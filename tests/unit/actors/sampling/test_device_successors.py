"""The likeliest tokens of whole rows and of shards, against torch's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from actors.sampling.device_successors import likeliest_of, merged, summarize
from actors.sampling.top_tokens import most_probable


def likeliest(logits: torch.Tensor, k: int, cuts: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and probabilities, [R, k]. cuts: where shards end; None: of the whole vocabulary."""
    if cuts is None:
        summaries = summarize(logits, k)
    else:
        shards = pairwise([0, *cuts, logits.shape[1]])
        summaries = torch.stack([merged(summarize(logits[:, first:end], k, first)) for first, end in shards])
    result = torch.full((len(logits), k), -1, dtype=torch.int64, device=logits.device)
    likeliest_of(summaries, result)
    ids, bits = np.ascontiguousarray(np.moveaxis(result.cpu().numpy().view(np.int32).reshape(len(logits), k, 2), 2, 0))
    return ids, bits.view(np.float32)


@pytest.mark.parametrize("cuts", [None, [2500], [3, 2049, 4000], [0, 5000]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_the_likeliest_tokens_are_those_of_torch(triton_device, cuts, dtype, k):
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(3, 5000, generator=generator)
    logits[1] = -torch.inf
    logits[1, 40:60] = torch.arange(20.0) / 7  # all in one tile
    logits = logits.to(dtype).to(triton_device)
    ids, probs = likeliest(logits, k, cuts)
    right_ids, right = most_probable(logits, k)
    np.testing.assert_allclose(probs, right.cpu().numpy(), rtol=2e-5)
    for row, (found, wanted) in enumerate(zip(ids.tolist(), right_ids.tolist(), strict=True)):
        assert len(set(found)) == k
        assert logits[row, found].tolist() == logits[row, wanted].tolist()  # equal logits in any order
        pairs = [(-logits[row, token].item(), token) for token in found]
        assert pairs == sorted(pairs), "of equal logits the lowest id comes first"


def test_all_tokens_of_a_small_vocabulary_though_a_shard_has_fewer(triton_device):
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]], device=triton_device)
    ids, probs = likeliest(logits, 5, [1, 3])
    assert ids.tolist() == [[1, 3, 2, 0, 4]]
    np.testing.assert_allclose(probs.sum(), 1.0, rtol=1e-6)

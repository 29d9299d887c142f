"""Attention of bitwise mode against padded attention, on the host and by the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from actors.engine.attention import exact
from actors.engine.attention.exact import ExactPlan
from actors.engine.attention.interface import Scoring
from actors.engine.attention.padded import PaddedPlan
from actors.engine.kv_cache import KvCache, LayerShape
from paceline_testing.forests import Forest, forest_of
from paceline_testing.random_forests import forests

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def attended(forest: Forest, scoring: Scoring, heads, dims, dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """[rows, heads, dim] by backend, of the same numbers."""
    from actors.engine.attention.exact_kernel import attend_rows  # Triton is not installed everywhere

    generator = torch.Generator().manual_seed(0)
    num_rows = forest.batch.num_rows

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    query = random(num_rows, heads[0], dims[0])
    keys, values = random(num_rows, heads[1], dims[0]), random(num_rows, heads[1], dims[1])
    pools = random(forest.num_slots + 1, heads[1], dims[0]), random(forest.num_slots + 1, heads[1], dims[1])

    def cache(dtype: torch.dtype) -> KvCache:
        kv = KvCache(forest.num_slots, device, [LayerShape(heads[1], dims[0], dims[1], dtype)])
        for own, pool in zip(kv.layer(0), pools, strict=True):
            own.copy_(pool)
        return kv

    padded = PaddedPlan(forest.batch, cache(torch.float32), device, num_rows)
    found = {"padded": padded.attend(0, query.float(), keys.float(), values.float(), scoring)}
    for name, attend in (("host", exact._attend_on_cpu), ("device", attend_rows)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exact, "_attend_on_cpu", attend)
            plan = ExactPlan(forest.batch, cache(dtype), 0, num_rows)
            found[name] = plan.attend(0, query, keys, values, scoring).float()
    return found


# Not shrunk: the interpreter would take minutes.
@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    forest=forests(max_known=50),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.sampled_from([(8, 8), (24, 16), (80, 96)]),
    dtype=st.sampled_from(list(TOLERANCES)),
    window=st.sampled_from([None, 1, 9, 30, -3, -20]),
    softcap=st.sampled_from([None, 2.0]),
)
def test_any_batch_attends_as_padded_attention_does(triton_device, forest, heads, dims, dtype, window, softcap):
    found = attended(forest, Scoring(dims[0] ** -0.5, window, softcap), heads, dims, dtype, triton_device)
    for place in ("host", "device"):
        torch.testing.assert_close(found[place], found["padded"], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_rows_of_padding_are_zeros_on_the_device(triton_device):
    from actors.engine.attention.exact_kernel import attend_rows

    forest = forest_of([(9, 0, [-1, 0], 0)])
    query = torch.ones(16, 2, 8, device=triton_device)
    kv = KvCache(forest.num_slots, triton_device, [LayerShape(1, 8, 8, torch.float32)])
    plan = ExactPlan(forest.batch, kv, 0, 16)
    context, starts = (torch.from_numpy(array).to(triton_device) for array in (np.zeros(3, np.int64), np.array([0, 3])))
    output = attend_rows(query, *kv.layer(0), context, starts, Scoring(1.0, None, None))
    assert plan.slots.tolist()[11:] == [kv.padding_slot] * 5
    assert output.shape == (16, 2, 8)
    assert not output[1:].any()

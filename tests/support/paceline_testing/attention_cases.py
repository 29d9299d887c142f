"""One layer's attention of a batch with random numbers, against padded attention in float32, which is the reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from actors.engine.arena import Arena
from actors.engine.attention.interface import AttentionPlan, Scoring
from actors.engine.attention.padded import PaddedPlan
from actors.engine.attention.prompt_chunks import pack_chunks
from actors.engine.device_inputs import DeviceInputs, send_inputs
from actors.engine.kv_cache import KvCache, LayerShape
from actors.engine.row_tiers import row_tier
from paceline_testing.forests import Forest

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    """A batch with random queries, keys and values, and a cache with random contents."""

    def __init__(
        self,
        forest: Forest,
        scoring: Scoring,
        device: torch.device,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (8, 8),
        dtype: torch.dtype = torch.float32,
        shares_values: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.forest, self.scoring, self.device, self.dtype = forest, scoring, device, dtype
        self.num_rows = row_tier(forest.batch.num_rows)
        self.query = random(self.num_rows, heads[0], dims[0])
        self.keys, self.values = random(self.num_rows, heads[1], dims[0]), random(self.num_rows, heads[1], dims[1])
        slots = forest.num_slots + 1
        self.pool_keys, self.pool_values = random(slots, heads[1], dims[0]), random(slots, heads[1], dims[1])
        self.shares_values = shares_values
        if shares_values:
            self.values, self.pool_values = self.keys[..., : dims[1]], self.pool_keys[..., : dims[1]]

    def cache(self, dtype: torch.dtype) -> KvCache:
        shape = LayerShape(self.keys.shape[1], self.keys.shape[2], self.values.shape[2], dtype, self.shares_values)
        kv = KvCache(self.forest.num_slots, self.device, [shape])
        keys, values = kv.layer(0)
        keys.copy_(self.pool_keys)
        values.copy_(self.pool_values)
        return kv

    def inputs(self) -> DeviceInputs:
        batch, nothing = self.forest.batch, np.zeros((2, 0), np.int64)
        arena, chunks = Arena(self.device), pack_chunks(batch)
        return send_inputs(arena, batch, np.array([0]), 1, nothing, self.forest.num_slots, chunks=chunks)

    def wanted(self) -> tuple[torch.Tensor, KvCache]:
        """float32 [rows, heads, value_dim], without rows of padding, and the cache with their keys and values."""
        kv = self.cache(torch.float32)
        plan = PaddedPlan(self.forest.batch, kv, self.device, self.num_rows)
        output = plan.attend(0, self.query.float(), self.keys.float(), self.values.float(), self.scoring)
        return output[: self.forest.batch.num_rows], kv

    def got(self, plan_for: Callable[[KvCache], AttentionPlan]) -> tuple[torch.Tensor, KvCache]:
        """As `wanted`, by another plan."""
        kv = self.cache(self.dtype)
        output = plan_for(kv).attend(0, self.query, self.keys, self.values, self.scoring)
        assert output.dtype == self.dtype
        assert (output[self.forest.batch.num_rows :] == 0).all(), "padding"
        return output[: self.forest.batch.num_rows].float(), kv

    def check(self, plan_for: Callable[[KvCache], AttentionPlan]) -> None:
        (wanted, wanted_kv), (got, kv) = self.wanted(), self.got(plan_for)
        torch.testing.assert_close(got, wanted, atol=TOLERANCES[self.dtype], rtol=TOLERANCES[self.dtype])
        caches = (cache.layer(0) for cache in (kv, wanted_kv))
        for ours, theirs in zip(*caches, strict=True):
            assert torch.equal(ours[:-1].float(), theirs[:-1]), "the cache, without the slot of padding rows"

"""Serving for a long time takes no more memory than serving for a short one."""

import numpy as np
import psutil
import pytest

from cluster.offline.engine import LocalEngine
from paceline_testing.tiny_models import save_tiny_model


@pytest.mark.slow  # what Python keeps, tests/unit/cluster/router/test_core_random_runs.py shows, too
def test_resident_memory_does_not_grow_over_2000_requests(tmp_path):
    shape = {"layers": 1, "hidden_size": 32, "max_positions": 64}
    target = save_tiny_model(tmp_path / "target", "llama", 5, **shape)
    draft = save_tiny_model(tmp_path / "draft", "llama", 6, **shape)
    # Drafters that learn across requests fill tables of a fixed size, which their own tests hold them to.
    engine = LocalEngine(
        str(target),
        draft_model=str(draft),
        drafters=("draft_model", "prompt_lookup", "suffix", "prediction"),
        device="cpu",
        kv_cache_tokens=4096,
        batch_size=32,
    )
    rng = np.random.default_rng(0)
    process = psutil.Process()
    resident = []
    for seed in range(10):
        prompts = [rng.integers(0, 250, rng.integers(5, 40)).tolist() for _ in range(200)]
        engine.generate(prompts, max_new_tokens=8, ignore_eos=True, temperature=0.7, seed=seed)
        resident.append(process.memory_info().rss)
    assert resident[-1] - resident[1] < 8 * 2**20  # what is compiled and cached is there after 400 requests

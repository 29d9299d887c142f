"""Drawing tokens: fused kernels against dense operations, and the device's noise against the host's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from actors.messages import SamplingParams
from actors.sampling import device_sampling
from actors.sampling.packed_rows import pack_sampling
from actors.sampling.rows import RowSampling, rows_for
from actors.sampling.sampler import _sample_densely, sample_tokens
from actors.sampling.sequence_sampling import SequenceSampling
from tests.gpu.experiments.setting import Setting

_KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.2},
}


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    vocab = setting.of(128_256, 2500)
    for name, params in _KINDS.items():
        for rows in setting.of((8, 64, 256), (2,)):
            sampling = rows_of(params, rows, vocab)
            generator = torch.Generator().manual_seed(rows)
            on_host = torch.randn(rows, vocab, generator=generator) * 3
            logits = on_host.to(setting.device)
            packed = pack_sampling(sampling, vocab, rows)
            words = torch.from_numpy(packed.words).to(setting.device)

            def fused(logits=logits, words=words, packed=packed) -> torch.Tensor:
                return device_sampling.draw_packed(
                    logits, words, num_slots=packed.num_slots, truncates=packed.truncates
                ).tokens

            def dense(logits=logits, sampling=sampling) -> torch.Tensor:
                return _sample_densely(logits, sampling, None)

            usual = sample_tokens(on_host, sampling)
            yield {
                "sampling": name, "rows": rows, "fused us": setting.time(fused).median * 1e3,
                "dense us": setting.time(dense, repeats=5).median * 1e3,
                "read us at 4 TB/s": logits.nbytes / 4e6,
                "as the host": f"{int((fused().cpu() == usual).sum())}/{rows}",
                "equal": bool((fused().cpu() == usual).all()),
            }  # fmt: skip


def rows_of(params: dict[str, Any], rows: int, vocab: int) -> RowSampling:
    sequences = [SequenceSampling(SamplingParams(seed, **params), 40) for seed in range(rows)]
    for seed, sequence in enumerate(sequences):
        sequence.extend(np.random.default_rng(seed).integers(0, vocab, 40).astype(np.int32))
    empty = [np.zeros(0, np.int32)] * rows
    return rows_for(sequences, np.arange(rows), np.arange(40, 40 + rows), empty)

"""The likeliest tokens of rows of logits and their probabilities, on a device, in two kernels: `summarize` parts of the
vocabulary, and find the `likeliest_of` them.

With a vocabulary in shards each rank gives away the `merged` summary of its own, 1 + k int64 words a row, instead of
its logits. Runs on a CPU under Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.sampling.device_sampling import TILE, dense, launch_kernel, num_tiles, power_of_two, register_operator


def summarize(logits: Tensor, k: int, first_id: int = 0) -> Tensor:
    """int64 [parts, R, 1 + k]. logits: [R, V], of any floating dtype. first_id: of column 0."""
    summaries: Tensor = torch.ops.paceline.summarize(dense(logits), k, first_id)
    return summaries.transpose(0, 1)


def merged(summaries: Tensor) -> Tensor:
    """One summary of all parts, int64 [R, 1 + k]."""
    summary: Tensor = torch.ops.paceline.merge_summaries(summaries)
    return summary


def likeliest_of(summaries: Tensor, result: Tensor) -> None:
    """Fill `result`, int64 [R, k]: token ids (low 32 bits) and the bits of their float32 probabilities, likeliest
    first. summaries: of parts that together are the vocabulary, int64 [parts, R, 1 + k]."""
    torch.ops.paceline.likeliest_of(summaries, result)


def _summarize(logits: Tensor, k: int, first_id: int) -> Tensor:
    summaries = _fake_summarize(logits, k, first_id)
    rows, tiles, _ = summaries.shape
    launch_kernel(
        "summary_kernel", (tiles, rows), logits, logits.stride(0), summaries, logits.shape[1], first_id,
        K=k, BLOCK=TILE,
    )  # fmt: skip
    return summaries


def _fake_summarize(logits: Tensor, k: int, first_id: int) -> Tensor:
    return logits.new_empty(len(logits), num_tiles(logits.shape[1]), 1 + k, dtype=torch.int64)


def _merge_summaries(summaries: Tensor) -> Tensor:
    summary = _fake_merge_summaries(summaries)
    _merge(summaries, summary, is_last=False)
    return summary


def _fake_merge_summaries(summaries: Tensor) -> Tensor:
    return summaries.new_empty(summaries.shape[1:])


def _likeliest_of(summaries: Tensor, result: Tensor) -> None:
    _merge(summaries, result, is_last=True)


def _merge(summaries: Tensor, result: Tensor, is_last: bool) -> None:
    parts, rows, words = summaries.shape
    launch_kernel(
        "merge_kernel", (rows,), summaries, summaries.stride(1), summaries.stride(0), result, parts,
        K=words - 1, IS_LAST=is_last, PARTS=power_of_two(parts), KEYS=power_of_two(words - 1), num_warps=4,
    )  # fmt: skip


register_operator("summarize", _summarize, _fake_summarize)
register_operator("merge_summaries", _merge_summaries, _fake_merge_summaries)
register_operator("likeliest_of", _likeliest_of, lambda *_: None, ("result",))

"""Guesses of a draft model on an accelerator: one copy up and one down a forward."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np
import torch

from actors.engine.arena import Part
from actors.engine.batch import SequenceRows, pack
from actors.engine.model_runner import ModelRunner, last_rows
from actors.engine.row_tiers import power_tier, row_tier
from actors.sampling.device_sampling import likeliest_packed
from actors.sampling.packed_rows import pack_sampling
from actors.sampling.row_masks import RowMasks, mask_rows
from actors.sampling.rows import RowSampling

_MOST_CAUGHT_UP = 16  # tokens that a sequence may have got since its last draft; with more it is a part of a prompt


@torch.inference_mode()
def likeliest_after(
    runner: ModelRunner,
    parts: Sequences[SequenceRows],
    wanted: Sequences[int],
    sampling: RowSampling,
    k: int,
    vocab_map: torch.Tensor | None,
    masks: RowMasks | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`likeliest_tokens` after the last `wanted` rows of each part: tokens int32 and probabilities float32, [rows, k].

    runner: with device inputs. sampling: of all wanted rows. vocab_map: int64, on the device, as `token_ids` there.
    masks: of all wanted rows; None: all are free. Draws within masks are launched one by one, behind the forward.
    """
    batch = pack(parts)
    num_wanted = sum(wanted)
    num_logits = row_tier(num_wanted) if num_wanted == batch.num_rows else power_tier(num_wanted)
    ids = None if vocab_map is None or not len(sampling.adjustments) else vocab_map.cpu().numpy()
    packed = pack_sampling(sampling, runner.num_outputs, num_logits, ids)
    rows = last_rows(batch.first_rows, np.array(wanted))
    inputs = runner.send(
        batch, rows, num_logits, [Part(packed.rows, (packed.num_words,), following=packed.adjustments)]
    )

    def compute() -> torch.Tensor:
        return runner.compute_whole(inputs)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        tokens, probs = likeliest_packed(
            logits,
            inputs.more[0],
            k,
            num_slots=packed.num_slots,
            truncates=packed.truncates,
            token_ids=vocab_map,
        )
        return torch.stack([tokens.to(torch.int32), probs.view(torch.int32)])

    may_record = max(part.count for part in parts) <= _MOST_CAUGHT_UP
    if masks is None:
        key = k, packed.num_slots, packed.truncates
        found = runner.launch(inputs, key, lambda: draw(compute()), may_record=may_record)
    else:
        logits = runner.launch(inputs, "logits", compute, may_record=may_record)
        mask_rows(logits[: len(rows)], masks, vocab_map)
        found = draw(logits)
    of_rows = found.cpu().numpy()[:, : len(rows)]
    return of_rows[0], np.ascontiguousarray(of_rows[1]).view(np.float32)

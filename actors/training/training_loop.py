"""The training loop of draft models and heads. It resumes from a checkpoint and ends as one uninterrupted run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from actors.errors import ModelError
from actors.options import Dtype
from actors.training.training_checkpoint import TrainingCheckpoint, TrainingPaused

if TYPE_CHECKING:
    import torch

Report = Callable[[str, int, int], None]  # stage, done, total
_Batch = TypeVar("_Batch")


class HasTokens(Protocol):
    """A prompt and its answer in one row, int64 [n]."""

    @property
    def token_ids(self) -> torch.Tensor: ...


_Text = TypeVar("_Text", bound=HasTokens)


def batches_of(answers: Sequence[_Text], max_tokens: int) -> list[list[_Text]]:
    """Batches of answers of similar length. A batch has at most `max_tokens` tokens with padding, or one answer."""
    batches: list[list[_Text]] = []
    for answer in sorted(answers, key=lambda answer: len(answer.token_ids)):
        if batches and (len(batches[-1]) + 1) * len(answer.token_ids) <= max_tokens:
            batches[-1].append(answer)
        else:
            batches.append([answer])
    return batches


def run_steps(
    schedule: Sequence[_Batch],
    loss_of: Callable[[_Batch, float], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    stage: str,
    report: Report,
    checkpoint: TrainingCheckpoint | None = None,
    most: int | None = None,
    most_s: float | None = None,
) -> None:
    """One step for each batch of the schedule, at most `most` in this run. The optimizer has one group.

    loss_of: takes a batch and the share of the training that is done, from 0 to below 1. most_s: seconds of this run
    within which the training ends, its learning rate at its lowest; the result then depends on the machine. The seed
    fixes the schedule, so a checkpoint holds only the step, the weights and the optimizer. Raises TrainingPaused if
    steps are left after `most`.
    """
    import torch

    parameters = optimizer.param_groups[0]["params"]
    first, total = 0, len(schedule)
    if checkpoint is not None and (saved := checkpoint.read("training")):
        for parameter, value in zip(parameters, saved["parameters"], strict=True):
            parameter.data.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    end = total if most is None else min(total, first + most)
    began, done = time.monotonic(), end
    for step in range(first, end):
        report(stage, step, total)
        share = step / total
        if most_s is not None:
            share = max(share, (time.monotonic() - began) / most_s)
            if share >= 1.0:
                done = step
                break
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * _learning_rate_share(step, share)
        loss = loss_of(schedule[step], share)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if checkpoint is not None and (checkpoint.is_due(step + 1) or step + 1 == end):
            weights = [parameter.detach() for parameter in parameters]
            state = {"parameters": weights, "optimizer": optimizer.state_dict(), "step": step + 1}
            checkpoint.write("training", state)
    if end < total:
        raise TrainingPaused(end, total)
    report(stage, done, total)


def _learning_rate_share(step: int, share: float) -> float:
    """Linear warm-up over 20 steps, then a cosine down to 3 %. share: of the training that is done."""
    return min(1.0, (step + 1) / 20) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))


def check_weights(of: str, weights: Iterable[torch.Tensor], learning_rate: float) -> None:
    """Raises ModelError when weights are not finite, so that a diverged training replaces nothing."""
    if not all(bool(tensor.isfinite().all()) for tensor in weights if tensor.is_floating_point()):
        raise ModelError(f"the training of the {of} has diverged; its learning_rate is {learning_rate}")


def fast_dtype(device: str) -> Dtype:
    """bfloat16 where the hardware multiplies it, else float32. Used for writing text and soft labels only."""
    import torch

    if device != "cpu":
        return "bfloat16"
    native = any(getattr(torch.cpu, test, bool)() for test in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return "bfloat16" if native else "float32"

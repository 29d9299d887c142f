"""What survives of a training that is interrupted, so that it ends as if it had not been."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from actors.errors import ModelError

_STEPS, _SECONDS = 50, 60.0  # between two checkpoints, whichever comes first


class TrainingPaused(Exception):
    """A training has done the steps that it was to do in one run; the next run goes on from there."""

    def __init__(self, step: int, total: int) -> None:
        super().__init__(step, total)
        self.step = step
        self.total = total


class TrainingCheckpoint:
    """A directory of tensors by name, beside what is trained; those of another training are not read.

    key: all that the result depends on.
    """

    def __init__(self, out: Path, key: str) -> None:
        self._directory = out.with_name(f".{out.name}.training")
        self._key = key
        self._written_at = time.monotonic()

    def read(self, name: str) -> dict[str, Any] | None:
        """What was last written, on the CPU, or None."""
        import torch

        try:
            saved = torch.load(self._directory / f"{name}.pt", map_location="cpu", weights_only=True)
        except Exception:  # not there, or torn: begin anew
            return None
        return saved["data"] if saved.get("key") == self._key else None

    def write(self, name: str, data: dict[str, Any]) -> None:
        """Put tensors, numbers, texts, and lists and dicts of them, in place of the last ones. Raises ModelError."""
        import torch

        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            part = self._directory / f"{name}.part"
            torch.save({"key": self._key, "data": data}, part)
            os.replace(part, self._directory / f"{name}.pt")
        except (OSError, RuntimeError) as error:  # torch's own for a full disk
            reason = error.strerror if isinstance(error, OSError) else None
            raise ModelError(f"{self._directory}: cannot be written: {reason or error}") from None
        self._written_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        return step % _STEPS == 0 or time.monotonic() - self._written_at > _SECONDS

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self._directory)


def last_step(first: int, total: int, steps: int | None) -> int:
    """Where a run that begins at step `first` of `total` ends; steps: most of one run, None: all."""
    return total if steps is None else min(total, first + steps)

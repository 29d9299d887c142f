"""Checkpoints of a training, from which an interrupted one resumes."""

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
    """A run has done as many training steps as it was allowed; the next run resumes from there."""

    def __init__(self, step: int, total: int) -> None:
        super().__init__(step, total)
        self.step = step
        self.total = total


class TrainingCheckpoint:
    """A directory beside `out`, with one file of tensors for each name.

    key: everything that the result depends on. Files with another key are ignored.
    """

    def __init__(self, out: Path, key: str) -> None:
        self._directory = out.with_name(f".{out.name}.training")
        self._key = key
        self._written_at = time.monotonic()

    def read(self, name: str) -> dict[str, Any] | None:
        """The data last written, on the CPU, or None."""
        import torch

        try:
            saved = torch.load(self._directory / f"{name}.pt", map_location="cpu", weights_only=True)
        except Exception:  # missing or torn: start again
            return None
        return saved["data"] if saved.get("key") == self._key else None

    def write(self, name: str, data: dict[str, Any]) -> None:
        """Replace the data of this name: tensors, numbers, strings, and lists and dicts of them. Raises ModelError."""
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

"""A file of answers that a model has given, so that a run which needs them again takes less time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from actors.errors import InvalidRequest


class KnownAnswers:
    """Greedy answers by model, prompt and length; JSONL, one of them a line. Without a file nothing is kept."""

    def __init__(self, file: Path | None, weights: str, max_new_tokens: int) -> None:
        """weights: the model's fingerprint. Raises InvalidRequest for a file that is something else."""
        self._file = file
        self._made_by = f"{weights}:{max_new_tokens}:"
        self._known: dict[str, list[int]] = {}
        if file is None or not file.exists():
            return
        try:
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self._known[row["of"]] = [int(token) for token in row["token_ids"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            limit = f"it must hold answers of an earlier run: {type(error).__name__}"
            raise InvalidRequest("--answers", str(file), limit) from None

    def find(self, prompt: Sequence[int]) -> list[int] | None:
        return self._known.get(self._name(prompt))

    def keep(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Raises OSError."""
        name = self._name(prompt)
        if self._file is not None and name not in self._known:
            self._known[name] = list(answer)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"of": name, "token_ids": list(answer)}) + "\n")

    def _name(self, prompt: Sequence[int]) -> str:
        digest = hashlib.sha256(self._made_by.encode())
        digest.update(np.asarray(prompt, np.int32).tobytes())
        return digest.hexdigest()[:32]

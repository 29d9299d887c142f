"""A model directory and its fingerprints."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.errors import ModelError

VOCAB_MAP_FILE = "vocab_map.safetensors"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model directory on this machine, in the format of `save_pretrained`."""

    spec: str  # as requested
    name: str  # short name for clients and directories
    path: Path

    @property
    def vocab_map_path(self) -> Path | None:
        """The file that names the output rows of a reduced-vocabulary draft model, if this is one."""
        path = self.path / VOCAB_MAP_FILE
        return path if path.is_file() else None

    def read_json(self, file_name: str) -> dict[str, Any]:
        """A JSON object in the directory, {} if the file is absent. Raises ModelError if it is unreadable."""
        path = self.path / file_name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        if not isinstance(data, dict):
            raise ModelError(f"{path}: holds a {type(data).__name__}; it must be a JSON object")
        return data

    def weights_fingerprint(self) -> str:
        """16 hex digits that differ between different weights and agree between machines.

        Hashes the configuration and, of every weight file, its size and evenly spaced samples: a fine-tune changes
        every tensor, and hashing all of a 70B checkpoint would take minutes.
        """
        digest = hashlib.sha256()
        config = self.read_json("config.json")
        for volatile in ("_name_or_path", "transformers_version"):
            config.pop(volatile, None)
        digest.update(json.dumps(config, sort_keys=True).encode())
        for path in self.weight_files():
            digest.update(path.name.encode())
            _hash_samples(path, digest)
        return digest.hexdigest()[:16]

    @property
    def directory_name(self) -> str:
        """Name of a directory for what is made from exactly these weights."""
        return f"{self.name.replace('/', '--')}-{self.weights_fingerprint()[:8]}"

    def tokenizer_fingerprint(self) -> str:
        """16 hex digits over the tokenizer and chat template files."""
        digest = hashlib.sha256()
        for name in _TOKENIZER_FILES:
            path = self.path / name
            if path.is_file():
                digest.update(name.encode())
                digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def weight_files(self) -> list[Path]:
        """The checkpoint's files: safetensors, or pickled weights if there are none."""
        files = sorted(path for path in self.path.glob("*.safetensors") if path.name != VOCAB_MAP_FILE)
        return files or sorted(self.path.glob("*.bin"))


def _hash_samples(path: Path, digest: Any) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for index in range(_SAMPLES_PER_FILE):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES_PER_FILE - 1))
            digest.update(file.read(_SAMPLE_BYTES))

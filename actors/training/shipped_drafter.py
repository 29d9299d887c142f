"""Draft models that come with the package, trained longer than a build can take, for exactly the weights of a target.

A file of `shipped/` holds what the target does not have: the layers, the output rows of the reduced vocabulary, and the
embedding of the mask token. Matrices are in blocks of 8 bits, which the CPU's kernels find again in the unpacked model
and read in place of its whole weights. The embeddings of all other tokens are the target's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError
from actors.models.parallel_draft import DEPTH_KEY, KIND_KEY, MASK_TOKEN_KEY
from actors.models.source import VOCAB_MAP_FILE, ModelSource
from actors.models.staging import directory_lock, staged_directory
from actors.training.drafter_card import CARD_FILE

if TYPE_CHECKING:
    import torch

SHIPPED = Path(__file__).with_name("shipped")
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOKEN_IDS, _MASK_EMBEDDING = "token_ids", "mask_embedding"
_STEPS = ".steps"  # after the name of a matrix
# Keys of config.json that may differ from the target's
_SHAPE = ("num_hidden_layers", "layer_types", "tie_word_embeddings", "vocab_size", "dtype")
_CONFIG = (*_SHAPE, MASK_TOKEN_KEY, KIND_KEY, DEPTH_KEY)
_BLOCK, _LARGEST_CODE = 32, 127


def shipped_weights(target: ModelSource) -> Path | None:
    """The file for exactly these weights, or None."""
    path = SHIPPED / f"{target.weights_fingerprint()}.safetensors"
    return path if path.is_file() else None


def unpack_drafter(packed: Path, target: ModelSource, out: Path, *, keeps: bool = False) -> None:
    """Write the model directory that a training would. keeps: leave one that is there. Raises ModelError."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with directory_lock(out):
        if keeps and out.is_dir():
            return
        with safe_open(packed, "pt") as file:
            metadata = file.metadata()
            tensors = whole_tensors({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        token_ids, mask_embedding = tensors.pop(_TOKEN_IDS), tensors.pop(_MASK_EMBEDDING)
        embeddings = _embeddings_of(target)
        head = embeddings.clone()
        head[token_ids] = tensors[_HEAD]
        tensors |= {_EMBEDDINGS: _with_row(embeddings, mask_embedding), _HEAD: _with_row(head, 0 * mask_embedding)}
        with staged_directory(out) as staging:
            _copy_all_but_weights(target, staging)
            config = target.read_json("config.json") | json.loads(metadata["config"])
            _write_json(staging / "config.json", config)
            _write_json(staging / CARD_FILE, json.loads(metadata["card"]))
            save_file(tensors, staging / "model.safetensors", {"format": "pt"})
            save_file({_TOKEN_IDS: token_ids}, staging / VOCAB_MAP_FILE)


def pack_drafter(directory: Path, out: Path) -> None:
    """Write the file to ship for a parallel draft model of `paceline drafter train`, small models of few layers only.

    Raises ModelError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    source = ModelSource(str(directory), directory.name, directory)
    config, card, path = source.read_json("config.json"), source.read_json(CARD_FILE), directory / "model.safetensors"
    if source.vocab_map_path is None or MASK_TOKEN_KEY not in config or not card or not path.is_file():
        raise ModelError(f"{directory}: is no parallel draft model of `paceline drafter train`, or not in one file")
    token_ids = load_file(source.vocab_map_path)[_TOKEN_IDS]
    weights = load_file(path)
    if missing := {_EMBEDDINGS, _HEAD} - set(weights):
        raise ModelError(f"{path}: has no {min(missing)}; models of this kind are not packed")
    weights[_MASK_EMBEDDING] = weights.pop(_EMBEDDINGS)[config[MASK_TOKEN_KEY]].clone()
    weights[_HEAD] = weights[_HEAD][token_ids]
    changed = {name: config[name] for name in _CONFIG if name in config}
    metadata = {"config": json.dumps(changed), "card": json.dumps(card)}
    try:
        save_file({**small_tensors(weights), _TOKEN_IDS: token_ids}, out, metadata)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{out}: cannot be written: {error}") from None
    out.chmod(0o644)  # safetensors makes it private


def small_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices as int8 codes and the float16 step of each 32 inputs, as in Q8_0 of ggml; what does not divide into 32
    as it is."""
    import torch

    small = {}
    for name, weight in weights.items():
        if weight.ndim != 2 or weight.shape[1] % _BLOCK:
            small[name] = weight
            continue
        blocks = weight.float().unflatten(1, (-1, _BLOCK))
        largest = blocks.abs().amax(2, keepdim=True).clamp(min=1e-12)
        small[name] = (blocks / largest * _LARGEST_CODE).round().to(torch.int8).flatten(1)
        small[name + _STEPS] = (largest[..., 0] / _LARGEST_CODE).to(torch.float16)
    return small


def whole_tensors(small: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `small_tensors` was given, matrices in bfloat16."""
    import torch

    whole = {name: tensor for name, tensor in small.items() if not name.endswith(_STEPS)}
    for name in whole:
        if (steps := small.get(name + _STEPS)) is not None:
            blocks = small[name].float().unflatten(1, (-1, _BLOCK)) * steps.float()[..., None]
            whole[name] = blocks.flatten(1).to(torch.bfloat16)
    return whole


def _embeddings_of(target: ModelSource) -> torch.Tensor:
    """bfloat16 [vocabulary, H]. Raises ModelError."""
    import torch
    from safetensors import safe_open

    for path in target.weight_files():
        with safe_open(path, "pt") as file:
            if _EMBEDDINGS in file.keys():  # noqa: SIM118
                embeddings: torch.Tensor = file.get_tensor(_EMBEDDINGS).to(torch.bfloat16)
                return embeddings
    raise ModelError(f"model {target.spec!r}: has no {_EMBEDDINGS}")


def _with_row(matrix: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([matrix, row[None].to(matrix.dtype)])


def _copy_all_but_weights(target: ModelSource, directory: Path) -> None:
    weights = set(target.weight_files())
    for path in target.path.iterdir():
        if path.is_file() and path not in weights:
            shutil.copy(path, directory)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

"""Reads EAGLE and DFlash heads from directories in the published formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from actors.eagle.dflash_head import ARCHITECTURE, DFlashHead, read_dflash_layout
from actors.eagle.draft_head import DraftHead
from actors.eagle.eagle_head import EagleHead
from actors.eagle.head_layout import MASK_HIDDEN, HeadLayout, read_layout, renamed
from actors.errors import ModelError
from actors.models.source import ModelSource

_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")
_VOCABULARY_KEYS = ("d2t", "t2d")
_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)  # computed by the head itself
_OF_THE_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")  # copies that `speculators` may leave in


def load_head(path: Path | str, target: PretrainedConfig, dtype: str = "float32", device: str = "cpu") -> DraftHead:
    """Load the head in directory `path` (config.json beside safetensors, or an older pytorch_model.bin) for a target.

    Raises ModelError with file, key, shape and expected shape for anything missing, unknown or of another size, and
    for a layout that is not implemented.
    """
    path = Path(path)
    if _read_config(path).get("architectures") == [ARCHITECTURE]:
        return load_dflash_head(path, target, dtype, device)
    return load_eagle_head(path, target, dtype, device)


def load_dflash_head(path: Path, target: PretrainedConfig, dtype: str = "float32", device: str = "cpu") -> DFlashHead:
    """Load a DFlash head, as `load_head`."""
    layout = read_dflash_layout(path / "config.json", _read_config(path), target.get_text_config())
    tensors, files = _read_tensors(path)
    with torch.device("meta"):
        head = DFlashHead(layout)
    _check_keys(path, head, tensors=tensors, files=files, names={})
    head.load_state_dict({key: value.to(device, getattr(torch, dtype)) for key, value in tensors.items()}, assign=True)
    return head.to(device).eval().requires_grad_(False)


def load_eagle_head(
    path: Path | str, target: PretrainedConfig, dtype: str = "float32", device: str = "cpu"
) -> EagleHead:
    """Load an EAGLE head, as `load_head`."""
    path = Path(path)
    file, data, text = path / "config.json", _read_config(path), target.get_text_config()
    tensors, files = _read_tensors(path)
    names = {renamed(key): key for key in tensors}
    layout = read_layout(file, data, text, tensors)
    if layout.mask_token is not None:
        tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].flatten()  # published with further dimensions of 1
    vocabulary = {key: tensors.pop(key) for key in _VOCABULARY_KEYS if key in tensors}
    if layout.kind == "eagle" and vocabulary:
        raise ModelError(f"{files[next(iter(vocabulary))]}: key {next(iter(vocabulary))!r} belongs to EAGLE-3 alone")
    _check_vocabulary(file, layout, vocabulary)
    head = _empty_head(file, layout)
    _add_biases(head, names)
    _check_keys(path, head, tensors=tensors, files=files, names=names)
    floats = getattr(torch, dtype)
    state = {renamed(key): value.to(device, floats) for key, value in tensors.items()}
    head.load_state_dict(state, assign=True)
    if "d2t" in vocabulary:
        assert layout.vocab_size is not None
        sizes = layout.vocab_size, layout.config.vocab_size, text.vocab_size
        head.draft_ids = _draft_ids(files["d2t"], vocabulary, *sizes)
    _fit_vocabulary(head, text.vocab_size)
    return head.to(device).eval().requires_grad_(False)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_dir():
        raise ModelError(f"EAGLE head {str(path)!r}: there is no such directory")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path / 'config.json'}: there is no such file; it says of what shape the head is")
    data: Mapping[str, Any] = ModelSource(str(path), path.name, path).read_json("config.json")
    return data


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """All tensors of the checkpoint, and the file of each."""
    from safetensors.torch import load_file

    weight_files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not weight_files:
        raise ModelError(f"EAGLE head {str(path)!r}: there is neither a .safetensors file nor a pytorch_model.bin")
    tensors: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    for file in weight_files:
        try:
            if file.suffix == ".safetensors":
                loaded = load_file(file)
            else:
                loaded = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ModelError(f"{file}: cannot be read: {' '.join(str(error).split())[:300]}") from None
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ModelError(f"{file}: holds something else than tensors by name")
        for key, value in loaded.items():
            if not key.endswith(_IGNORED_ENDINGS) and key not in _OF_THE_TARGET:
                tensors[key], files[key] = value, file
    return tensors, files


def _empty_head(file: Path, layout: HeadLayout) -> EagleHead:
    """The head without weights, on the meta device."""
    try:
        with torch.device("meta"):
            return EagleHead(layout)
    except Exception as error:  # of the shapes, which torch checks
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(f"{file}: cannot be used: {reason}") from None


def _check_vocabulary(file: Path, layout: HeadLayout, vocabulary: dict[str, Tensor]) -> None:
    size, whole = layout.vocab_size, layout.config.vocab_size
    if size is not None and size != whole and "d2t" not in vocabulary:
        raise ModelError(
            f"{file}: draft_vocab_size is {size} of {whole}; the checkpoint lacks the key 'd2t', which says what the "
            "columns stand for"
        )


def _add_biases(head: EagleHead, names: dict[str, str]) -> None:
    """Add the attention biases that the checkpoint has, even if config.json does not mention them (Qwen2 has three of
    the four)."""
    for index, layer in enumerate(head.layers):
        for name in _BIASES:
            if f"layers.{index}.self_attn.{name}" in names:
                linear = getattr(layer.self_attn, name.removesuffix(".bias"))
                linear.bias = nn.Parameter(torch.empty(linear.out_features, device="meta"))


def _check_keys(
    path: Path, head: DraftHead, tensors: dict[str, Tensor], files: dict[str, Path], names: dict[str, str]
) -> None:
    """names: published names by those in the head."""
    is_middle = any(key.startswith("midlayer.") for key in tensors)
    expected = {}
    for name, value in head.state_dict().items():
        missing = f"midlayer.{name.removeprefix('layers.0.')}" if is_middle and name.startswith("layers.0.") else name
        expected[names.get(name, missing)] = tuple(value.shape)
    for key, shape in expected.items():
        if key not in tensors:
            raise ModelError(f"EAGLE head {str(path)!r}: key {key!r} of shape {list(shape)} is missing")
        if tuple(tensors[key].shape) != shape:
            raise ModelError(f"{files[key]}: key {key!r} has shape {list(tensors[key].shape)}; expected {list(shape)}")
        if not tensors[key].is_floating_point():
            raise ModelError(f"{files[key]}: key {key!r} is {tensors[key].dtype}; expected floating point")
    for key in tensors:
        if key not in expected:
            raise ModelError(f"{files[key]}: key {key!r} of shape {list(tensors[key].shape)} is unknown in such a head")


def _draft_ids(
    file: Path, vocabulary: dict[str, Tensor], draft_vocab_size: int, own_vocab_size: int, vocab_size: int
) -> Tensor:
    """Token of each column. d2t int [Vd]: token less column; t2d bool [own_vocab_size]: whether a token has a column.
    vocab_size: the target's."""
    offsets, known = vocabulary["d2t"], vocabulary.get("t2d")
    is_integer = not (offsets.is_floating_point() or offsets.dtype == torch.bool)
    if tuple(offsets.shape) != (draft_vocab_size,) or not is_integer:
        raise ModelError(
            f"{file}: key 'd2t' has shape {list(offsets.shape)} of {offsets.dtype}; expected [{draft_vocab_size}] of "
            "integers"
        )
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise ModelError(f"{file}: key 'd2t' leads to tokens {int(ids.min())} to {int(ids.max())} of {vocab_size}")
    if len(ids.unique()) != len(ids):
        raise ModelError(f"{file}: key 'd2t' leads two columns to the same token")
    if known is not None:
        expected = torch.zeros(max(own_vocab_size, vocab_size), dtype=torch.bool)
        expected[ids] = True
        expected = expected[:own_vocab_size]
        if tuple(known.shape) != (own_vocab_size,) or not torch.equal(known.bool(), expected):
            raise ModelError(
                f"{file}: key 't2d' of shape {list(known.shape)} does not mark the tokens of 'd2t'; "
                f"expected shape [{own_vocab_size}]"
            )
    return ids


def _fit_vocabulary(head: EagleHead, vocab_size: int) -> None:
    """Give an own embedding a row for each of the target's tokens, zeros where the head knows none, and take away
    output columns beyond them: vocabularies are padded to different sizes. A mask token keeps its row."""
    if head.embed_tokens is not None:
        num_rows = vocab_size if head.masks is None else max(vocab_size, head.masks.token + 1)
        rows = head.embed_tokens.weight[:num_rows]
        padding = rows.new_zeros(num_rows - len(rows), rows.shape[1])
        head.embed_tokens = nn.Embedding.from_pretrained(torch.cat([rows, padding]))
    if head.lm_head is not None and head.draft_ids is None:
        head.lm_head.weight = nn.Parameter(head.lm_head.weight[:vocab_size])
        head.lm_head.out_features = len(head.lm_head.weight)

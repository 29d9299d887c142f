"""Tiny models whose answers can be compared as text."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer


def speak_ascii(directory: Path) -> None:
    """Leave the model no logits for anything but printable ASCII: any prefix of its answers is then valid text."""
    weights = load_file(directory / "model.safetensors")
    tokens = make_byte_tokenizer().convert_ids_to_tokens(range(BYTE_VOCAB_SIZE))
    other = [index for index, token in enumerate(tokens) if len(token) > 1 or not 33 <= ord(token) < 127]
    weights["lm_head.weight"][other] = 0.0
    save_file(weights, directory / "model.safetensors", {"format": "pt"})

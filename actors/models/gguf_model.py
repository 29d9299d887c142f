"""Converts GGUF files to ordinary model directories."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from actors.errors import ModelError
from actors.models.loaded_weights import check_loaded
from actors.models.quiet import quiet_transformers


def convert_gguf(gguf: Path, out: Path, progress: Callable[[str, int, int], None]) -> None:
    """Write the model, tokenizer and chat template of a GGUF file into the directory `out`.

    Weights are stored in float32, which holds the dequantised values (scale x integer + offset) exactly; bfloat16 would
    round four in five values of the demo model. Raises ModelError.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    with quiet_transformers():
        try:
            progress("reading the tokenizer", 0, 1)
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
            with _tensor_progress(progress):
                model, info = AutoModelForCausalLM.from_pretrained(
                    str(gguf.parent),
                    gguf_file=gguf.name,
                    quantization_config=GgufConfig(dequantize=True),
                    dtype=torch.float32,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
            check_loaded(model, info)
        except Exception as error:  # the reader raises whatever a malformed file makes it trip over
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ModelError(f"{gguf}: cannot be read as a GGUF language model: {reason}") from None
        progress("writing", 0, 1)
        # The weights are dequantised; with this setting, loading would ask for the GGUF file.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.name_or_path = gguf.stem
        eos = model.generation_config.eos_token_id
        if eos is None:
            eos = tokenizer.eos_token_id
        pad = tokenizer.pad_token_id
        if pad is None:
            pad = eos[0] if isinstance(eos, list) else eos
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=pad
        )
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        progress("writing", 1, 1)


@contextlib.contextmanager
def _tensor_progress(progress: Callable[[str, int, int], None]) -> Iterator[None]:
    """Report tensors to `progress` instead of the bar that the GGUF reader always draws."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def counted(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        items = list(tensors)
        for done, tensor in enumerate(items):
            progress("dequantising the weights", done, len(items))
            yield tensor
        progress("dequantising the weights", len(items), len(items))

    original = getattr(reader, "tqdm", None)
    if original is None:
        yield
        return
    reader.tqdm = counted
    try:
        yield
    finally:
        reader.tqdm = original

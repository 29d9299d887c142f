"""Checkpoints whose weights are quantized already (fp8, AWQ, GPTQ, ...), which `transformers` loads.

Tested is fp8 in blocks, which a machine without a GPU widens while it loads. Of all other formats, and of fp8 on a GPU,
only the refusals are tested: they need packages or kernels that are no requirements of Paceline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.errors import ModelError
from actors.models.source import ModelSource
from actors.options import Quantization

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def stored_quantization(config: PretrainedConfig) -> dict[str, Any] | None:
    """`quantization_config` of a model's config.json, None if the weights are whole."""
    text = config.get_text_config(decoder=True)
    return getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)


def check_stored_quantization(
    source: ModelSource, stored: dict[str, Any], quantization: Quantization, device: str
) -> None:
    """Raises ModelError unless `transformers` loads this format onto the device and no `quantization` is asked for."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

    method = str(stored.get("quant_method") or "")
    if stored.get("load_in_8bit") or stored.get("load_in_4bit"):
        method = "bitsandbytes"
    if not method:
        raise ModelError(f"model {source.spec!r}: quantization_config in config.json has no quant_method")
    if quantization != "none":
        raise ModelError(
            f"quantization is {quantization!r}; the weights of model {source.spec!r} are quantized with {method} "
            "already: it must be none"
        )
    known = sorted({name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING})
    if method not in known:
        raise ModelError(
            f"model {source.spec!r}: its weights are quantized with {method}; transformers reads {', '.join(known)}"
        )
    try:
        quantizer = AutoHfQuantizer.from_config(dict(stored), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except Exception as error:  # each format raises other exceptions for what it lacks
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(
            f"model {source.spec!r}: its weights are quantized with {method}, which {device} cannot load here: {reason}"
        ) from None


def unify_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the weights of a model whose checkpoint was widened while it was loaded, in place.

    `transformers` widens what is quantized to `dtype`, and leaves the rest as it is stored, so that the first product
    of the two would fail. A model that is still quantized stays as it is.
    """
    import torch

    if getattr(model, "hf_quantizer", None) is not None:
        return
    halves = (torch.float16, torch.bfloat16)
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype in halves else set()
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float32, *halves) and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)

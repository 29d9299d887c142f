"""Chooses the runner for a model."""

from __future__ import annotations

from transformers import PreTrainedModel

from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.model_runner import ModelRunner
from actors.errors import ModelError
from actors.options import Exactness


def make_runner(
    model: PreTrainedModel, num_slots: int, exact: Exactness = "default"
) -> ModelRunner | EncoderDecoderRunner:
    """Raises ModelError for an unsupported model."""
    if not model.config.is_encoder_decoder:
        return ModelRunner(model, num_slots, exact)
    if exact == "bitwise":
        raise ModelError(f"exact is 'bitwise' and {model.config.model_type} has an encoder; it needs a model without")
    return EncoderDecoderRunner(model)

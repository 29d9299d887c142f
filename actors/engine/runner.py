"""Chooses the runner for a model."""

from __future__ import annotations

from transformers import PreTrainedModel

from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.model_runner import ModelRunner
from actors.options import Exactness


def make_runner(
    model: PreTrainedModel, num_slots: int, exact: Exactness = "default"
) -> ModelRunner | EncoderDecoderRunner:
    """exact: only for models without an encoder. Raises ModelError for an unsupported model."""
    return EncoderDecoderRunner(model) if model.config.is_encoder_decoder else ModelRunner(model, num_slots, exact)

"""Chooses the runner for a model."""

from __future__ import annotations

from transformers import PreTrainedModel

from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.model_runner import ModelRunner
from actors.engine.recurrent.mixer import has_mixers
from actors.engine.recurrent.recurrent_runner import RecurrentRunner
from actors.options import AttentionBackend, Exactness


def make_runner(
    model: PreTrainedModel,
    num_slots: int,
    exact: Exactness = "default",
    *,
    attention: AttentionBackend | None = None,
    is_eager: bool = False,
) -> ModelRunner | EncoderDecoderRunner:
    """exact, attention, is_eager: only for models without an encoder. Raises ModelError for an unsupported model."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderRunner(model)
    if has_mixers(model):
        return RecurrentRunner(model, num_slots, exact, attention=attention)
    return ModelRunner(model, num_slots, exact, attention=attention, is_eager=is_eager)

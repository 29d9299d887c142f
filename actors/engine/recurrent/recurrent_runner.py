"""Runs a model with recurrent layers: attention over the paged KV cache, and states by sequence.

Draft trees must be chains. Layers run as they are, on any device that torch has kernels for.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engine.batch import PackedBatch
from actors.engine.model_runner import ModelRunner
from actors.engine.recurrent.mixer import CurrentRuns, pack_mixers, run_limits
from actors.engine.recurrent.mixer_runs import MixerRuns
from actors.engine.recurrent.states import RecurrentSequence
from actors.engine.sequence import Sequence
from actors.errors import ModelError
from actors.models.layer_types import ATTENDING, WITHOUT_KEYS
from actors.options import AttentionBackend, Exactness


class RecurrentRunner(ModelRunner):
    """A `ModelRunner` whose sequences are `RecurrentSequence`s and whose draft trees are chains."""

    sequence_type = RecurrentSequence
    chain_only = True
    layer_types = (*ATTENDING, *WITHOUT_KEYS, "hybrid")

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        exact: Exactness = "default",
        *,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Raises ModelError for exact "bitwise" and for attention other than "padded"."""
        name = model.config.get_text_config().model_type
        if exact == "bitwise":
            raise ModelError(
                f"exact is 'bitwise' and {name} has a recurrent state, whose bits depend on the rows of a round"
            )
        if attention not in (None, "padded"):
            raise ModelError(f"attention is {attention!r} and {name} has a recurrent state; choose 'padded'")
        self._current = CurrentRuns()
        pack_mixers(model, self._current)
        self._limits = run_limits(model)
        super().__init__(model, num_slots, attention="padded", is_eager=True)

    def forward_sequences(
        self, batch: PackedBatch, logit_rows: np.ndarray, sequences: Sequences[Sequence]
    ) -> torch.Tensor:
        """As `ModelRunner.forward_sequences`. sequences: `RecurrentSequence`s, whose states are not valid after a
        forward that raises."""
        num_rows = self.padded(batch.num_rows)
        with torch.inference_mode():
            runs = MixerRuns(batch, sequences, num_rows, self.device, self._limits)
            self._current.runs = runs
            try:
                logits = self.forward(batch, logit_rows)
            finally:
                self._current.runs = None
            runs.finish()
        return logits

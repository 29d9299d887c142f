"""Computes a recurrent module of transformers on packed rows, with the states of their sequences.

The module itself is as it was. It is called with a cache that holds the states of the sequences of one run.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from actors.engine.recurrent.mixer_runs import MixerRun, MixerRuns, RunLimits

# How a mixer computes several rows after a state: at once; in chunks, whose size its call may say or its attribute
# `chunk_size` says; or not at all: one after the other.
_Rows = Literal["at once", "chunk argument", "chunk attribute", "one by one"]
# By the classes of mixers that the engine computes
_MIXERS: dict[str, _Rows] = {
    "Lfm2ShortConv": "at once",
    "Lfm2MoeShortConv": "at once",
    "Lfm3ShortConv": "at once",
    "Qwen3NextGatedDeltaNet": "chunk argument",
    "Qwen3_5GatedDeltaNet": "chunk argument",
    "Qwen3_5MoeGatedDeltaNet": "chunk argument",
    "OlmoHybridGatedDeltaNet": "chunk argument",
    "KimiLinearDeltaAttention": "chunk argument",
    "BambaMixer": "chunk attribute",
    "GraniteMoeHybridMambaLayer": "chunk attribute",
    "NemotronHMamba2Mixer": "chunk attribute",
    "FalconH1Mixer": "chunk attribute",
    "JambaMambaMixer": "one by one",
    "MiniMaxLightningAttention": "at once",
}
# Smallest chunk. The scans pad rows to whole chunks of 64 or 256, which costs as much as so many rows.
_LEAST_CHUNK = 8
_NO_LIMIT = (0.0, float("inf"))


class _ProductCache:
    """What MiniMax's mixers take for a cache: of each the sum of products of keys and values."""

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self._states = layer.recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._states[0]

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self._states[0] = state


class CurrentRuns:
    """The runs of the forward that is being computed, which all mixers of a model share."""

    def __init__(self) -> None:
        self.runs: MixerRuns | None = None  # None: a forward of transformers' own


class PackedMixer(nn.Module):
    """A recurrent module on packed rows; without current runs, the module itself."""

    def __init__(self, mixer: nn.Module, index: int, current: CurrentRuns) -> None:
        """index: among the mixers of the model."""
        super().__init__()
        self.mixer = mixer
        self.current = current
        self._index = index
        self._layer_index = int(mixer.layer_idx)
        self._rows = _MIXERS[type(mixer).__name__]
        self._chunk_size = int(getattr(mixer, "chunk_size", 64))
        names = inspect.signature(mixer.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self._is_attention = "position_embeddings" in names  # MiniMax's, which returns its weights, too

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, rows, hidden] -> the same. Rows of padding give zeros."""
        runs = self.current.runs
        if runs is None:
            return self.mixer(hidden_states, *args, **kwargs)
        inputs = runs.inputs(self._index, hidden_states[0])
        outputs = torch.zeros_like(hidden_states[0])
        for run in runs.runs:
            layer = run.load(self._index)
            computed = self._compute(inputs.index_select(0, run.inputs).unflatten(0, (-1, run.num_rows)), layer, run)
            own = computed.flatten(0, 1).index_select(0, run.outputs)
            outputs.index_copy_(0, run.rows, own.to(outputs.dtype))
            if run.moves_on:
                run.store(self._index, layer)
        runs.keep(self._index, inputs)
        return (outputs[None], None) if self._is_attention else outputs[None]

    def _compute(self, inputs: Tensor, layer: LinearAttentionLayer, run: MixerRun) -> Tensor:
        """[S, L, hidden] -> the same; changes the layer's states to those after the rows."""
        if self._is_attention:
            attended, _ = self.mixer(inputs, None, None, past_key_values=_ProductCache(layer))
            return cast("Tensor", attended)
        options: dict[str, Any] = {self._cache_name: Cache(layers=[layer] * (self._layer_index + 1))}
        if self._rows == "one by one" and run.has_state:
            return torch.cat([self.mixer(row, **options) for row in inputs.split(1, dim=1)], dim=1)
        # Kernels of accelerators choose their own.
        chunk_size = self._chunk_size if inputs.device.type != "cpu" else self._chunk_of(run.num_rows)
        if self._rows == "chunk argument" and chunk_size != self._chunk_size:
            options["chunk_size"] = chunk_size
        elif self._rows == "chunk attribute":
            self.mixer.chunk_size = chunk_size
        try:
            computed: Tensor = self.mixer(inputs, **options)
        finally:
            if self._rows == "chunk attribute":
                self.mixer.chunk_size = self._chunk_size
        return computed

    def _chunk_of(self, num_rows: int) -> int:
        """The least power of two that the rows fit in, at most the mixer's own size."""
        return min(self._chunk_size, max(_LEAST_CHUNK, 1 << (num_rows - 1).bit_length()))


def pack_mixers(model: PreTrainedModel, current: CurrentRuns) -> None:
    """Put a `PackedMixer` around each mixer of a model, in place, all with these current runs. Once is enough; the next
    time, they get the new ones."""
    index = 0
    for module in list(model.modules()):
        if isinstance(module, PackedMixer):
            module.current = current
            continue
        for name, child in list(module.named_children()):
            if is_mixer(child):
                setattr(module, name, PackedMixer(child, index, current))
                index += 1


def is_mixer(module: nn.Module) -> bool:
    """Whether the engine knows how to compute a recurrent module."""
    return type(module).__name__ in _MIXERS


def run_limits(model: PreTrainedModel) -> RunLimits:
    """How the rows of a model's mixers may be split into calls."""
    mixers = [module for module in model.modules() if is_mixer(module)]
    if any(_MIXERS[type(mixer).__name__] == "one by one" for mixer in mixers):
        return RunLimits(most_replayed=0)  # each row costs a call
    # transformers' Mamba-2 layers compute one row after a state in a way of its own: time steps are not clamped, and 16
    # bits are rounded elsewhere, so that rounds with drafts and without would differ by more than the order of sums.
    mamba = [mixer for mixer in mixers if _MIXERS[type(mixer).__name__] == "chunk attribute"]
    clamps = any(tuple(getattr(mixer, "time_step_limit", _NO_LIMIT)) != _NO_LIMIT for mixer in mamba)
    is_rounded = bool(mamba) and model.dtype != torch.float32
    return RunLimits(least_rows=2 if clamps or is_rounded else 1)


def has_mixers(model: PreTrainedModel) -> bool:
    return any(is_mixer(module) for module in model.modules())

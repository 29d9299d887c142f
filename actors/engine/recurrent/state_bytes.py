"""Size of a sequence's recurrent state."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from actors.models.layer_types import has_recurrent_state


@torch.inference_mode()
def recurrent_state_bytes(model: PreTrainedModel) -> int:
    """Bytes of the states of one sequence, 0 for a model without. Runs a forward of one token, without an engine."""
    if not has_recurrent_state(model.config):
        return 0
    row = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    cache = model(input_ids=row, use_cache=True).past_key_values
    states = [state for state in getattr(cache, "linear_cache", ()) if isinstance(state, torch.Tensor)]  # MiniMax
    states += [
        state
        for layer in cache.layers
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
        if state is not None
    ]
    return sum(state.numel() * state.element_size() for state in states)

"""A forward on CPU in one call of compiled steps: embeddings, all layers, the last norm and the output layer.

The modules of a small model take as long between these as two of its layers: what they need has left the caches.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.engine.batch import PackedBatch
from actors.engine.cpu_kernels import layer_state, layer_steps
from actors.engine.cpu_kernels.fused_layer import Chain, FusedLayer, float_bits, joined, lay_out, run_program
from actors.engine.cpu_kernels.layer_fusion import has_known_code
from actors.engine.cpu_kernels.panel_linear import PanelLinear
from actors.engine.cpu_kernels.rms_norm import RmsNorm
from actors.engine.decoder_layers import decoder_layers
from actors.engine.kv_cache import KvCache
from actors.engine.rotary import turns_by_position
from actors.errors import ModelError

_LEAST_ANGLES = 1024  # positions


class WholeForward:
    """The forward of a model whose layers are one chain."""

    def __init__(self, model: PreTrainedModel, chain: Chain) -> None:
        base = model.base_model
        self._space, self._dtype = chain.space, chain.dtype
        self._embeddings, self._rotary = base.embed_tokens.weight.detach(), base.rotary_emb
        self._panels, weight = model.lm_head.panels, base.norm.weight.detach().float().contiguous()
        self._angles = torch.empty(1, 0), torch.empty(1, 0)  # cosines and sines by position
        self._is_static = turns_by_position(self._rotary)
        self._chain = chain
        parts = model, base, base.embed_tokens, base.rotary_emb, base.norm, model.lm_head
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        rounds, width = self._dtype == torch.bfloat16, self._embeddings.shape[1]
        norm_fields = [width, weight.data_ptr(), float_bits(base.norm.eps), self._panels.rounds_inputs]
        first, first_kept = lay_out(self._space, [(layer_steps.embed(rounds), [width, self._embeddings.data_ptr()])])
        last, last_kept = lay_out(
            self._space,
            [
                (layer_steps.normalize_wanted(rounds), norm_fields),
                (layer_steps.multiply_wanted(), self._panels.fields),
            ],
        )
        self._program = joined([first, chain.program, last])
        self._kept = weight, first_kept, last_kept

    @property
    def is_unseen(self) -> bool:
        """Whether no hook sees one of the modules."""
        return self._chain.is_unseen and not any(self._hooks)

    def logits(self, batch: PackedBatch, kv: KvCache, wanted: np.ndarray) -> Tensor:
        """[n, vocab], of the rows `wanted`, int64 [n]. Raises IndexError for a token that the model does not have."""
        space, outputs = self._space, torch.empty(len(wanted), self._panels.width)
        with space.lock:
            if self._is_static:
                space.begin_batch(batch, kv, batch.slots, batch.positions)
                space.turn_by(self._angles_to(batch.max_context))
            else:
                space.begin_batch(batch, kv, batch.slots, np.arange(batch.num_rows))
                space.turn_by(self._rotary(self._embeddings[:0], torch.from_numpy(batch.positions)[None]))
            ids = batch.token_ids, len(self._embeddings)
            if not layer_state.tell_whole(space.state, *ids, wanted, outputs.numpy()):
                raise IndexError(f"a token is not below {len(self._embeddings)}, the number of embeddings")
            run_program(self._program)
        return outputs[:, : self._panels.out_features].to(self._dtype)

    def _angles_to(self, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions before `end` at least, [1, positions, rotated dims]."""
        if end > self._angles[0].shape[1]:
            positions = torch.arange(max(_LEAST_ANGLES, 2 * end))
            self._angles = self._rotary(self._embeddings[:0], positions[None])
        return self._angles


def whole_forward(model: PreTrainedModel) -> WholeForward | None:
    """None for a model with other parts than Llama's and its kin, whose layers are not all in one chain, or whose
    output layer has another kernel than panels."""
    base = model.base_model
    try:
        layers = decoder_layers(model)
    except ModelError:
        return None
    chain = layers[0].chain if isinstance(layers[0], FusedLayer) else None
    if chain is None or chain.num_layers != len(layers) or not (has_known_code(model) and has_known_code(base)):
        return None
    embedding, norm, head = base.embed_tokens, base.norm, model.lm_head
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or not isinstance(norm, RmsNorm):
        return None
    if not isinstance(head, PanelLinear) or head.panels.missing_inputs:
        return None
    is_one_dtype = embedding.weight.dtype == norm.weight.dtype == chain.dtype and embedding.weight.is_contiguous()
    return WholeForward(model, chain) if is_one_dtype else None

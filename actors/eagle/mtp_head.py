"""Multi-token prediction heads: a decoder layer of the target's family that continues its hidden states.

Such a head is published within the target's checkpoint (DeepSeek-AI 2024, arXiv:2412.19437). It is trained for the
token after next; here its normed output is its next feature, so that it drafts at any depth, as EAGLE heads do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.eagle.draft_head import DraftHead
from actors.engine.attention.interface import ATTENTION_NAME
from actors.engine.attention.latent import cache_latents
from actors.engine.kv_cache import LayerShape
from actors.engine.layer_checks import check_layers
from actors.engine.layer_shapes import layer_shapes


class MtpHead(DraftHead):
    """The target's feature is its last hidden state, the input of its output layer. Outputs are normed."""

    def __init__(self, model: PreTrainedModel, *, projects_feature_first: bool) -> None:
        """model: of the target's family, with the head's decoder layer as its only one and the head's last norm as its
        last norm. The other norms and the projection are to be loaded. Raises ModelError for a layer that the engine
        does not compute."""
        super().__init__()
        check_layers(model, "default")
        model.set_attn_implementation(ATTENTION_NAME)
        cache_latents(model)
        self._kv_shapes = layer_shapes(model)
        # Its forward is that of the family: the rotation of positions, the layer and the norm.
        self.block = model.base_model
        size, norm = int(model.config.hidden_size), self.block.norm
        self.embedding_norm, self.feature_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.projection = nn.Linear(2 * size, size, bias=False, dtype=model.dtype, device=model.device)
        self._projects_feature_first = projects_feature_first
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        self.draft_ids = None

    @property
    def feature_layers(self) -> None:
        return None

    @property
    def kv_shapes(self) -> list[LayerShape]:
        return self._kv_shapes

    def attend_paged(self) -> None:
        """It always does."""

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, drafted: Tensor | None = None, **attention: Any
    ) -> Tensor:
        """embeddings and features [batch, rows, h], positions int64 [batch, rows] -> [batch, rows, h]."""
        parts = [self.embedding_norm(embeddings), self.feature_norm(features)]
        if self._projects_feature_first:
            parts.reverse()
        projected = self.projection(torch.cat(parts, dim=-1))
        output: Tensor = self.block(inputs_embeds=projected, position_ids=positions, use_cache=False, **attention)[0]
        return output

    def logits(self, hidden: Tensor, target_head: nn.Module) -> Tensor:
        logits: Tensor = (target_head if self.lm_head is None else self.lm_head)(hidden)
        return logits

"""The common interface of heads that draft from the target's hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequences
from typing import Any

from torch import Tensor, nn

from actors.engine.kv_cache import LayerShape


class DraftHead(nn.Module, ABC):
    """Row t takes the embedding of token t + 1 and the target's feature of position t. Its output predicts token t + 2,
    and replaces the feature of position t + 1 in further drafting."""

    embed_tokens: nn.Embedding | None  # None: the target's embeddings are used
    lm_head: nn.Linear | None  # None: the target's output layer is used
    draft_ids: Tensor | None  # int64 [Vd]: token of each output column; None: column c stands for token c

    @property
    @abstractmethod
    def feature_layers(self) -> Sequences[int] | None:
        """What is read of the target, as in `FeatureTap`."""

    @property
    @abstractmethod
    def kv_shapes(self) -> list[LayerShape]:
        """Keys and values of each layer."""

    @abstractmethod
    def attend_paged(self) -> None:
        """Let all layers attend as their argument `paged_plan` says."""

    @abstractmethod
    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Outputs [batch, rows, h] of embeddings [batch, rows, h], features of the target or earlier outputs
        [batch, rows, f or h], and positions int64 [batch, rows]. attention: arguments of the layers' attention."""

    @abstractmethod
    def logits(self, hidden: Tensor, target_head: nn.Module) -> Tensor:
        """Logits [..., Vd] of outputs of `forward`. target_head: the target's output layer."""

    def kv_bytes_per_token(self) -> int:
        return sum(shape.kv_heads * sum(shape.stored_dims) * shape.dtype.itemsize for shape in self.kv_shapes)

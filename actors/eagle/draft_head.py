"""The common interface of heads that draft from the target's hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from actors.engine.attention.interface import ATTENTION_NAME
from actors.engine.kv_cache import LayerShape


@dataclass(frozen=True, slots=True)
class MaskRows:
    """How a one-pass head guesses several tokens in one forward: rows of a mask token follow the text's."""

    token: int  # an id that the embedding has a row for
    # True: the text's last token comes again before the masks, all these rows see one another, and a mask guesses the
    # token in its own place. False: rows are causal, and a mask guesses the token after it, as rows of text do.
    is_block: bool = False
    most: int | None = None  # tokens that the head is made to guess; None: any number


class DraftHead(nn.Module, ABC):
    """Row t takes the embedding of token t + 1 and the target's feature of position t. Its output predicts token t + 2,
    and replaces the feature of position t + 1 in further drafting."""

    embed_tokens: nn.Embedding | None  # None: the target's embeddings are used
    lm_head: nn.Linear | None  # None: the target's output layer is used
    draft_ids: Tensor | None  # int64 [Vd]: token of each output column; None: column c stands for token c
    masks: MaskRows | None = None  # None: no one-pass head

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
    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, drafted: Tensor | None = None, **attention: Any
    ) -> Tensor:
        """Outputs [batch, rows, h] of embeddings [batch, rows, h], features of the target or earlier outputs
        [batch, rows, f or h], and positions int64 [batch, rows]. drafted: bool [batch, rows], the rows without a
        feature; None: none, or no one-pass head. attention: arguments of the layers' attention."""

    @abstractmethod
    def logits(self, hidden: Tensor, target_head: nn.Module) -> Tensor:
        """Logits [..., Vd] of outputs of `forward`. target_head: the target's output layer."""

    def kv_bytes_per_token(self) -> int:
        return sum(shape.kv_heads * sum(shape.stored_dims) * shape.dtype.itemsize for shape in self.kv_shapes)


class OwnLayersHead(DraftHead):
    """A head whose layers are modules of Paceline, all alike in what they store."""

    config: PretrainedConfig
    fc: nn.Linear  # from features to the head's width
    layers: nn.ModuleList

    @property
    def kv_shapes(self) -> list[LayerShape]:
        config = self.config
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim, self.fc.weight.dtype)
        return [shape] * len(self.layers)

    def attend_paged(self) -> None:
        self.config._attn_implementation = ATTENTION_NAME

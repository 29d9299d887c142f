"""EAGLE heads: decoder layers that continue the target's hidden states.

EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-2 (Li et al. 2024, arXiv:2406.16858) share the published format of
a head that predicts the next hidden state, which the target's output layer turns into tokens. EAGLE-3 (Li et al. 2025,
arXiv:2503.01840) reads several hidden states of the target and has an output layer of its own, often for a reduced
vocabulary. P-EAGLE (Hui et al. 2026, arXiv:2602.01469) is EAGLE-3 that guesses several tokens in one forward, with a
learnt feature for positions that the target has not computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from actors.eagle.draft_head import MaskRows, OwnLayersHead
from actors.eagle.head_layout import HeadLayout
from actors.eagle.head_settings import HeadKind


class HeadLayer(nn.Module):
    """A Llama decoder layer of a head.

    The first one differs: EAGLE's has no norm before attention; EAGLE-3's attention reads the normed embedding beside
    the normed feature, 2h wide.
    """

    def __init__(self, layout: HeadLayout, index: int) -> None:
        super().__init__()
        config = layout.config
        self._reads_embeddings = layout.kind == "eagle3" and index == 0
        self._norm_before_residual = layout.norm_before_residual
        self.self_attn = LlamaAttention(config, index)
        if self._reads_embeddings:
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(self.self_attn, name)
                wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
                setattr(self.self_attn, name, wide)
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm: nn.Module = nn.Identity()
        if self._reads_embeddings or index > 0:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeddings: Tensor, features: Tensor, rotary: tuple[Tensor, Tensor], attention: dict[str, Any]
    ) -> Tensor:
        """embeddings and features [batch, rows, h] -> [batch, rows, h]."""
        if self._reads_embeddings:
            normed = self.hidden_norm(features)
            attended = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
            features = normed if self._norm_before_residual else features
        else:
            attended = self.input_layernorm(features)
        hidden = features + self.self_attn(attended, position_embeddings=rotary, **attention)[0]
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class EagleHead(OwnLayersHead):
    """A head of either kind. Its output predicts the feature of the next position.

    EAGLE's feature is the target's last hidden state, the input of its output layer; EAGLE-3's is the concatenation of
    the hidden states that `HeadLayout.feature_layers` names.
    """

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__()
        self.layout = layout
        self.config = config = layout.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(layout.fused_size, size, bias=layout.has_bias)
        self.input_norm = LlamaRMSNorm(layout.fused_size, eps) if layout.norm_before_fc else None
        norms = [LlamaRMSNorm(layout.feature_size, eps) for _ in (layout.feature_layers or ()) if layout.fc_norm]
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.layers = nn.ModuleList(HeadLayer(layout, index) for index in range(config.num_hidden_layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if layout.has_own_embedding else None
        self.norm = LlamaRMSNorm(size, eps) if layout.kind == "eagle3" else None
        self.lm_head = nn.Linear(size, layout.vocab_size, bias=False) if layout.vocab_size is not None else None
        if layout.mask_token is not None:
            self.masks = MaskRows(layout.mask_token)
            self.mask_hidden = nn.Parameter(torch.empty(layout.fused_size))
        self.register_buffer("draft_ids", None, persistent=False)
        with torch.device("cpu"):  # not on the meta device, unlike the weights
            self.rotary_emb = LlamaRotaryEmbedding(config)

    @property
    def kind(self) -> HeadKind:
        return self.layout.kind

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        return self.layout.feature_layers

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, drafted: Tensor | None = None, **attention: Any
    ) -> Tensor:
        """embeddings [batch, rows, h], positions int64 [batch, rows]; features are the target's, [batch, rows, f] or
        as wide as `fc` reads, or earlier outputs of this head, [batch, rows, h]. drafted: bool [batch, rows], rows that
        have the learnt feature. Returns [batch, rows, h].

        attention: arguments of the attention function of `config`, such as `attention_mask`.
        """
        rotary = self.rotary_emb(embeddings, positions)
        attention.setdefault("attention_mask", None)
        if drafted is not None:
            features = torch.where(drafted[..., None], self.mask_hidden, features)
        if self.kind == "eagle":
            hidden = self.fc(torch.cat((embeddings, features), dim=-1))
        else:
            hidden = features if features.shape[-1] == embeddings.shape[-1] else self.fused(features)
        for layer in self.layers:
            hidden = layer(embeddings, hidden, rotary, attention)
        return self.norm(hidden) if self.norm is not None and self.layout.norm_output else hidden

    def fused(self, features: Tensor) -> Tensor:
        """EAGLE-3: the target's features [..., layers * f] -> [..., h]."""
        if self.fc_norm is not None:
            parts = features.split(self.layout.feature_size, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        fused: Tensor = self.fc(features)
        return fused

    def logits(self, hidden: Tensor, target_head: nn.Module) -> Tensor:
        if self.norm is not None and not self.layout.norm_output:
            hidden = self.norm(hidden)
        logits: Tensor = (target_head if self.lm_head is None else self.lm_head)(hidden)
        return logits

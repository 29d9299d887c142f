"""Parallel draft models as they are published: the mask token by which they guess several tokens in one forward.

PARD (An et al. 2025, arXiv:2504.18583) is an ordinary causal model whose config.json names its mask token by
`pard_token` or `ptd_token_id`. How many tokens to guess published checkpoints do not say; those trained here do, in
`pard_depth`. A PARD-2 checkpoint (arXiv:2605.08632) drafts with or without features of its target; here it drafts
without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.errors import ModelError
from actors.models.source import ModelSource

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MASK_TOKEN_KEY = "pard_token"
DEPTH_KEY = "pard_depth"
KIND_KEY, KIND = "spd_type", "pard"
_MASK_TOKEN_KEYS = (MASK_TOKEN_KEY, "ptd_token_id")
_KINDS = (KIND, "pard2")


def mask_token_of(source: ModelSource, config: Any) -> int | None:
    """The mask token of a parallel draft model, None for other models. config: of the model. Raises ModelError."""
    found = {key: value for key in _MASK_TOKEN_KEYS if (value := getattr(config, key, None)) is not None}
    kind = getattr(config, KIND_KEY, None)
    if kind is not None and kind not in _KINDS:
        raise ModelError(f"model {source.spec!r}: {KIND_KEY} is {kind!r}; it must be one of {', '.join(_KINDS)}")
    if not found:
        if kind is None:
            return None
        raise ModelError(f"model {source.spec!r}: {KIND_KEY} is {kind!r}, and {MASK_TOKEN_KEY} is missing")
    num_ids = int(config.get_text_config().vocab_size)
    for key, token in found.items():
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < num_ids:
            raise ModelError(f"model {source.spec!r}: {key} is {token!r}; it must be an id below {num_ids}")
    if len(set(found.values())) > 1:
        raise ModelError(f"model {source.spec!r}: {' and '.join(found)} differ: {found}")
    if config.is_encoder_decoder:
        raise ModelError(
            f"model {source.spec!r}: {next(iter(found))} is set; {config.model_type} has an encoder, and a parallel "
            "draft model must have none"
        )
    return next(iter(found.values()))


def most_guesses_of(source: ModelSource, config: Any) -> int | None:
    """Tokens that a parallel draft model has learnt to guess in one forward; None: not told. Raises ModelError."""
    most = getattr(config, DEPTH_KEY, None)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ModelError(f"model {source.spec!r}: {DEPTH_KEY} is {most!r}; it must be a number from 1 on")
    return most


def kind_of(config: Any) -> str:
    """What the configuration of a parallel draft model says of itself, for logs."""
    if getattr(config, KIND_KEY, None) == "pard2":
        return "PARD-2, without features of the target"
    return "PARD"


def silence_mask_token(model: PreTrainedModel, mask_token: int, token_ids: torch.Tensor | None) -> None:
    """Set the logit of the mask token to -inf, in place, so that it is never a guess. token_ids: see `DraftModel`."""
    import torch

    from actors.models.shards import VocabularyShard

    head = model.get_output_embeddings()
    column = mask_token if token_ids is None else int(torch.searchsorted(token_ids, mask_token))
    if column >= head.out_features or (token_ids is not None and int(token_ids[column]) != mask_token):
        return
    if isinstance(head, VocabularyShard):
        head, column = head.linear, column - head.first_id
        if not 0 <= column < head.out_features:
            return  # another rank has it
    bias = torch.zeros(head.out_features, dtype=model.dtype, device=model.device) if head.bias is None else head.bias
    bias = bias.clone()
    bias[column] = -torch.inf
    head.bias = torch.nn.Parameter(bias, requires_grad=False)

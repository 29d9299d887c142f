"""Makes random models of a configuration, whose context decides what they say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from actors.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LOGIT_SPREAD = 4.0  # standard deviation of the logits


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model in float32 and eval mode, without gradients; the same seed gives the same weights.

    Weights are scaled by their fan-in, norms and biases differ from their neutral values, and the output layer is not
    tied to the embeddings, else the last token would drown the context.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(0.1 * noise)
            elif parameter.requires_grad:  # positions that are computed have none
                is_embedding = "embed" in name or name.endswith(("wte.weight", "wpe.weight"))
                parameter.copy_(noise * (1.0 if is_embedding else 1.2 / math.sqrt(parameter.shape[-1])))
        head = model.get_output_embeddings()
        if head is not None:
            noise = torch.randn(head.weight.shape, generator=generator)
            head.weight = torch.nn.Parameter(noise * (_LOGIT_SPREAD / math.sqrt(noise.shape[-1])))
    if config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id or 0
    model.eval()
    model.requires_grad_(False)
    return model

"""The prompts and the prediction of a call as tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.served_model import ServedModel
from cluster.generation import check_token_ids
from cluster.text.text_codec import EncodedPrompt, TextCodec

# Only this many characters of a prediction are tokenised for each token that the model has room for. The longest tokens
# of some vocabularies are longer, but text is not made of them alone.
_PREDICTION_CHARS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """At least one prompt, and the prediction, int32 [n]."""

    prompts: tuple[EncodedPrompt, ...]
    prediction: np.ndarray

    @property
    def num_prompt_tokens(self) -> int:
        """Sum over all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def starts_inside_thought(self) -> bool:
        """Whether the chat template has begun a thought for the model. A chat has one prompt."""
        return self.prompts[0].starts_inside_thought


async def encode(call: GenerationCall, codec: TextCodec, model: ServedModel) -> EncodedCall:
    """Raises InvalidRequest, and what `TextCodec.encode_prompt` raises."""
    prompts: list[EncodedPrompt] = []
    for prompt in call.prompts:
        if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], int):
            check_token_ids(call.prompt_field, prompt, model.vocab_size)  # before int32 wraps them around
        prompts.append(
            await codec.encode_prompt(
                prompt,
                call.prompt_field,
                add_special_tokens=call.add_special_tokens,
                template=call.template,
                tool_use=call.tool_use,
                max_model_len=model.max_model_len,
            )
        )
        await asyncio.sleep(0)  # other calls come between prompts
    prediction = await codec.encode_text(call.prediction[: _PREDICTION_CHARS_PER_TOKEN * model.max_model_len])
    return EncodedCall(tuple(prompts), prediction)

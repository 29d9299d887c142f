"""A router that says what a test wants a model to say, and a gateway's service over it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np

from actors.messages import GenerationRequest, TokenChunk, TokenLogprobs
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_router import EchoRouter
from paceline_testing.tiny_models import make_byte_tokenizer

EOS = 256
# A model that thinks and calls.
THINKING = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}assistant: {# <think> </think> #}"
)


class SayingRouter(EchoRouter):
    """Answers with a text of its own, and an end-of-sequence token."""

    def __init__(self, text: str, chunk_tokens: int = 3) -> None:
        super().__init__(chunk_tokens)
        self.say(text)

    def say(self, text: str) -> None:
        """From the next request on."""
        self._said = [*make_byte_tokenizer().encode(text), EOS]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Every token is as likely as can be, where log-probabilities are wanted."""
        async for chunk in super().generate(request):
            count, k = len(chunk.token_ids), request.num_logprobs
            if k < 0:
                yield chunk
                continue
            tops = np.repeat(np.asarray(chunk.token_ids, np.int32), k)
            found = TokenLogprobs(np.zeros(count, np.float32), tops, np.zeros(count * k, np.float32), k)
            yield msgspec.structs.replace(chunk, logprobs=found)

    def _answer(self, request: GenerationRequest) -> list[int]:
        return self._said[request.num_output_in_prompt :][: request.max_new_tokens]


def saying_service(
    text: str,
    chunk_tokens: int = 3,
    template: str | None = None,
    config: GatewayConfig | None = None,
    **options: Any,
) -> tuple[GenerationService, SayingRouter]:
    """template: None: that of the byte tokenizer, which writes calls as Hermes does. options: of the service."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    model = ServedModel("tiny", max_model_len=4096, vocab_size=259, eos_token_ids=(EOS,))
    router = SayingRouter(text, chunk_tokens)
    return GenerationService(router, tokenizer, model, config or GatewayConfig(), **options), router

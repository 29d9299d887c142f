"""Text to tokens and back: the bodies of /tokenize and /detokenize in vLLM's shapes, for HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from actors.errors import MISSING, InvalidRequest
from cluster.gateway.requests.chat_schema import TemplateFields, conversation_of, template_options, tool_use
from cluster.gateway.requests.schema import parse_fields
from cluster.gateway.service import GenerationService
from cluster.generation import check_token_ids
from cluster.tenants.gatekeeper import Tenant
from cluster.text.chat_format import NO_TOOLS
from cluster.text.chat_template import TemplateOptions
from cluster.text.text_codec import Prompt
from cluster.validation import StrictFields, Whole, size_of


class TokenizePromptBody(StrictFields):
    """POST /tokenize with text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None  # null: true
    return_token_strs: bool | None = None


class TokenizeChatBody(TemplateFields):
    """POST /tokenize with messages, which the model's chat template renders."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictFields):
    """POST /detokenize. Special tokens are part of the text."""

    model: str | None = None
    tokens: Annotated[list[int], Whole]


TokenizeBody = TokenizePromptBody | TokenizeChatBody


@dataclass(frozen=True, slots=True)
class Tokenized:
    token_ids: list[int]
    max_model_len: int
    token_strings: list[str] | None  # where they are wanted

    def json_object(self) -> dict[str, Any]:
        return {
            "count": len(self.token_ids),
            "max_model_len": self.max_model_len,
            "tokens": self.token_ids,
            "token_strs": self.token_strings,
        }


def parse_tokenize(fields: Mapping[str, Any], unknown: Literal["refuse", "ignore"] = "refuse") -> TokenizeBody:
    """Raises InvalidRequest."""
    if fields.get("messages") is not None:
        if fields.get("prompt") is not None:
            raise InvalidRequest("prompt", size_of(fields["prompt"]), "messages are given, too; send one of them")
        return parse_fields(TokenizeChatBody, fields, unknown)
    if fields.get("prompt") is None:
        raise InvalidRequest("prompt", MISSING, "one of prompt and messages is required", "missing_required_parameter")
    return parse_fields(TokenizePromptBody, fields, unknown)


async def tokenize(service: GenerationService, body: TokenizeBody, tenant: Tenant | None) -> Tokenized:
    """Raises ModelNotFound, and what `GenerationService.tokens_of` raises."""
    service.check_model(body.model)
    prompt: Prompt
    if isinstance(body, TokenizePromptBody):
        prompt, field, template, tools = body.prompt, "prompt", TemplateOptions(), NO_TOOLS
    else:
        template = template_options(body, service.codec.chat_format)
        prompt, field, tools = conversation_of(body), "messages", tool_use(body)
    adds = body.add_special_tokens is not False
    found = await service.tokens_of(
        prompt, field, tenant=tenant, add_special_tokens=adds, template=template, tool_use=tools
    )
    token_ids: list[int] = found.tolist()
    strings = None
    if body.return_token_strs:
        strings = await asyncio.to_thread(service.codec.token_strings, token_ids)
    return Tokenized(token_ids, service.model.max_model_len, strings)


async def detokenize(service: GenerationService, body: DetokenizeBody) -> str:
    """Raises ModelNotFound, or InvalidRequest for ids that are not in the vocabulary."""
    service.check_model(body.model)
    check_token_ids("tokens", body.tokens, service.model.vocab_size)
    return await asyncio.to_thread(service.codec.decode, body.tokens, skip_special_tokens=False)

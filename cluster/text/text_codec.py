"""Encodes and decodes text with any Hugging Face tokenizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from actors.errors import InvalidRequest
from cluster.text.chat_template import TemplateOptions
from cluster.validation import counted

_OFF_LOOP_CHARS = 4096  # shorter texts encode faster than a thread switch


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str  # system, developer, user, assistant
    content: str


Conversation = tuple[ChatMessage, ...]
Prompt = str | tuple[int, ...] | Conversation  # text, token ids, or messages for the chat template


class TextCodec:
    """Wraps a `transformers` tokenizer. Uses its Rust tokenizer directly, which needs no lock and truncates nothing."""

    def __init__(self, tokenizer: Any, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._rust = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()  # for tokenizers written in Python
        if self._rust is not None:
            self._rust.no_truncation()
            self._rust.no_padding()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    async def encode_prompt(
        self,
        prompt: Prompt,
        field: str,
        *,
        add_special_tokens: bool = True,
        template: TemplateOptions | None = None,
    ) -> np.ndarray:
        """int32 [n]. Long texts are tokenised in a thread. Raises InvalidRequest for messages the template refuses.

        add_special_tokens: concerns texts. template: concerns messages; None: the defaults.
        """
        if isinstance(prompt, str):
            return await self._off_loop_when_long(len(prompt), self._encode, prompt, add_special_tokens)
        if prompt and isinstance(prompt[0], ChatMessage):
            length = sum(len(message.content) for message in prompt if isinstance(message, ChatMessage))
            return await self._off_loop_when_long(
                length, self._encode_conversation, prompt, field, template or TemplateOptions()
            )
        return np.asarray(prompt, dtype=np.int32)

    async def encode_text(self, text: str) -> np.ndarray:
        """int32 [n], no special tokens added."""
        return await self._off_loop_when_long(len(text), self._encode, text, False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text, without special tokens if they are skipped; U+FFFD for invalid bytes."""
        if self._rust is not None:
            return str(self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        with self._lock:
            return str(
                self._tokenizer.decode(
                    list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
                )
            )

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them, special ones too."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    async def _off_loop_when_long(self, length: int, encode: Any, *arguments: Any) -> np.ndarray:
        if length < _OFF_LOOP_CHARS:
            return encode(*arguments)
        return await asyncio.to_thread(encode, *arguments)

    def _encode(self, text: str, add_special_tokens: bool) -> np.ndarray:
        if self._rust is not None:
            return np.asarray(self._rust.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)
        with self._lock:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), dtype=np.int32)

    def _encode_conversation(
        self, messages: Sequence[ChatMessage], field: str, template: TemplateOptions
    ) -> np.ndarray:
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                field,
                counted(len(messages), "message"),
                f"model {self._model_name!r} has no chat template; send a prompt instead",
                "unsupported_value",
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, **template.arguments())
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                field, counted(len(messages), "message"), f"the model's chat template refuses them: {error}"
            ) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # What the template computes with the request's values; the error's text may hold the conversation.
            limit = "the model's chat template cannot be rendered with them and the given options"
            raise InvalidRequest(field, counted(len(messages), "message"), limit) from None
        # The template has written the special tokens already.
        return self._encode(text, False)

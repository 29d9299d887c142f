"""Encodes and decodes text with any Hugging Face tokenizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from actors.errors import InvalidRequest, Size
from cluster.text.chat_format import NO_TOOLS, ChatFormat, ToolUse
from cluster.text.chat_template import TemplateOptions
from cluster.text.fill_in import fill_in_marks
from cluster.text.token_bound import token_bound
from cluster.validation import counted

_OFF_LOOP_CHARS = 4096  # shorter texts encode faster than a thread switch
_MESSAGE_CHARS = 32  # characters that take as long to encode as an empty message takes to render


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str  # system, developer, user, assistant, tool
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()  # OpenAI's objects; see `template_messages`
    tool_call_id: str | None = None  # of the call that a message of role tool answers
    reasoning_content: str | None = None

    def as_object(self) -> dict[str, Any]:
        """OpenAI's message, with the fields that are set."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """starts_inside_thought: the chat template has begun a thought for the model."""

    token_ids: np.ndarray  # int32 [n]
    starts_inside_thought: bool = False


Conversation = tuple[ChatMessage, ...]
Prompt = str | tuple[int, ...] | Conversation  # text, token ids, or messages for the chat template


class TextCodec:
    """Wraps a `transformers` tokenizer. Uses its Rust tokenizer directly, which needs no lock and truncates nothing."""

    def __init__(self, tokenizer: Any, model_name: str, tool_parser: str = "auto") -> None:
        """tool_parser: see `ChatFormat`."""
        self._tokenizer = tokenizer
        self._model_name = model_name
        self.chat_format = ChatFormat(tokenizer, tool_parser)
        self.fill_in_marks = fill_in_marks(tokenizer)
        self._rust = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()  # for tokenizers written in Python
        if self._rust is not None:
            self._rust.no_truncation()
            self._rust.no_padding()
        self._bound = token_bound(self._rust)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def tokenizer_info(self) -> dict[str, str | None]:
        """Class, special tokens and chat template; None: the tokenizer has none."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        found = {name: getattr(self._tokenizer, name, None) for name in names}
        return {"tokenizer_class": type(self._tokenizer).__name__, **found}

    async def encode_prompt(
        self,
        prompt: Prompt,
        field: str,
        *,
        add_special_tokens: bool = True,
        template: TemplateOptions | None = None,
        tool_use: ToolUse = NO_TOOLS,
        max_model_len: int | None = None,
    ) -> EncodedPrompt:
        """Long texts are tokenised in a thread. Raises InvalidRequest for messages the template refuses, and without
        tokenising for texts that cannot have less than max_model_len tokens; None: they are tokenised.

        add_special_tokens: concerns texts. template, tool_use: concern messages. template None: the defaults.
        """
        if isinstance(prompt, str):
            self._check_length(prompt, field, max_model_len)
            return EncodedPrompt(await self._off_loop_when_long(len(prompt), self._encode, prompt, add_special_tokens))
        if prompt and isinstance(prompt[0], ChatMessage):
            messages = [one for one in prompt if isinstance(one, ChatMessage)]
            encoded: EncodedPrompt = await self._off_loop_when_long(
                _OFF_LOOP_CHARS if tool_use.callable_tools else sum(map(_encoding_chars, messages)),
                self._encode_conversation,
                messages,
                field,
                template or TemplateOptions(),
                tool_use,
                max_model_len,
            )
            return encoded
        return EncodedPrompt(np.asarray(prompt, dtype=np.int32))

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without tokenising."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def _check_length(self, text: str, field: str, max_model_len: int | None) -> None:
        if max_model_len is not None and (least := self.least_tokens(text)) >= max_model_len:
            limit = f"there is room for at most {max_model_len} tokens, prompt and answer together"
            raise InvalidRequest(field, Size(f"at least {least} tokens"), limit, "context_length_exceeded")

    async def encode_text(self, text: str) -> np.ndarray:
        """int32 [n], no special tokens added."""
        token_ids: np.ndarray = await self._off_loop_when_long(len(text), self._encode, text, False)
        return token_ids

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

    async def _off_loop_when_long(self, length: int, encode: Any, *arguments: Any) -> Any:
        if length < _OFF_LOOP_CHARS:
            return encode(*arguments)
        return await asyncio.to_thread(encode, *arguments)

    def _encode(self, text: str, add_special_tokens: bool) -> np.ndarray:
        if self._rust is not None:
            if len(text) < _OFF_LOOP_CHARS:
                found = self._rust.encode(text, add_special_tokens=add_special_tokens)
            else:  # unlike `encode`, this gives other threads the interpreter meanwhile
                (found,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return np.asarray(found.ids, dtype=np.int32)
        with self._lock:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), dtype=np.int32)

    def _encode_conversation(
        self,
        messages: Sequence[ChatMessage],
        field: str,
        template: TemplateOptions,
        tool_use: ToolUse,
        max_model_len: int | None,
    ) -> EncodedPrompt:
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                field,
                counted(len(messages), "message"),
                f"model {self._model_name!r} has no chat template; send a prompt instead",
                "unsupported_value",
            )
        objects = [message.as_object() for message in messages]
        turns, tools = self.chat_format.template_input(objects, tool_use, field)
        try:
            text = self._tokenizer.apply_chat_template(turns, tools, tokenize=False, **template.arguments())
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                field, counted(len(messages), "message"), f"the model's chat template refuses them: {error}"
            ) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # What the template computes with the request's values; the error's text may hold the conversation.
            limit = "the model's chat template cannot be rendered with them and the given options"
            raise InvalidRequest(field, counted(len(messages), "message"), limit) from None
        self._check_length(text, field, max_model_len)
        # The template has written the special tokens already.
        return EncodedPrompt(self._encode(text, False), self.chat_format.starts_inside_thought(text))


def _encoding_chars(message: ChatMessage) -> int:
    """Characters that take as long to encode. Calls count as a long text: writing them is a part of the work."""
    if message.tool_calls:
        return _OFF_LOOP_CHARS
    return (
        _MESSAGE_CHARS + len(message.content) + len(message.reasoning_content or "") + len(message.tool_call_id or "")
    )

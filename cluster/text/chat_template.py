"""How a conversation is rendered with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.errors import InvalidRequest
from cluster.validation import counted

MAX_KWARGS_BYTES = 8192  # as JSON

# Variables that the template gets from elsewhere, functions that it calls, and arguments of `apply_chat_template`.
_RESERVED = frozenset((
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "dict",
    "documents", "eos_token", "max_length", "messages", "namespace", "pad_token", "padding", "raise_exception", "range",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "self", "strftime_now",
    "tokenize", "tokenizer_kwargs", "tools", "truncation", "unk_token",
))  # fmt: skip
_OWN_PARAMETERS = frozenset(("add_generation_prompt", "continue_final_message", "messages", "tools"))


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """add_generation_prompt: end with the header of an answer. continue_final_message: leave the last message open, so
    that the answer continues it. variables: the template's own, such as enable_thinking."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `apply_chat_template`."""
        return {
            **self.variables,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


def check_variables(variables: Mapping[str, Any], parameter: str) -> None:
    """Raises InvalidRequest for names that are not the template's own, and beyond MAX_KWARGS_BYTES. parameter: the
    request's name of them."""
    for name in variables:
        if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
            instead = f"; {name} is a parameter of its own" if name in _OWN_PARAMETERS else ""
            raise InvalidRequest(parameter, name[:64], f"this name is not a variable of templates{instead}")
    size = len(json.dumps(variables, ensure_ascii=False).encode(errors="replace"))
    if size > MAX_KWARGS_BYTES:
        raise InvalidRequest(parameter, counted(size, "byte"), f"it must have at most {MAX_KWARGS_BYTES} bytes")

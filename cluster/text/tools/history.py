"""Messages with tool calls and their results, as chat templates take them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from actors.errors import InvalidRequest, Size
from cluster.text.json_shape import without_strings
from cluster.validation import shown, size_of

_SHORT_ID_CHARS = 9
_MAX_CONTAINERS = 1 << 16  # lists and objects in the arguments of one call


@dataclass(frozen=True, slots=True)
class HistoryNeeds:
    """How the templates of a format want calls. arguments_as_text: JSON text, otherwise an object. short_ids: 9 letters
    and digits."""

    arguments_as_text: bool = False
    short_ids: bool = False


def template_messages(
    messages: Sequence[Mapping[str, Any]], needs: HistoryNeeds, field: str = "messages"
) -> list[dict[str, Any]]:
    """Messages for `apply_chat_template` from OpenAI's, whose contents are text or null. A missing content becomes "",
    since templates concatenate it. A message of role tool gets the name of its function. A call's arguments may be an
    object that has been checked, instead of JSON text; its `field`, if it has one, names them in errors.

    Raises InvalidRequest for arguments that are not a JSON object, and for a result of an unknown call.
    """
    called: dict[str, str] = {}  # names by id
    written = []
    for index, message in enumerate(messages):
        place = f"{field}[{index}]"
        plain = {**message, "content": message.get("content") or ""}
        plain.pop("tool_calls", None)  # templates ask whether it is there
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = [
                _call(call, needs, f"{place}.tool_calls[{number}]") for number, call in enumerate(message["tool_calls"])
            ]
            called.update((call["id"], call["function"]["name"]) for call in calls)
            plain["tool_calls"] = calls
        if message["role"] == "tool":
            plain["tool_call_id"] = call_id = _id(str(message.get("tool_call_id") or ""), needs)
            if call_id not in called:
                limit = "it must be the id of a tool call in an earlier message of the assistant"
                raise InvalidRequest(f"{place}.tool_call_id", shown(message.get("tool_call_id")), limit)
            plain["name"] = called[call_id]
        written.append(plain)
    return written


def _call(call: Mapping[str, Any], needs: HistoryNeeds, place: str) -> dict[str, Any]:
    function = call["function"]
    given = function.get("arguments") or "{}"
    is_text = isinstance(given, str)
    arguments = _parsed(given, call.get("field", f"{place}.function.arguments")) if is_text else given
    if needs.arguments_as_text:
        arguments = given if is_text else json.dumps(given, ensure_ascii=False)
    return {
        "id": _id(str(call["id"]), needs),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parsed(text: str, field: str) -> dict[str, Any]:
    """Raises InvalidRequest that names the field, unless the text is one JSON object without lone surrogates."""
    if text.count("[") + text.count("{") > _MAX_CONTAINERS:
        bare = without_strings(text.encode(errors="replace"))
        if (count := bare.count(b"[") + bare.count(b"{")) > _MAX_CONTAINERS:
            limit = f"at most {_MAX_CONTAINERS} are read in the arguments of one call"
            raise InvalidRequest(field, Size(f"{count} lists and objects"), limit)
    try:
        parsed = _json_value(text.strip())
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    raise InvalidRequest(field, size_of(text), "it must be the text of one JSON object, in valid Unicode")


def _json_value(text: str) -> Any:
    """Models write control characters into strings, which JSON forbids. Raises ValueError or RecursionError."""
    try:
        return from_json(text, allow_inf_nan=False)  # bounds the depth, so that nothing after it recurses too deeply
    except ValueError:
        return from_json(json.dumps(json.loads(text, strict=False)), allow_inf_nan=False)


def _id(given: str, needs: HistoryNeeds) -> str:
    is_short = len(given) == _SHORT_ID_CHARS and given.isascii() and given.isalnum()
    if is_short or not needs.short_ids:
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:_SHORT_ID_CHARS]

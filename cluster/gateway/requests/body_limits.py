"""Refuses bodies by their shape, before they cost time: what follows would hold up all other calls of the gateway.

The event loop and the interpreter's lock are shared, so a body that holds a million values must not be parsed,
validated or rendered. Its values are counted in the bytes first, at about a gigabyte a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actors.errors import InvalidRequest, Size
from cluster.gateway.errors import BodyTooLarge
from cluster.gateway.requests.call import MAX_CHOICES
from cluster.gateway.requests.schema import parse_json_object
from cluster.text.json_shape import without_strings
from cluster.validation import counted

MAX_STRINGS = 1 << 17  # keys included
MAX_CONTAINERS = 1 << 16  # lists and objects
MAX_MESSAGES = 1 << 13
MAX_PARTS = 1 << 11  # content parts and tool calls of all messages together
MAX_FIELDS = 1 << 8  # of the body itself
_SPARE_VALUES = 1 << 17  # besides token ids
_PART_LISTS = ("content", "tool_calls", "output", "summary")  # of messages and input items


def read_fields(data: bytes, max_model_len: int) -> dict[str, Any]:
    """The JSON object in a body, if it is small enough to be served. max_model_len: tokens of the longest prompt.

    Raises BodyTooLarge, or InvalidRequest.
    """
    check_shape(data, max_model_len)
    fields = parse_json_object(data)
    check_lengths(fields, max_model_len)
    return fields


def check_shape(data: bytes, max_model_len: int) -> None:
    """Raises BodyTooLarge for more strings, lists, objects or values than any call needs."""
    # Quotation marks that no backslash escapes: at least one for each string, and at most two.
    _limit("strings", (data.count(b'"') - data.count(b'\\"')) // 2, MAX_STRINGS)
    num_containers = data.count(b"[") + data.count(b"{")
    num_values = data.count(b",")
    if num_containers <= MAX_CONTAINERS and num_values <= max_model_len:
        return
    bare = without_strings(data)
    num_lists = bare.count(b"[")
    _limit("lists and objects", num_lists + bare.count(b"{"), MAX_CONTAINERS)
    # A prompt of token ids is a list, of several prompts a list of lists.
    most = min(MAX_CHOICES, num_lists) * max_model_len + _SPARE_VALUES
    _limit("values", bare.count(b","), most)


def check_lengths(fields: Mapping[str, Any], max_model_len: int) -> None:
    """Raises InvalidRequest for lists that are longer than the model or a call allows."""
    _limit("fields", len(fields), MAX_FIELDS)
    most = min(MAX_MESSAGES, max_model_len)
    for name, noun in (("messages", "message"), ("input", "item")):
        given = fields.get(name)
        if isinstance(given, Sequence) and not isinstance(given, str) and len(given) > most:
            limit = f"at most {most} {noun}s are taken, since the model has room for {max_model_len} tokens"
            raise InvalidRequest(name, counted(len(given), noun), limit, "context_length_exceeded")
    for name in ("messages", "input", "system"):
        check_num_parts(name, _num_parts(fields.get(name)))
    prompt = fields.get("prompt")
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        return
    if isinstance(prompt[0], (list, str)):
        if len(prompt) > MAX_CHOICES:
            raise InvalidRequest("prompt", counted(len(prompt), "prompt"), f"at most {MAX_CHOICES} in one call")
    elif len(prompt) >= max_model_len:  # token ids
        limit = f"there is room for at most {max_model_len} tokens, prompt and answer together"
        raise InvalidRequest("prompt", counted(len(prompt), "token"), limit, "context_length_exceeded")


def check_num_parts(field: str, num_parts: int) -> None:
    """num_parts: content parts and tool calls of all messages. Raises InvalidRequest."""
    if num_parts > MAX_PARTS:
        limit = f"at most {MAX_PARTS} are taken in one call"
        raise InvalidRequest(field, Size(f"{num_parts} content parts and tool calls"), limit)


def _num_parts(given: object) -> int:
    """Parts and calls in messages, input items or content blocks, whose fields are not validated yet."""
    if not isinstance(given, list):
        return 0
    lists = [item.get(name) for item in given if isinstance(item, dict) for name in _PART_LISTS]
    # A tool_result block has content of its own.
    return sum(len(one) + _num_parts(one) for one in lists if isinstance(one, list))


def _limit(what: str, count: int, most: int) -> None:
    if count > most:
        raise BodyTooLarge("body", Size(f"{count} {what}"), f"at most {most} are read")

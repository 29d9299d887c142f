"""Tools for models whose chat template has none: they are described in the system message, in Hermes' format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.text.tools.hermes import BEGIN, END
from cluster.text.tools.tool import Tool

_RESULT_BEGIN, _RESULT_END = "<tool_response>", "</tool_response>"


def system_text(tools: Sequence[Tool]) -> str:
    described = "\n".join(json.dumps(tool.openai_form, ensure_ascii=False) for tool in tools)
    example = '{"name": <name of the function>, "arguments": <object with its arguments>}'
    return (
        "You can call functions. Their signatures, as JSON schemas, are between <tools> and </tools>:\n"
        f"<tools>\n{described}\n</tools>\n"
        f"To call one, answer with a JSON object between {BEGIN} and {END}:\n"
        f"{BEGIN}\n{example}\n{END}\n"
        f"Its result comes back between {_RESULT_BEGIN} and {_RESULT_END}."
    )


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, str]]:
    """Messages of `template_messages` without calls and results: those are text, of the assistant and of the user. The
    tools are described after the system message, if there are any."""
    written: list[dict[str, str]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "assistant":
            calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
            text = "\n".join([text, *calls] if text else calls)
        elif role == "tool":
            role, text = "user", f"{_RESULT_BEGIN}\n{text}\n{_RESULT_END}"
            if written and written[-1]["role"] == "user" and written[-1]["content"].endswith(_RESULT_END):
                written[-1]["content"] += "\n" + text  # results of one message's calls are one turn
                continue
        written.append({"role": role, "content": text})
    if not tools:
        return written
    if written and written[0]["role"] == "system":
        written[0]["content"] += "\n\n" + system_text(tools)
        return written
    return [{"role": "system", "content": system_text(tools)}, *written]


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{END}"

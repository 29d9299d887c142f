"""Tools, and an answer with two calls of them in each format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.text.tools.detect import FORMATS
from cluster.text.tools.events import CallArguments, CallBegin, Content, Event, Reasoning
from cluster.text.tools.format import ToolParser
from cluster.text.tools.tool import Tool

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name"},
            "days": {"type": "integer", "minimum": 1},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "where": {"$ref": "#/$defs/point"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    },
)
TIME = Tool("get_time", "The time", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, TIME)
ARGUMENTS = {"city": 'Zürich\n"Höngg"', "days": 3, "unit": "celsius", "where": {"x": 1.5}, "note": None}
FORMAT_OF_NAME = {each.name: each for each in FORMATS}

_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
_CITY = ARGUMENTS["city"]
# The call of get_weather with ARGUMENTS, then one of get_time.
TWO_CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {_JSON}}}; {{"name": "get_time", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_JSON}}}, '
    '{"name": "get_time", "arguments": {}}]',
    "mistral_args": f"[TOOL_CALLS]get_weather[ARGS]{_JSON}[TOOL_CALLS]get_time[ARGS]{{}}",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n"
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm": f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{_CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    "<arg_key>unit</arg_key>\n<arg_value>celsius</arg_value>\n"
    '<arg_key>where</arg_key>\n<arg_value>{"x": 1.5}</arg_value>\n'
    "<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{_CITY}\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=unit>\ncelsius\n</parameter>\n"
    '<parameter=where>\n{"x": 1.5}\n</parameter>\n<parameter=note>\nNone\n</parameter>\n'
    "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_JSON}<|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}",
}


@dataclass
class Read:
    """What events say, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments


def joined(events: Iterable[Event]) -> Read:
    read = Read()
    for event in events:
        if isinstance(event, Content):
            read.content += event.text
        elif isinstance(event, Reasoning):
            read.reasoning += event.text
        elif isinstance(event, CallBegin):
            assert event.index == len(read.calls)
            read.calls.append((event.name, ""))
        else:
            assert isinstance(event, CallArguments)
            assert event.index == len(read.calls) - 1
            name, text = read.calls[-1]
            read.calls[-1] = name, text + event.text
    return read


def read_in_pieces(parser: ToolParser, pieces: Iterable[str]) -> Read:
    return joined([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def read_whole(parser: ToolParser, text: str) -> Read:
    return read_in_pieces(parser, [text])

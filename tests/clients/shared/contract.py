"""What the scripts of all Python clients share: the server, the tools and schemas they use, and how they report.

A script decorates one function for each ability and ends with `report()`, which runs them all. It uses nothing but the
standard library: it is imported in environments of other packages.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["PACELINE_URL"]  # http://host:port
API = f"{URL}/v1"
GRPC = os.environ["PACELINE_GRPC"]  # host:port
MODEL = os.environ["PACELINE_MODEL"]
MODEL_DIR = os.environ["PACELINE_MODEL_DIR"]  # with its tokenizer, for clients that count tokens
KEY = "none"  # clients want one, the server does not

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Lima", "Cairo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER},
}
NAMED_TOOL = {"type": "function", "function": {"name": "get_weather"}}
# A conversation in which the model has called the tool, and got its result.
HISTORY = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees, rain"},
]

_abilities: list[tuple[str, Callable[[], Any]]] = []


def ability(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a function, asynchronous or not, that raises an error if the client lacks the ability."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _abilities.append((name, function))
        return function

    return register


def check_weather(found: Any) -> None:
    """Raises AssertionError unless these are arguments of WEATHER_TOOL, as an object or as its JSON text."""
    found = json.loads(found) if isinstance(found, str) else found
    assert set(found) == {"city", "days"}, found
    assert found["city"] in WEATHER["properties"]["city"]["enum"], found
    assert isinstance(found["days"], int), found
    assert 1 <= found["days"] <= 9, found


def report() -> None:
    """Runs all abilities, or those that the command line names, and appends a line of JSON for each to the file
    PACELINE_REPORT. Exits with 1 if one failed."""
    wanted = sys.argv[1:]
    has_failed = False
    loop = asyncio.new_event_loop()  # one for all: clients keep connections
    asyncio.set_event_loop(loop)
    for name, function in _abilities:
        if wanted and name not in wanted:
            continue
        began, error = time.monotonic(), ""
        try:
            loop.run_until_complete(function()) if inspect.iscoroutinefunction(function) else function()
        except (Exception, SystemExit) as problem:
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"
        has_failed = has_failed or bool(error)
        line = json.dumps({"ability": name, "error": error, "seconds": round(time.monotonic() - began, 2)})
        print(line, flush=True)
        with Path(os.environ["PACELINE_REPORT"]).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    sys.exit(has_failed)

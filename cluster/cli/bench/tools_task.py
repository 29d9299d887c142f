"""`paceline bench local --task tools`: requests that are answered by a call of one of six tools, alone or in text."""

from __future__ import annotations

import json
import random
from typing import Any

from cluster.cli.bench.prompts import BenchPrompt
from cluster.constraints.json_schemas import ONE_LINE
from cluster.constraints.structured_outputs import StructuredOutputs

NUM_REQUESTS = 60  # measured per task; with learning, as many others come before


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "maxLength": 60}
_DATE = {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]$"}
_ADDRESS = _object(street=_TEXT, city=_TEXT, country={"enum": ["DE", "FR", "IT", "ES", "PL"]})
_ITEM = _object(product=_TEXT, quantity={"type": "integer", "minimum": 1, "maximum": 99})
TOOLS: dict[str, dict[str, Any]] = {
    "create_order": _object(
        customer=_object(name=_TEXT, address=_ADDRESS),
        items={"type": "array", "items": _ITEM, "minItems": 1, "maxItems": 3},
        express={"type": "boolean"},
    ),
    "schedule_meeting": _object(
        title=_TEXT,
        date=_DATE,
        duration_minutes={"enum": [15, 30, 45, 60, 90]},
        attendees={"type": "array", "items": _object(name=_TEXT, role=_TEXT), "minItems": 1, "maxItems": 3},
    ),
    "search_flights": _object(
        origin=_TEXT, destination=_TEXT, departure=_DATE, cabin={"enum": ["economy", "business", "first"]},
        passengers=_object(adults={"type": "integer", "maximum": 9, "minimum": 1}, children={"enum": [0, 1, 2, 3]}),
    ),
    "send_email": _object(
        to={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}, subject=_TEXT,
        options=_object(priority={"enum": ["low", "normal", "high"]}, read_receipt={"type": "boolean"}),
    ),
    "get_weather": _object(
        location=_object(city=_TEXT, country=_TEXT), units={"enum": ["celsius", "fahrenheit"]},
        days={"type": "integer", "minimum": 1, "maximum": 14},
    ),
    "update_ticket": _object(
        ticket_id={"type": "integer", "minimum": 1000, "maximum": 9999},
        changes=_object(
            status={"enum": ["open", "in_progress", "resolved", "closed"]},
            assignee=_TEXT,
            priority={"enum": ["low", "medium", "high", "urgent"]},
        ),
        comment=_TEXT,
    ),
}  # fmt: skip
_NAMES = ("Amira", "Bruno", "Chloe", "Dmitri", "Elena", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Karim", "Lucia")
_CITIES = ("Berlin", "Paris", "Rome", "Madrid", "Warsaw", "Lyon", "Turin", "Hamburg", "Seville", "Krakow")
_THINGS = ("desk lamp", "kettle", "bicycle", "radio", "backpack", "camera", "ladder", "printer", "tent", "blender")
_REQUESTS = {
    "create_order": "Order {number} pieces of the {thing} for {name}, who lives in {city}, by express.",
    "schedule_meeting": "Arrange a meeting about the {thing} with {name} and {other} on 2027-0{digit}-1{digit}.",
    "search_flights": "Find flights from {city} to {town} for {digit} adults on 2027-0{digit}-2{digit}, economy.",
    "send_email": "Write to {name} at {city} with high priority that the {thing} has arrived.",
    "get_weather": "What will the weather be in {city} over the next {digit} days, in celsius?",
    "update_ticket": "Ticket {number}00{digit} about the {thing} is resolved; {name} looked after it.",
}


def call_constraint(in_text: bool) -> StructuredOutputs:
    """A call of one of the tools as JSON; in_text: between tags, with text before it."""
    calls = {"anyOf": [_object(name={"const": name}, arguments=schema) for name, schema in TOOLS.items()]}
    if not in_text:
        return StructuredOutputs(json_schema=calls)
    lark = (
        'start: TEXT "<tool_call>" call "</tool_call>"\n'
        "TEXT: /[A-Za-z ,.']{1,120}/\n"
        f"call: %json {json.dumps({**calls, 'x-guidance': ONE_LINE})}\n"
    )
    return StructuredOutputs(grammar=lark)


def tool_prompts() -> list[BenchPrompt]:
    """Twice NUM_REQUESTS requests of either task, every other one of which is measured."""
    rng = random.Random(0)
    prompts = []
    signatures = "\n".join(f"{name}: {json.dumps(schema['properties'])}" for name, schema in TOOLS.items())
    for task, in_text in (("tools", False), ("tools in text", True)):
        how = "Answer with the call alone."
        if in_text:
            how = "Say in a sentence what you do, then write the call between <tool_call> and </tool_call>."
        system = f'You call one of these tools, as JSON with "name" and "arguments". {how}\n{signatures}'
        constraint = call_constraint(in_text)
        for index in range(2 * NUM_REQUESTS):
            words = {
                "name": rng.choice(_NAMES), "other": rng.choice(_NAMES), "city": rng.choice(_CITIES),
                "town": rng.choice(_CITIES), "thing": rng.choice(_THINGS), "number": rng.randint(1, 9),
                "digit": rng.randint(1, 9),
            }  # fmt: skip
            # Two in a row of a kind: one of them is measured.
            request = list(_REQUESTS.values())[index // 2 % len(_REQUESTS)].format(**words)
            messages = ({"role": "system", "content": system}, {"role": "user", "content": request})
            prompts.append(BenchPrompt(f"{task} {index}", task, messages, constraint=constraint))
    return prompts

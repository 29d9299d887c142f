"""instructor: each of its modes for servers of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import instructor
from contract import API, KEY, MODEL, QUESTION, ability, report
from instructor import Mode
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima", "Cairo"]
    days: Literal[1, 2, 3]


# Where the schema stands in the prompt only, the smallest of models must be told all.
DICTATED = [{"role": "user", "content": 'Copy this JSON: {"city": "Oslo", "days": 2}'}]


def extracts(mode: Mode, messages: list[dict[str, str]] = QUESTION) -> Callable[[], None]:
    def ask() -> None:
        client = instructor.from_openai(OpenAI(base_url=API, api_key=KEY), mode=mode)
        found = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=Weather, max_retries=0, max_tokens=200, temperature=0
        )
        assert isinstance(found, Weather)

    return ask


ability("tools forced")(extracts(Mode.TOOLS))
ability("TOOLS_STRICT")(extracts(Mode.TOOLS_STRICT))
ability("JSON schema")(extracts(Mode.JSON_SCHEMA))
ability("JSON")(extracts(Mode.JSON, DICTATED))


@ability("partial objects")
def partial_objects() -> None:
    client = instructor.from_openai(OpenAI(base_url=API, api_key=KEY), mode=Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(
        model=MODEL, messages=QUESTION, response_model=Weather, max_retries=0
    )
    assert last.city
    assert last.days


@ability("several objects")
async def several_objects() -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=API, api_key=KEY), mode=Mode.TOOLS)
    found = client.chat.completions.create_iterable(
        model=MODEL, messages=QUESTION, response_model=Weather, max_retries=0, max_tokens=100, seed=1
    )
    async for each in found:
        assert isinstance(each, Weather)
        break


if __name__ == "__main__":
    report()

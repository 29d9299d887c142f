"""openai-python."""

from __future__ import annotations

import json
from typing import Literal

from contract import (
    API,
    HISTORY,
    KEY,
    MODEL,
    NAMED_TOOL,
    QUESTION,
    WEATHER,
    WEATHER_TOOL,
    ability,
    check_weather,
    report,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=API, api_key=KEY, max_retries=0)


class Weather(BaseModel):
    city: Literal["Oslo", "Lima", "Cairo"]
    days: Literal[1, 2, 3]


@ability("plain")
def plain() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16)
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.completion_tokens <= 16


@ability("stream")
async def stream() -> None:
    asynchronous = AsyncOpenAI(base_url=API, api_key=KEY)
    options = {"include_usage": True}
    chunks = await asynchronous.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=16, stream=True, stream_options=options
    )
    received = [chunk async for chunk in chunks]
    assert "".join(choice.delta.content or "" for chunk in received for choice in chunk.choices)
    assert received[-1].usage


@ability("tools forced")
def tools_forced() -> None:
    for choice in ("required", NAMED_TOOL):
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[WEATHER_TOOL], tool_choice=choice, parallel_tool_calls=False
        )
        (call,) = answer.choices[0].message.tool_calls
        check_weather(call.function.arguments)


@ability("tools auto")
def tools_auto() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HISTORY, tools=[WEATHER_TOOL], max_tokens=48)
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    # What the client read it sends back.
    again = [*HISTORY, message]
    client.chat.completions.create(model=MODEL, messages=again, tools=[WEATHER_TOOL], tool_choice="none", max_tokens=8)


@ability("tools streamed")
def tools_streamed() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=QUESTION,
        tools=[{**WEATHER_TOOL, "function": {**WEATHER_TOOL["function"], "strict": True}}],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as events:
        kinds = {event.type for event in events}
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    check_weather(call.function.parsed_arguments)


@ability("JSON schema")
def json_schema() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Weather)
    assert parsed.choices[0].message.parsed
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=form)
    check_weather(answer.choices[0].message.content)


@ability("logprobs")
def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
    echo = client.completions.create(model=MODEL, prompt="One two three", max_tokens=1, echo=True, logprobs=1)
    assert echo.choices[0].logprobs.token_logprobs[0] is None
    assert echo.choices[0].text.startswith("One two three")


@ability("guided choice")
def guided_choice() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, extra_body={"structured_outputs": {"choice": ["sun", "rain"]}}
    )
    assert answer.choices[0].message.content in ("sun", "rain")


@ability("responses")
def responses() -> None:
    answer = client.responses.create(model=MODEL, input="What is the weather in Oslo?", max_output_tokens=24)
    assert answer.output_text
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather)
    assert parsed.output_parsed.city
    with client.responses.stream(
        model=MODEL,
        input=QUESTION,
        tools=[{"type": "function", **WEATHER_TOOL["function"], "strict": True}],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as events:
        assert "response.function_call_arguments.delta" in {event.type for event in events}
        call = events.get_final_response().output[-1]
    check_weather(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    again = client.responses.create(model=MODEL, input=[*QUESTION, call, result], max_output_tokens=24)
    assert again.output_text


@ability("models")
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert json.loads(client.models.retrieve(MODEL).model_dump_json())["id"] == MODEL


if __name__ == "__main__":
    report()

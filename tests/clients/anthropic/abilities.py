"""Anthropic's client, over /v1/messages."""

from __future__ import annotations

import anthropic
from contract import KEY, MODEL, QUESTION, URL, WEATHER, ability, check_weather, report

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": WEATHER}
ASKED = {"model": MODEL, "messages": QUESTION, "max_tokens": 48}


@ability("plain")
def plain() -> None:
    answer = client.messages.create(**ASKED, system="Be brief.")
    assert answer.content[0].text
    assert answer.usage.output_tokens


@ability("stream")
async def stream() -> None:
    asynchronous = anthropic.AsyncAnthropic(base_url=URL, api_key=KEY)
    async with asynchronous.messages.stream(**ASKED) as events:
        assert "".join([text async for text in events.text_stream])
        assert (await events.get_final_message()).stop_reason in ("end_turn", "max_tokens")


@ability("tools forced")
def tools_forced() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = client.messages.create(
            **ASKED, tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True}
        )
        (call,) = (block for block in answer.content if block.type == "tool_use")
        check_weather(call.input)
        assert answer.stop_reason == "tool_use"


@ability("tools auto")
def tools_auto() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo", "days": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4 degrees, rain"}
    messages = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**ASKED, "messages": messages}, tools=[TOOL]).content


@ability("tools streamed")
def tools_streamed() -> None:
    with client.messages.stream(
        **ASKED, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    ) as events:
        assert "input_json" in {event.type for event in events}
        check_weather(events.get_final_message().content[-1].input)


@ability("JSON schema")
def json_schema() -> None:
    form = {"type": "json_schema", "schema": WEATHER}
    check_weather(client.messages.create(**ASKED, output_config={"format": form}).content[0].text)


@ability("counts tokens")
def counts_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    usage = client.messages.create(**ASKED).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@ability("errors")
def errors() -> None:
    found = None
    try:
        client.messages.create(**{**ASKED, "model": "another"})
    except anthropic.NotFoundError as error:
        found = error.body
    assert found is not None
    assert found["error"]["type"] == "not_found_error"


if __name__ == "__main__":
    report()

"""langchain-openai: its three methods of structured output, and bound tools."""

from __future__ import annotations

from contract import API, KEY, MODEL, WEATHER, WEATHER_TOOL, ability, check_weather, report
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(base_url=API, api_key=KEY, model=MODEL, max_retries=0, max_tokens=64)
ASKED = [HumanMessage("What is the weather in Oslo?")]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(pattern="^(Oslo|Lima|Cairo)$")
    days: int = Field(ge=1, le=9)


@tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days"


@ability("plain")
def plain() -> None:
    answer = model.invoke(ASKED)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


@ability("stream")
async def stream() -> None:
    assert "".join([chunk.content async for chunk in model.astream(ASKED)])


@ability("tools forced")
def tools_forced() -> None:
    for choice in ("any", "get_weather"):
        answer = model.bind_tools([WEATHER_TOOL], tool_choice=choice, parallel_tool_calls=False).invoke(ASKED)
        (call,) = answer.tool_calls
        check_weather(call["args"])


@ability("tools auto")
def tools_auto() -> None:
    bound = model.bind_tools([get_weather])
    call = {"name": "get_weather", "args": {"city": "Oslo", "days": 1}, "id": "call_1"}
    answer = bound.invoke([*ASKED, AIMessage("", tool_calls=[call]), ToolMessage("4 degrees", tool_call_id="call_1")])
    assert answer.content or answer.tool_calls or answer.invalid_tool_calls


@ability("tools streamed")
def tools_streamed() -> None:
    bound = model.bind_tools([WEATHER_TOOL], tool_choice="any", parallel_tool_calls=False)
    whole = None
    for chunk in bound.stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    check_weather(whole.tool_calls[0]["args"])


@ability("JSON schema")
def json_schema() -> None:
    assert model.with_structured_output(Weather, method="json_schema").invoke(ASKED)
    schema = {"title": "weather", **WEATHER}
    check_weather(model.with_structured_output(schema, method="json_schema", strict=True).invoke(ASKED))


@ability("function_calling")
def function_calling() -> None:
    for strict in (None, True):
        assert model.with_structured_output(Weather, method="function_calling", strict=strict).invoke(ASKED)


@ability("json_mode")
def json_mode() -> None:
    """The schema stands in the prompt only, so that the smallest of models must be told all."""
    greedy = ChatOpenAI(base_url=API, api_key=KEY, model=MODEL, max_retries=0, temperature=0)
    asked = [HumanMessage('Copy this JSON: {"city": "Oslo", "days": 2}')]
    assert greedy.with_structured_output(Weather, method="json_mode").invoke(asked).city


@ability("responses")
def responses() -> None:
    answering = ChatOpenAI(base_url=API, api_key=KEY, model=MODEL, use_responses_api=True, max_tokens=64)
    assert answering.invoke(ASKED).text
    assert answering.with_structured_output(Weather, method="json_schema").invoke(ASKED).city
    assert "".join(chunk.text for chunk in answering.stream(ASKED))


@ability("logprobs")
def logprobs() -> None:
    answer = model.bind(logprobs=True, top_logprobs=2).invoke(ASKED)
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


if __name__ == "__main__":
    report()

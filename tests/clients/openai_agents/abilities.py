"""openai-agents over chat completions."""

from __future__ import annotations

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from contract import API, KEY, MODEL, ability, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI(base_url=API, api_key=KEY))
ASKED = "What is the weather in Oslo?"


class Weather(BaseModel):
    city: Literal["Oslo", "Lima", "Cairo"]
    days: Literal[1, 2, 3]


def agent(**options: object) -> Agent:
    settings = ModelSettings(max_tokens=48, tool_choice=options.pop("tool_choice", None))
    return Agent(name="forecaster", model=model, model_settings=settings, **options)


@function_tool
def get_weather(city: Literal["Oslo", "Lima", "Cairo"]) -> str:
    """The weather of a city."""
    return f"{city}: rain"


@ability("plain")
async def plain() -> None:
    assert (await Runner.run(agent(), ASKED)).final_output


@ability("stream")
async def stream() -> None:
    run = Runner.run_streamed(agent(), ASKED)
    kinds = {event.type async for event in run.stream_events()}
    assert "raw_response_event" in kinds
    assert run.final_output


@ability("tools forced")
async def tools_forced() -> None:
    """The tool is called, and the model answers with its result."""
    for choice in ("required", "get_weather"):
        run = await Runner.run(agent(tools=[get_weather], tool_choice=choice), ASKED)
        assert "tool_call_output_item" in {item.type for item in run.new_items}


@ability("tools auto")
async def tools_auto() -> None:
    assert (await Runner.run(agent(tools=[get_weather]), ASKED)).new_items


@ability("JSON schema")
async def json_schema() -> None:
    assert (await Runner.run(agent(output_type=Weather), ASKED)).final_output.city


if __name__ == "__main__":
    report()

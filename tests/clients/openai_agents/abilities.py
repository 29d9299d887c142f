"""openai-agents, over Responses, which it uses by default, and over chat completions."""

from __future__ import annotations

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from contract import API, KEY, MODEL, ability, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
_client = AsyncOpenAI(base_url=API, api_key=KEY, max_retries=0)
MODELS = (
    OpenAIResponsesModel(model=MODEL, openai_client=_client),
    OpenAIChatCompletionsModel(model=MODEL, openai_client=_client),
)
ASKED = "What is the weather in Oslo?"


class Weather(BaseModel):
    city: Literal["Oslo", "Lima", "Cairo"]
    days: Literal[1, 2, 3]


@function_tool
def get_weather(city: Literal["Oslo", "Lima", "Cairo"]) -> str:
    """The weather of a city."""
    return f"{city}: rain"


def agents(tool_choice: str | None = None, **options: object) -> list[Agent]:
    """One over each endpoint."""
    settings = ModelSettings(
        max_tokens=400,
        temperature=0.0,
        tool_choice=tool_choice,
        parallel_tool_calls=None if tool_choice is None else False,
        extra_body={"frequency_penalty": 1.0},  # the smallest of models would repeat itself: an agent wants an end
    )
    return [Agent(name="forecaster", model=model, model_settings=settings, **options) for model in MODELS]


@ability("plain")
async def plain() -> None:
    for agent in agents():
        assert (await Runner.run(agent, ASKED)).final_output


@ability("stream")
async def stream() -> None:
    for agent in agents():
        run = Runner.run_streamed(agent, ASKED)
        kinds = {event.data.type async for event in run.stream_events() if event.type == "raw_response_event"}
        assert {"response.output_text.delta", "response.completed"} <= kinds
        assert run.final_output


@ability("tools forced")
async def tools_forced() -> None:
    """The tool is called, and the model answers with its result."""
    for choice in ("required", "get_weather"):
        for agent in agents(choice, tools=[get_weather]):
            run = await Runner.run(agent, ASKED)
            assert "tool_call_output_item" in {item.type for item in run.new_items}


@ability("tools auto")
async def tools_auto() -> None:
    for agent in agents(tools=[get_weather]):
        assert (await Runner.run(agent, ASKED)).new_items


@ability("tools streamed")
async def tools_streamed() -> None:
    for agent in agents("required", tools=[get_weather]):
        run = Runner.run_streamed(agent, ASKED)
        names = {event.name async for event in run.stream_events() if event.type == "run_item_stream_event"}
        assert {"tool_called", "tool_output"} <= names


@ability("JSON schema")
async def json_schema() -> None:
    for agent in agents(output_type=Weather):
        assert (await Runner.run(agent, ASKED)).final_output.city


@ability("handoffs")
async def handoffs() -> None:
    for index, forecaster in enumerate(agents(output_type=Weather)):
        desk = agents("required", handoffs=[forecaster])[index]
        assert (await Runner.run(desk, ASKED)).final_output.city


if __name__ == "__main__":
    report()

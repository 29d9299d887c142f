"""pydantic-ai: agents with each type of output."""

from __future__ import annotations

from typing import Literal

from contract import API, KEY, MODEL, ability, report
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=API, api_key=KEY))
SETTINGS = {"max_tokens": 100}
ASKED = "What is the weather in Oslo?"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima", "Cairo"]
    days: Literal[1, 2, 3]


@ability("plain")
def plain() -> None:
    assert Agent(model, model_settings=SETTINGS).run_sync(ASKED).output


@ability("stream")
async def stream() -> None:
    async with Agent(model, model_settings=SETTINGS).run_stream(ASKED) as answer:
        assert "".join([text async for text in answer.stream_text(delta=True)])


@ability("tools forced")
async def tool_output() -> None:
    assert (await Agent(model, output_type=ToolOutput(Weather)).run(ASKED)).output.city


@ability("tools streamed")
async def tool_output_streamed() -> None:
    async with Agent(model, output_type=ToolOutput(Weather)).run_stream(ASKED) as answer:
        assert (await answer.get_output()).city


@ability("tools auto")
async def tools_auto() -> None:
    agent = Agent(model, model_settings={"max_tokens": 24})

    @agent.tool_plain(retries=5)
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"{city}: 4 degrees"

    history = [
        ModelRequest([UserPromptPart(ASKED)]),
        ModelResponse([ToolCallPart("get_weather", {"city": "Oslo"}, "call_1")]),
        ModelRequest([ToolReturnPart("get_weather", "Oslo: 4 degrees", "call_1")]),
    ]
    assert (await agent.run("So what shall I wear?", message_history=history)).output


@ability("JSON schema")
async def native_output() -> None:
    assert (await Agent(model, output_type=NativeOutput(Weather)).run(ASKED)).output.city


@ability("responses")
async def responses() -> None:
    answering = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=API, api_key=KEY))
    for output in (ToolOutput(Weather), NativeOutput(Weather)):
        assert (await Agent(answering, output_type=output).run(ASKED)).output.city


@ability("prompted output")
async def prompted_output() -> None:
    """The schema stands in the prompt only, so that the smallest of models must be told all."""
    agent = Agent(model, output_type=PromptedOutput(Weather), model_settings={**SETTINGS, "temperature": 0})
    assert (await agent.run('Copy this JSON: {"city": "Oslo", "days": 2}')).output.city


if __name__ == "__main__":
    report()

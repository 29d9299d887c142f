"""inspect-ai: evaluations by generation, by a tool, by JSON schema and with log-probabilities."""

from __future__ import annotations

import os

from contract import API, KEY, MODEL, WEATHER, ability, check_weather, report

os.environ |= {"PACELINE_API_KEY": KEY, "PACELINE_BASE_URL": API, "INSPECT_LOG_LEVEL": "warning"}

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Solver, generate, multiple_choice, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

ASKED = [Sample("What is the weather in Oslo?", target="rain")]


class Weather(BaseModel):
    city: str
    days: int


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        return f"{city}: rain"

    return execute


def evaluate(*solvers: Solver, samples: list[Sample] = ASKED, **config: object) -> EvalSample:
    model = get_model(f"openai-api/paceline/{MODEL}", config=GenerateConfig(max_tokens=48, **config))
    (log,) = eval(Task(samples, solver=list(solvers), scorer=includes()), model=model, display="none", log_dir="logs")
    assert log.status == "success", log.error
    return log.samples[0]


@ability("plain")
def plain() -> None:
    assert evaluate(generate()).output.completion


@ability("multiple choice")
def choices() -> None:
    sample = Sample("Which is a colour?", choices=["red", "two"], target="A")
    assert evaluate(multiple_choice(), samples=[sample]).output.completion


@ability("tools auto")
def tools_auto() -> None:
    assert evaluate(use_tools(get_weather()), generate(tool_calls="single")).output.choices


@ability("tools forced")
def tools_forced() -> None:
    found = evaluate(use_tools(get_weather(), tool_choice="any"), generate(tool_calls="single"))
    assert any(message.role == "tool" for message in found.messages)


@ability("JSON schema")
def schema() -> None:
    wanted = json_schema(Weather)
    wanted.properties["city"].enum = WEATHER["properties"]["city"]["enum"]
    wanted.properties["days"].enum = [1, 2, 3]
    found = evaluate(generate(), response_schema=ResponseSchema(name="weather", json_schema=wanted, strict=True))
    check_weather(found.output.completion)


@ability("logprobs")
def logprobs() -> None:
    assert evaluate(generate(), logprobs=True, top_logprobs=2).output.choices[0].logprobs.content


if __name__ == "__main__":
    report()

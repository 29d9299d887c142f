"""llama-index, with its class for servers of OpenAI's API."""

from typing import Literal

from contract import API, KEY, MODEL, ability, check_weather, report
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

ASKED = [ChatMessage("What is the weather in Oslo?")]


def model(**options: object) -> OpenAILike:
    return OpenAILike(
        api_base=API,
        api_key=KEY,
        model=MODEL,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=64,
        max_retries=0,
        **options,
    )


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima", "Cairo"]
    days: Literal[1, 2, 3]


def get_weather(city: Literal["Oslo", "Lima", "Cairo"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days"


TOOL = FunctionTool.from_defaults(get_weather)


@ability("plain")
def plain() -> None:
    assert model().chat(ASKED).message.content


@ability("stream")
async def stream() -> None:
    assert "".join([piece.delta async for piece in await model().astream_chat(ASKED)])


@ability("text completion")
def text_completion() -> None:
    completing = OpenAILike(api_base=API, api_key=KEY, model=MODEL, is_chat_model=False, max_tokens=8)
    assert completing.complete("One two three").text


@ability("tools forced")
def tools_forced() -> None:
    answer = model().chat_with_tools([TOOL], chat_history=ASKED, tool_required=True)
    (call,) = model().get_tool_calls_from_response(answer)
    check_weather(call.tool_kwargs)


@ability("tools auto")
def tools_auto() -> None:
    answer = model().chat_with_tools([TOOL], chat_history=ASKED, tool_required=True)
    (call,) = model().get_tool_calls_from_response(answer)
    result = ChatMessage("4 degrees", role="tool", additional_kwargs={"tool_call_id": call.tool_id})
    again = model().chat_with_tools([TOOL], chat_history=[*ASKED, answer.message, result])
    assert again.message.blocks


@ability("tools streamed")
def tools_streamed() -> None:
    *_, last = model().stream_chat_with_tools([TOOL], chat_history=ASKED, tool_required=True)
    (call,) = model().get_tool_calls_from_response(last)
    check_weather(call.tool_kwargs)


@ability("JSON schema")
def structured() -> None:
    assert model().structured_predict(Weather, PromptTemplate("What is the weather in Oslo?")).city
    native = model(should_use_structured_outputs=True)
    assert native.as_structured_llm(Weather).chat(ASKED).raw.city


@ability("logprobs")
def logprobs() -> None:
    assert model(logprobs=True, top_logprobs=2).chat(ASKED).logprobs


if __name__ == "__main__":
    report()

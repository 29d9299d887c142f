"""litellm, by its providers for vLLM and for any server of OpenAI's API."""

from __future__ import annotations

import litellm
from contract import (
    API,
    HISTORY,
    KEY,
    MODEL,
    NAMED_TOOL,
    QUESTION,
    URL,
    WEATHER,
    WEATHER_TOOL,
    ability,
    check_weather,
    report,
)

SERVER = {"api_base": API, "api_key": KEY, "max_tokens": 64}
NAMES = (f"hosted_vllm/{MODEL}", f"openai/{MODEL}")


@ability("plain")
def plain() -> None:
    for name in NAMES:
        answer = litellm.completion(name, messages=QUESTION, **SERVER)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens


@ability("stream")
async def stream() -> None:
    for name in NAMES:
        chunks = await litellm.acompletion(name, messages=QUESTION, stream=True, **SERVER)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


@ability("tools forced")
def tools_forced() -> None:
    for name in NAMES:
        for choice in ("required", NAMED_TOOL):
            answer = litellm.completion(
                name, messages=QUESTION, tools=[WEATHER_TOOL], tool_choice=choice, parallel_tool_calls=False, **SERVER
            )
            check_weather(answer.choices[0].message.tool_calls[0].function.arguments)


@ability("tools auto")
def tools_auto() -> None:
    for name in NAMES:
        message = litellm.completion(name, messages=HISTORY, tools=[WEATHER_TOOL], **SERVER).choices[0].message
        assert message.content or message.tool_calls


@ability("tools streamed")
def tools_streamed() -> None:
    chunks = litellm.completion(
        NAMES[0], messages=QUESTION, tools=[WEATHER_TOOL], tool_choice=NAMED_TOOL, stream=True, **SERVER
    )
    built = litellm.stream_chunk_builder(list(chunks))
    check_weather(built.choices[0].message.tool_calls[0].function.arguments)


@ability("JSON schema")
def json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    for name in NAMES:
        answer = litellm.completion(name, messages=QUESTION, response_format=form, **SERVER)
        check_weather(answer.choices[0].message.content)


@ability("logprobs")
def logprobs() -> None:
    answer = litellm.completion(NAMES[0], messages=QUESTION, logprobs=True, top_logprobs=2, **SERVER)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@ability("messages")
def messages() -> None:
    answer = litellm.completion(
        f"anthropic/{MODEL}", messages=HISTORY, tools=[WEATHER_TOOL], api_base=URL, api_key=KEY, max_tokens=24
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@ability("responses")
def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="One two three", api_base=API, api_key=KEY, max_output_tokens=24
    )
    assert answer.output


@ability("text completion")
def text_completion() -> None:
    answer = litellm.text_completion("One two three", f"text-completion-openai/{MODEL}", **SERVER)
    assert answer.choices[0].text


if __name__ == "__main__":
    report()

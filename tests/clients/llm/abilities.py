"""The command `llm`, with the server as one of its models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from contract import API, HISTORY, MODEL, WEATHER, ability, check_weather, report

LLM = str(Path(sys.executable).with_name("llm"))
_home = Path.cwd() / "llm"
_home.mkdir(exist_ok=True)
_home.joinpath("extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {
                "model_id": "ours", "model_name": MODEL, "api_base": API, "supports_schema": True,
                "supports_tools": True,
            },
            {"model_id": "ours-text", "model_name": MODEL, "api_base": API, "completion": True},
        ]
    )
)  # fmt: skip


def llm(*arguments: str) -> str:
    environment = {**os.environ, "LLM_USER_PATH": str(_home), "OPENAI_API_KEY": "none"}
    done = subprocess.run([LLM, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@ability("plain")
def plain() -> None:
    assert llm("-m", "ours", "--no-stream", "-o", "max_tokens", "16", HISTORY[0]["content"]).strip()


@ability("stream")
def stream() -> None:
    assert llm("-m", "ours", "-o", "max_tokens", "16", HISTORY[0]["content"]).strip()


@ability("tools auto")
def tools_auto() -> None:
    function = 'def get_weather(city: str) -> str:\n    "The weather of a city."\n    return city + ": rain"\n'
    llm("-m", "ours", "--functions", function, "-o", "max_tokens", "32", HISTORY[0]["content"])


@ability("JSON schema")
def json_schema() -> None:
    check_weather(llm("-m", "ours", "--schema", json.dumps(WEATHER), HISTORY[0]["content"]))


@ability("logprobs")
def logprobs() -> None:
    llm("-m", "ours-text", "-o", "logprobs", "2", "-o", "max_tokens", "4", "One two three")


@ability("text completion")
def text_completion() -> None:
    assert llm("-m", "ours-text", "-o", "max_tokens", "8", "One two three").strip()


if __name__ == "__main__":
    report()

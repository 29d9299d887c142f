"""guidellm, as it comes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from contract import MODEL_DIR, URL, ability, report


def benchmark(profile: str, backend: str = "") -> None:
    """Raises an error unless all requests were answered."""
    options = {
        "backend": f"kind=openai_http,target={URL}{backend}",
        "profile": profile,
        "constraint": "kind=max_requests,count=4",
        "tokenizer": f"kind=huggingface_auto,model={MODEL_DIR}",
        "data": "kind=synthetic_text,prompt_tokens=24,output_tokens=8",
        "output": "kind=json,path=result.json",
    }
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"]
    subprocess.run([*command, *(f"--{name}={value}" for name, value in options.items())], check=True)
    for one in json.loads(Path("result.json").read_text())["benchmarks"]:
        totals = one["metrics"]["request_totals"]
        assert totals["successful"] == totals["total"] > 0, totals


@ability("load")
def load() -> None:
    benchmark("kind=synchronous")


@ability("text completions")
def text_completions() -> None:
    benchmark("kind=concurrent,streams=2", ",request_format=/v1/completions")


@ability("responses")
def responses() -> None:
    benchmark("kind=synchronous", ",request_format=/v1/responses")


if __name__ == "__main__":
    report()

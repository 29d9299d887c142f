"""lm_eval: multiple choice by log-probabilities of echoed prompts, and generation over chat."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from contract import API, MODEL, MODEL_DIR, ability, report

ROWS = [
    {"question": "The sun is", "choices": [" hot", " a fish"], "gold": 0, "answer": "hot"},
    {"question": "One, two, three,", "choices": [" four", " dog"], "gold": 0, "answer": "four"},
]
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
doc_to_target: gold
metric_list: [{metric: acc}]
"""
GENERATES = """
task: generates
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
"""
PERPLEXITY = """
task: perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}"
metric_list: [{metric: word_perplexity}]
"""


def evaluate(model: str, path: str, task: str, *more: str, arguments: str = "") -> dict[str, float]:
    """The figures of a task."""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for text in (CHOICES, GENERATES, PERPLEXITY):
        Path(text.split()[1] + ".yaml").write_text(text)
    folder = Path(tempfile.mkdtemp())
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", model, "--tasks", f"{task}.yaml"]
    served = f"model={MODEL},base_url={API}/{path},num_concurrent=1,max_retries=1{arguments}"
    subprocess.run([*command, "--model_args", served, "--output_path", str(folder), *more], check=True)
    (written,) = folder.rglob("results_*.json")
    return json.loads(written.read_text())["results"][task]


@ability("multiple choice")
def multiple_choice() -> None:
    tokenizer = f",tokenizer_backend=huggingface,tokenizer={MODEL_DIR}"
    found = evaluate("local-completions", "completions", "choices", arguments=tokenizer)
    assert found["acc,none"] == 1.0, found


@ability("the server's tokenizer")
def remote_tokenizer() -> None:
    found = evaluate("local-completions", "completions", "choices", arguments=",tokenizer_backend=remote")
    assert found["acc,none"] == 1.0, found


@ability("perplexity")
def perplexity() -> None:
    tokenizer = f",tokenizer_backend=huggingface,tokenizer={MODEL_DIR}"
    found = evaluate("local-completions", "completions", "perplexity", arguments=tokenizer)
    assert math.isfinite(found["word_perplexity,none"]), found


@ability("generation over chat")
def generation() -> None:
    evaluate("local-chat-completions", "chat/completions", "generates", "--apply_chat_template")


if __name__ == "__main__":
    report()

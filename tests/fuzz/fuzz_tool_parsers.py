"""Feeds random and damaged answers to the parsers of tool calls, whole and in pieces.

    python tests/fuzz/fuzz_tool_parsers.py --seconds 60

The pieces must say what the whole says, arguments must be JSON or the beginning of it, and text without a call must
come out as it is. Prints the number of runs; ends with the first answer that breaks a rule.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from cluster.text.tools.answer_parser import AnswerParser
from cluster.text.tools.json_scanner import JsonScanner
from cluster.text.tools.reasoning import ReasoningSplitter
from paceline_testing.tool_calls import FORMAT_OF_NAME, TOOLS, TWO_CALLS, Read, read_in_pieces, read_whole

NAMES = sorted(FORMAT_OF_NAME)
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<parameter=city>", "</parameter>"]
MARKS += ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
MARKS += [
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁sep｜>",
    "```json\n",
]
MARKS += [
    '{"name": "f", "arguments": ',
    '"',
    "{",
    "}",
    "[",
    "]",
    "\\",
    "\\u12",
    "\n",
    " ",
    ",",
    ":",
    "-1.5e",
    "true",
    "\x00",
    "é",
]


def damaged(rng: random.Random, name: str) -> str:
    """A call, or two of other formats, with marks, cuts, repetitions and characters put in."""
    text = TWO_CALLS[name] if rng.random() < 0.8 else TWO_CALLS[rng.choice(NAMES)] + TWO_CALLS[name]
    for _ in range(rng.choice((0, 1, 1, 2, 4, 12))):
        at, to = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        change = rng.randrange(5)
        if change == 0:
            text = text[:at] + rng.choice(MARKS) + text[at:]
        elif change == 1:
            text = text[:at] + text[min(to, at + 9) :]
        elif change == 2:
            text = text[:at] + text[at:to] + text[at:][:200]
        elif change == 3:
            text = text[:at]
        else:
            text = text[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) + text[at + 1 :]
    return text


def random_text(rng: random.Random) -> str:
    return "".join(
        rng.choice(MARKS) if rng.random() < 0.7 else chr(rng.randrange(32, 127)) for _ in range(rng.randrange(40))
    )


def pieces_of(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.choice((1, 3, 10, len(text)))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check(name: str, text: str, pieces: list[str], thinks: bool) -> Read:
    def parser() -> AnswerParser:
        return AnswerParser(ReasoningSplitter() if thinks else None, FORMAT_OF_NAME[name].parser(TOOLS))

    whole = read_whole(parser(), text)
    assert read_in_pieces(parser(), pieces) == whole, "the split matters"
    for called, arguments in whole.calls:
        scanner = JsonScanner()
        assert 0 < len(called) <= 64
        assert scanner.scan(arguments)[0] == len(arguments), f"not JSON: {arguments!r}"
        if scanner.is_complete:
            assert isinstance(json.loads(arguments), dict)
    if not whole.calls and not thinks and name != "harmony":
        assert whole.content == text, "something is lost"
    return whole


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    rng, runs, with_calls = random.Random(chosen.seed), 0, 0
    ends = time.monotonic() + chosen.seconds
    while time.monotonic() < ends:
        name, thinks = rng.choice(NAMES), rng.random() < 0.2
        text = damaged(rng, name) if rng.random() < 0.8 else random_text(rng)
        pieces = pieces_of(rng, text)
        try:
            with_calls += bool(check(name, text, pieces, thinks).calls)
        except Exception:
            print(f"format {name}, thinks {thinks}, pieces {pieces!r}")
            raise
        runs += 1
    print(f"{runs} runs, {with_calls} of them with calls, nothing found")


if __name__ == "__main__":
    main()

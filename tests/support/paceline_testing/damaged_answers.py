"""Answers with calls of tools as a confused model may write them, for fuzzing."""

from __future__ import annotations

import random

from paceline_testing.tool_calls import FORMAT_OF_NAME, TWO_CALLS

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

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
from paceline_testing.damaged_answers import NAMES, damaged, random_text
from paceline_testing.tool_calls import FORMAT_OF_NAME, TOOLS, Read, read_in_pieces, read_whole


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

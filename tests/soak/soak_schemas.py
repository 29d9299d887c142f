"""JSON schemas, each answered by a random model at a high temperature: every answer must be valid.

    python tests/soak/soak_schemas.py [--schemas 2000] [--seed 0] [--suite DIR]

Schemas are random ones (`paceline_testing.random_schemas`), and with --suite those of the JSON Schema test suite below
that directory (`json/tests/draft2020-12` in jsonschema's source distribution). Each is answered with drafters and
without: the tokens must be the same. `jsonschema` validates the answers. An answer that its length has ended is gone on
with from the same seed: it must begin a valid one. Instances that the suite calls invalid must not follow the grammar.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import torch

from actors.errors import InvalidRequest
from actors.grammar.grammars import Grammars
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.offline.engine import LocalEngine
from paceline_testing.random_schemas import RandomSchemas
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer, save_tiny_model

BATCH = 32
LENGTHS = (120, 480, 2400)  # tokens; the next one for answers that the one before has cut off
# Less white space and sooner ends, so that most answers are whole.
BIAS = {" ": -3.0, "\n": -3.0, "\r": -4.0, "\t": -4.0, '"': 3.0, "]": 1.0, "}": 1.5, ",": -0.5}
PROMPT = "An answer: "
# Instances of the suite that are invalid and follow all the same; docs/structured-output.md says why.
KNOWN_GAPS = re.compile(r"leap second|February \(normal\)|not a leap year|zero-width whitespace")
NOT_CHECKED = "jsonschema follows a reference of this schema to itself for ever"
MOST_DIGITS = 4000  # of a number whose division is checked
FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("date-time", ValueError)
def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(_common(value)).tzinfo is not None


@FORMATS.checks("date", ValueError)
def _is_date(value: object) -> bool:
    return not isinstance(value, str) or date.fromisoformat(_common(value)) is not None


@FORMATS.checks("time", ValueError)
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or _is_date_time(f"2000-01-01T{value}")


def _common(text: str) -> str:
    """Without leap seconds and leap days, which are allowed at any time, and without years and fractions that Python
    does not have."""
    text = re.sub(r"(:\d\d):60", r"\1:59", text.upper())
    text = re.sub(r"^(\d{4}(?=-02-29)|0000)", "2000", text)
    return re.sub(r"(\.\d{6})\d+", r"\1", text)


@dataclass
class Figures:
    schemas: int = 0
    valid: int = 0
    cut_and_completed: int = 0
    cut: int = 0
    not_checked: int = 0
    draft_nodes_accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # invalid, not the same with drafts, or stuck

    @property
    def num_refused(self) -> int:
        return self.refused.total()


class Soak:
    def __init__(self, directory: Path) -> None:
        model = save_tiny_model(
            directory, "llama", 5, layers=1, hidden_size=32, heads=2, kv_heads=1, max_positions=4096
        )
        self._engine = LocalEngine(
            str(model), device="cpu", drafters=("auto",), kv_cache_tokens=BATCH * 4096, batch_size=BATCH
        )
        self._tokenizer = make_byte_tokenizer()
        self._bias = tuple((self._tokenizer.encode(text)[0], bias) for text, bias in BIAS.items())
        self._num_asked = 0
        self.figures = Figures()

    def run(self, schemas: Sequence[Any]) -> None:
        self.figures.schemas += len(schemas)
        seeds = range(self._num_asked, self._num_asked + len(schemas))
        self._num_asked += len(schemas)
        waiting = list(zip(schemas, seeds, [()] * len(schemas), strict=True))
        for length in LENGTHS:
            answers = self._answers([(schema, seed) for schema, seed, _ in waiting], length, ("auto",))
            plain = self._answers([(schema, seed) for schema, seed, _ in waiting], length, ("none",))
            cut = []
            for (schema, seed, begun), found, other in zip(waiting, answers, plain, strict=True):
                if found is None or other is None:
                    continue
                tokens, text, reason = found
                if found != other:
                    self._is_wrong("not the same with drafts", schema, text)
                elif tokens[: len(begun)] != begun:
                    self._is_wrong("not gone on with", schema, text)
                elif reason == "length":
                    cut.append((schema, seed, tokens))
                elif (problem := problem_of(schema, text)) == NOT_CHECKED:
                    self.figures.not_checked += 1
                elif problem is not None:
                    self._is_wrong(problem, schema, text)
                elif begun:
                    self.figures.cut_and_completed += 1
                else:
                    self.figures.valid += 1
            waiting = cut
        self.figures.cut += len(waiting)

    def _answers(
        self, asked: Sequence[tuple[Any, int]], length: int, drafters: tuple[str, ...]
    ) -> list[tuple[tuple[int, ...], str, str] | None]:
        """Tokens, text and finish reason; None: refused or failed. All are generated side by side."""
        running: list[Iterator[Any] | None] = []
        found: list[tuple[tuple[int, ...], str, str] | None] = [None] * len(asked)
        for schema, seed in asked:
            try:
                running.append(
                    self._engine.stream(
                        PROMPT, structured_outputs={"json": json.dumps(schema)}, max_new_tokens=length, seed=seed,
                        temperature=1.5, logit_bias=self._bias, drafters=drafters,
                    )
                )  # fmt: skip
            except InvalidRequest as error:
                running.append(None)
                if drafters == ("auto",) and length == LENGTHS[0]:
                    self.figures.refused[keyword_of(str(error))] += 1
        while any(running):
            for index, stream in enumerate(running):
                if stream is None:
                    continue
                try:
                    piece = next(stream)
                except InvalidRequest as error:
                    running[index] = None
                    self._is_wrong(f"stuck: {error}", asked[index][0], "")
                    continue
                if piece.generation is not None:
                    running[index] = None
                    done = piece.generation
                    self.figures.draft_nodes_accepted += sum(done.accepted_tokens.values())
                    found[index] = (tuple(done.token_ids), done.text, done.finish_reason)
        return found

    def _is_wrong(self, problem: str, schema: Any, text: str) -> None:
        self.figures.wrong.append(f"{problem}\n  schema {json.dumps(schema, ensure_ascii=False)}\n  answer {text!r}")
        print(f"WRONG {self.figures.wrong[-1]}", flush=True)


def problem_of(schema: Any, text: str) -> str | None:
    """What is wrong with an answer. Numbers are decimal, as they are in JSON."""
    exact = json.loads(json.dumps(schema), parse_float=_number)
    kind = jsonschema.validators.validator_for(exact, default=jsonschema.Draft202012Validator)
    kind = jsonschema.validators.extend(kind, {"multipleOf": _multiple_of})
    try:
        kind(exact, format_checker=FORMATS).validate(json.loads(text, parse_float=_number))
    except ValueError as error:
        return f"not JSON: {error}"
    except re.error:
        return None  # Rust has this regular expression and Python has not
    except RecursionError:
        return NOT_CHECKED
    except jsonschema.ValidationError as error:
        return f"invalid: {error.message[:300]} ({error.json_path})"
    return None


def _multiple_of(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Exact. jsonschema's own divides with the precision of the decimal context."""
    if not validator.is_type(value, "number") or not MOST_DIGITS > Decimal(value).adjusted() > -MOST_DIGITS:
        return
    if (Fraction(value) / Fraction(divisor)).denominator != 1:
        yield jsonschema.ValidationError(f"{value} is not a multiple of {divisor}")


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        return float(text)


def keyword_of(reason: str) -> str:
    """The part of an error that says what is refused, without values."""
    _, _, told = reason.partition("cannot be compiled: ")
    return re.sub(r"'[^']*'|\"[^\"]{12,}\"|[-\d.e+]{3,}", "...", told or reason)[:90]


def check_suite(figures: Figures, cases: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    """Numbers of valid instances that follow their grammars, of all valid ones, and of invalid ones."""
    tokenizer = make_byte_tokenizer()
    grammars = Grammars(make_byte_tokenizer, BYTE_VOCAB_SIZE, [tokenizer.eos_token_id], "bytes")
    taken, valid, invalid = 0, 0, 0
    for case in cases:
        try:
            grammar = StructuredOutputs.model_validate({"json": json.dumps(case["schema"])}).grammar_text("json")
            grammars.matcher(grammar)
        except (InvalidRequest, ValueError):
            continue
        for test in case["tests"]:
            matcher = grammars.matcher(grammar)
            text = json.dumps(test["data"], ensure_ascii=False)
            follows = matcher.follow(tokenizer.encode(text, add_special_tokens=False)) and (
                matcher.is_complete or tokenizer.eos_token_id in matcher.allowed_tokens()
            )
            valid += test["valid"]
            taken += test["valid"] and follows
            invalid += not test["valid"]
            if follows and not test["valid"] and not KNOWN_GAPS.search(test["description"]):
                figures.wrong.append(f"{case['description']}: {test['description']}: {text} follows {case['schema']}")
                print(f"WRONG {figures.wrong[-1]}", flush=True)
    return taken, valid, invalid


def suite_cases(directory: Path) -> list[dict[str, Any]]:
    """Those whose schemas are objects."""
    cases = [case for path in sorted(directory.rglob("*.json")) for case in json.loads(path.read_text())]
    return [case for case in cases if isinstance(case["schema"], dict)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schemas", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", type=Path, help="directory of the JSON Schema test suite")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    generator = RandomSchemas(given.seed)
    cases = [] if given.suite is None else suite_cases(given.suite)
    schemas = [case["schema"] for case in cases] + [generator.next() for _ in range(given.schemas)]
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(Path(directory))
        for start in range(0, len(schemas), BATCH):
            soak.run(schemas[start : start + BATCH])
            print(f"{soak.figures.schemas} schemas, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    figures = soak.figures
    if cases:
        taken, valid, invalid = check_suite(figures, cases)
        print(f"suite: {len(cases)} schemas; instances: {taken} of {valid} valid ones follow, {invalid} invalid")
    for reason, count in figures.refused.most_common():
        print(f"refused {count:5d}  {reason}")
    print(
        f"schemas {figures.schemas}  refused {figures.num_refused}  valid {figures.valid}  "
        f"cut by length and completed {figures.cut_and_completed}  cut {figures.cut}  "
        f"not checked {figures.not_checked}  wrong {len(figures.wrong)}  "
        f"accepted draft tokens {figures.draft_nodes_accepted}  {time.perf_counter() - began:.0f} s"
    )
    sys.exit(bool(figures.wrong))


if __name__ == "__main__":
    main()

"""Compiling grammars: hostile ones, repeated ones, and where no model has been loaded."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from actors.errors import InvalidRequest
from actors.grammar.grammars import Grammars
from cluster.constraints.structured_outputs import StructuredOutputs
from paceline_testing.grammar_cases import GRAMMARS, toy_grammars
from paceline_testing.toy_tokenizer import toy_tokenizer

CHAIN = "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(3000)) + 'r3000: "a"\n'
REFERENCES = {"$defs": {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(3000)}, "$ref": "#/$defs/d0"}
REFERENCES["$defs"]["d3000"] = {"type": "string"}


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"grammar": CHAIN}, "too large or too deeply nested"),
        ({"json": REFERENCES}, "too large or too deeply nested"),
        ({"json": {"type": "integer", "multipleOf": 9999991}}, "takes more than 2 s"),
        ({"regex": "((a{1000}){1000}){60000}"}, "within 200 ms|takes more than 2 s"),
    ],
)
def test_a_hostile_grammar_is_refused_in_seconds_and_the_next_one_compiles(constraint, reason):
    grammars = toy_grammars()[0]
    text = StructuredOutputs.model_validate(constraint).grammar_text("f")
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match=reason):
        grammars.matcher(text, "f")
    assert time.monotonic() - started < 30  # it takes 3, on a machine that is not busy
    with pytest.raises(InvalidRequest, match=reason):  # known by now
        grammars.matcher(text, "f")
    assert len(grammars.matcher('start: "good"').forced_tokens()) > 0


def test_a_lark_grammar_of_empty_lines_does_not_stop_other_threads():
    constraint = StructuredOutputs(grammar="\n" * 200_000 + 'start: "a"')
    ticks: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    constraint.grammar_text("f")
    is_over.set()
    thread.join()
    assert max((later - sooner for sooner, later in itertools.pairwise(ticks)), default=0.0) < 0.5


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": json.dumps({"type": "string"})[:-1] + ',"x":' + "[" * 500 + "]" * 500 + "}"},
        {"json": '{"const": NaN}'},
        {"json": {"const": "\ud800"}},
        {"json": "true"},
        {"grammar": "\n".join(f'r{index} ::= "a"' for index in range(8000))},
    ],
)
def test_what_cannot_be_read_is_refused_by_name(constraint):
    with pytest.raises(InvalidRequest) as error:
        StructuredOutputs.model_validate(constraint).grammar_text("guided")
    assert error.value.field == "guided"
    assert len(str(error.value)) < 400


def test_reasons_are_short_and_say_what_is_wrong():
    with pytest.raises(InvalidRequest, match="look-around"):
        toy_grammars()[0].matcher(StructuredOutputs(regex="a(?=b)").grammar_text("f"), "f")
    with pytest.raises(InvalidRequest) as error:
        toy_grammars()[0].matcher(f"start: {'x' * 100_000}", "f")
    assert len(str(error.value)) < 400


def test_copies_of_a_grammar_are_of_a_fresh_one_after_a_while():
    grammars = Grammars(toy_tokenizer, 376, [0], "toy")
    text = GRAMMARS["date"]
    first = grammars.matcher(text)
    compiled = grammars._known[text].matcher
    for _ in range(200):
        grammars.matcher(text)
    assert grammars._known[text].matcher is not compiled
    assert grammars.matcher(text).hash_of_allowed() == first.hash_of_allowed()


@pytest.mark.parametrize(
    ("tokenizer", "eos", "reason"),
    [(object(), [0], "no fast tokenizer"), (toy_tokenizer(), [], "no end-of-sequence token"),
     (toy_tokenizer(), [10**6], "no tokenizer that constraints can use")],
)  # fmt: skip
def test_a_model_without_what_grammars_need_is_named(tokenizer, eos, reason):
    grammars = Grammars(lambda: tokenizer, 376, eos, "odd")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=f"response_format .*model 'odd' has {reason}"):
            grammars.matcher(GRAMMARS["date"], "response_format")


def test_a_router_compiles_grammars_though_it_has_no_torch_loaded(tmp_path: Path):
    """As in the process of a router, where nothing but its own modules is imported."""
    toy_tokenizer().save_pretrained(tmp_path)
    program = (
        "import sys, cluster.router.deployment\n"
        "from actors.grammar.grammars import Grammars\n"
        "from cluster.text.tokenizer import read_tokenizer\n"
        f"grammars = Grammars(lambda: read_tokenizer({str(tmp_path)!r}), 376, [0], 'toy')\n"
        "print(grammars.matcher('start: \"abc\"').is_complete)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_a_process_that_was_killed_while_it_waited_costs_no_grammar():
    grammars = toy_grammars()[0]
    grammars.matcher('start: "one"')
    process = grammars._vocabulary.checker._process
    process.kill()
    process.wait()
    assert grammars.matcher('start: "another"').forced_tokens()

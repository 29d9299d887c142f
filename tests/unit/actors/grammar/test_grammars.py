"""Compiling grammars: hostile ones, repeated ones, and where no model has been loaded."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from llguidance import LLMatcher, LLParserLimits

from actors.draft_tree import DraftTree
from actors.errors import InvalidRequest, Overloaded
from actors.grammar import checker
from actors.grammar import grammars as grammars_module
from actors.grammar import matcher as matcher_module
from actors.grammar.grammars import Grammars
from actors.grammar.limits import LIMITS
from actors.grammar.matcher import GrammarMatcher
from cluster.constraints.structured_outputs import StructuredOutputs
from paceline_testing.grammar_cases import GRAMMARS, toy_grammars
from paceline_testing.toy_tokenizer import toy_tokenizer

CHAIN = "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(3000)) + 'r3000: "a"\n'
REFERENCES = {"$defs": {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(3000)}, "$ref": "#/$defs/d0"}
REFERENCES["$defs"]["d3000"] = {"type": "string"}
SLOW = LLMatcher.grammar_from_json_schema({"type": "integer", "multipleOf": 9999991})


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"grammar": CHAIN}, "too large or too deeply nested"),
        ({"json": REFERENCES}, "too large or too deeply nested"),
        ({"json": {"type": "integer", "multipleOf": 9999991}}, r"takes more than [\d.]+ s"),
        ({"regex": "((a{1000}){1000}){60000}"}, r"within 50 ms|takes more than [\d.]+ s"),
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


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> str:
    """A grammar, of which one answer and a few drafts use up most of the states that a lexer may have."""
    limits = LLParserLimits(max_lexer_states=700, step_max_items=LIMITS.step_max_items, verbose_errors=False)
    monkeypatch.setattr(grammars_module, "LIMITS", limits)
    return str(LLMatcher.grammar_from_regex("(.*a.{9}|.*b.{8}|.*c.{7})x"))


def masks_along(matcher: GrammarMatcher, answer: list[int]) -> list[list[int]]:
    found = []
    for token in answer:
        assert matcher.masks(DraftTree.empty()).num_unmasked == 0
        found.append(matcher.allowed_tokens().tolist())
        assert matcher.follow([token])
    return found


def random_answers(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [toy_tokenizer().encode("".join(rng.choice(list("abcd"), 24))) for _ in range(count)]


def test_an_answer_goes_on_where_others_with_its_grammar_have_used_up_the_lexer(few_states: str) -> None:
    def alone() -> Grammars:
        return Grammars(toy_tokenizer, 376, [0], "toy")

    answers = random_answers(6)
    grammars = alone()
    running = [grammars.matcher(few_states) for _ in answers]
    wanted = [masks_along(alone().matcher(few_states), answer) for answer in answers]
    firsts = [masks_along(matcher, answer[:2]) for matcher, answer in zip(running, answers, strict=True)]
    rests = [masks_along(matcher, answer[2:]) for matcher, answer in zip(running, answers, strict=True)]
    assert [first + rest for first, rest in zip(firsts, rests, strict=True)] == wanted
    assert any(matcher._is_alone for matcher in running)
    assert masks_along(grammars.matcher(few_states), answers[0]) == wanted[0]  # and so does the next one


def test_an_answer_goes_on_where_its_own_drafts_have_used_up_the_lexer(few_states: str, monkeypatch) -> None:
    monkeypatch.setattr(matcher_module, "MOST_AHEAD_S", 1.0)
    answer, *drafts = random_answers(12)
    matcher = Grammars(toy_tokenizer, 376, [0], "toy").matcher(few_states)
    for place, token in enumerate(answer):
        for draft in drafts:
            tree = DraftTree(
                np.array(draft, np.int32),
                np.arange(-1, len(draft) - 1, dtype=np.int32),
                np.ones(len(draft), np.float32),
            )
            matcher.masks(tree)
        assert matcher.follow([token]), place
    assert matcher._is_alone


def test_a_known_grammar_does_not_wait_for_one_that_is_compiled() -> None:
    grammars = toy_grammars()[0]
    assert grammars.known_matcher("start: /[a-f]+/") is None
    grammars.matcher("start: /[a-f]+/")
    with grammars._vocabulary.checker._lock:  # as while it tries a slow one
        thread = threading.Thread(target=grammars.matcher, args=("start: /[a-g]+/",))
        thread.start()
        known = grammars.known_matcher("start: /[a-f]+/")
        assert known is not None
        assert grammars.known_matcher("start: /[a-g]+/") is None
    thread.join()
    assert grammars.known_matcher("start: /[a-g]+/") is not None
    with pytest.raises(InvalidRequest, match="f is"):
        grammars.matcher("start: x", "f")
    with pytest.raises(InvalidRequest, match="f is"):
        grammars.known_matcher("start: x", "f")


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


def warm_process(grammars: Grammars) -> psutil.Process:
    return psutil.Process(grammars._vocabulary.checker._warm[0].pid)


def suspend(process: psutil.Process) -> None:
    process.suspend()  # as on a machine with other work
    while process.status() != psutil.STATUS_STOPPED:  # a signal takes effect after it was sent
        time.sleep(0.01)


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("much_s", "error", "reason"),
    [(0.5, Overloaded, "could not be tried within 0.2 s"), (0.0, InvalidRequest, r"it takes more than 0[\d.]* s")],
)
def test_a_grammar_that_gets_no_answer_is_refused_for_now_unless_it_has_taken_much_time(
    monkeypatch, much_s: float, error: type[Exception], reason: str
) -> None:
    grammars = Grammars(toy_tokenizer, 376, [0], "toy")
    grammars.matcher('start: "a"')
    monkeypatch.setattr(checker, "_MOST_WAIT_S", 0.2)
    monkeypatch.setattr(checker, "_MUCH_S", much_s)
    monkeypatch.setattr(checker, "_COMMON_S", 0.0)
    monkeypatch.setattr(checker, "_give_way", suspend)
    with pytest.raises(error, match=reason):
        grammars.matcher(SLOW)
    monkeypatch.undo()
    assert grammars.matcher('start: "c"').forced_tokens()


def test_a_process_that_starts_none_for_a_grammar_is_replaced(monkeypatch) -> None:
    grammars = Grammars(toy_tokenizer, 376, [0], "toy")
    grammars.matcher('start: "a"')
    monkeypatch.setattr(checker, "_START_S", 0.2)
    suspend(warm_process(grammars))
    with pytest.raises(Overloaded, match="no process for it has started"):
        grammars.matcher('start: "b"')
    monkeypatch.undo()
    assert grammars.matcher('start: "b"').forced_tokens()


def test_a_slow_grammar_costs_others_neither_the_process_nor_a_wait(monkeypatch) -> None:
    grammars = Grammars(toy_tokenizer, 376, [0], "toy")
    grammars.matcher('start: "first"')
    warm = warm_process(grammars)
    monkeypatch.setattr(checker, "_MOST_S", 1.0)
    monkeypatch.setattr(checker, "_start", None)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(grammars.matcher, SLOW)
        wait_until(warm.children)
        assert grammars.matcher('start: "meanwhile"').forced_tokens()
        assert not slow.done()
        with pytest.raises(InvalidRequest, match="it takes more than 1 s"):
            slow.result()
    assert grammars.matcher('start: "afterwards"').forced_tokens()
    assert warm_process(grammars) == warm
    wait_until(lambda: not warm.children())  # none of them is left as a zombie


def test_the_processes_end_with_their_socket_also_while_a_grammar_is_tried() -> None:
    grammars = Grammars(toy_tokenizer, 376, [0], "toy")
    grammars.matcher('start: "a"')
    warm = warm_process(grammars)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(grammars.matcher, SLOW)
        wait_until(warm.children)
        children = warm.children()
        grammars._vocabulary.checker._warm[1].close()
        with pytest.raises(InvalidRequest, match="too large"):  # as where a grammar ends its process
            slow.result()
    assert psutil.wait_procs([*children, grammars._vocabulary.checker._warm[0]], timeout=10)[1] == []


def test_a_grammar_that_takes_long_gives_way_to_all_others_and_the_next_one_does_not(monkeypatch):
    grammars = toy_grammars()[0]
    grammars.matcher('start: "before"')
    policies: list[int] = []
    compiled_at: list[int] = []
    give_way, timed = checker._give_way, grammars_module._timed

    def noted(process: psutil.Process) -> None:
        give_way(process)
        policies.extend(os.sched_getscheduler(thread.id) for thread in process.threads())

    def niceness_noted(*arguments):
        compiled_at.append(niceness())
        return timed(*arguments)

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr(checker, "_give_way", noted)
    monkeypatch.setattr(grammars_module, "_timed", niceness_noted)
    monkeypatch.setattr(checker, "_COMMON_S", 0.04)
    properties = {f"p{index}": {"type": "integer"} for index in range(5000)}  # 0.3 s, and allowed
    grammars.matcher(LLMatcher.grammar_from_json_schema({"properties": properties, "required": list(properties)}))
    assert policies == [os.SCHED_IDLE, os.SCHED_IDLE]
    monkeypatch.setattr(checker, "_COMMON_S", 10.0)
    grammars.matcher('start: "behind"')
    assert compiled_at == [min(19, niceness() + 10), niceness()]
    for thread in warm_process(grammars).threads():
        assert os.sched_getscheduler(thread.id) == os.sched_getscheduler(0)
        assert os.getpriority(os.PRIO_PROCESS, thread.id) == min(19, niceness() + 10)


def test_an_answer_whose_masks_take_long_for_long_is_not_followed_any_further(monkeypatch):
    monkeypatch.setattr(matcher_module, "MOST_MASK_S_AHEAD", 0.0)
    monkeypatch.setattr(matcher_module, "MASK_S_PER_ROUND", 0.0)
    answer = toy_tokenizer().encode("abab")
    slow = toy_grammars()[0].matcher("start: /[ab]+/")
    slow.masks(DraftTree.empty())
    assert not slow.follow(answer[:1])
    resumed = toy_grammars()[0].matcher("start: /[ab]+/")
    assert resumed.follow(answer[:2])  # however long it took
    monkeypatch.undo()
    masks_along(toy_grammars()[0].matcher("start: /[ab]+/"), answer)


def test_a_process_that_was_killed_while_it_waited_costs_no_grammar():
    grammars = toy_grammars()[0]
    grammars.matcher('start: "one"')
    process = grammars._vocabulary.checker._warm[0]
    process.kill()
    process.wait()
    assert grammars.matcher('start: "another"').forced_tokens()

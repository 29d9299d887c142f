"""Scores of answers against references worked out by hand or known from the packages' papers, and sample files."""

from __future__ import annotations

import json
import sys
from decimal import Decimal

import pytest

from actors.errors import InvalidRequest
from cluster.cli.bench.code_samples import code_of, task_id
from cluster.cli.bench.prompts import CODE_BENCHMARKS, BenchPrompt
from cluster.cli.bench.scores import Score, can_be_scored, check_scoring, final_number, score_answers


def prompt(name, task, reference, benchmark=""):
    return BenchPrompt(name, task, ({"role": "user", "content": "?"},), benchmark=benchmark, reference=reference)


# --- numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 - 2 = 3\n#### 3", "3"),
        ("It costs $1,234.50.", "1234.5"),
        ("The answer is 18. To check: 9 * 2 = 18, and 4 is left.", "18"),
        ("THE ANSWER IS: **-7** of 12", "-7"),
        ("He has 3 apples, then 12.", "12"),
        ("#### 1,000,000 dollars, not 5", "1000000"),
        ("The answer is unknown, say 4 or 5", "4"),
        ("first 7, then the answer is none", "7"),
        ("1,2,3", "3"),
        ("007.50", "7.5"),
        ("#### $18", "18"),
        ("#### Step 1\n6 * 3 = 18\n#### Step 2\nSo it is 18 in all.", "18"),
        ("#### Step 1\n20 - 2\n#### 18", "18"),
        ("It takes 10-12", "12"),
        ("It is -12", "-12"),
        ("The answer is .5", "0.5"),
    ],
)
def test_the_final_number_is_that_after_the_mark_or_the_last(text, number):
    assert final_number(text) == Decimal(number)


def test_a_text_without_a_number_has_none():
    assert final_number("no idea") is None
    assert final_number("") is None


def test_the_share_of_right_numbers_is_the_score_and_no_number_is_wrong():
    prompts = [
        prompt("1", "gsm8k", "2 + 2 = 4\n#### 4", "gsm8k"),
        prompt("2", "gsm8k", "#### 1,200", "gsm8k"),
        prompt("3", "gsm8k", "#### 7", "gsm8k"),
        prompt("4", "math_reasoning", "so #### 5"),
    ]
    answers = {"1": "4.00 in all", "2": "$1200", "3": "seven", "4": "The answer is 5."}
    assert score_answers(prompts, answers) == (
        Score("gsm8k", "exact match", pytest.approx(200 / 3), 3),
        Score("math_reasoning", "exact match", 100.0, 1),
    )


# --- texts


def test_summaries_are_scored_by_the_words_that_they_share_with_the_reference():
    prompts = [prompt("1", "mine", "the cat sat on the mat", "cnn_dm"), prompt("2", "mine", "it rains", "cnn_dm")]
    found = score_answers(prompts, {"1": "the cat on the mat sat", "2": "snow"})
    by_metric = {score.metric: score.value for score in found}
    # Of the first: all 6 words; 3 of 5 pairs; 5 words in order. Of the second: nothing.
    assert by_metric == {
        "ROUGE-1": pytest.approx(50.0),
        "ROUGE-2": pytest.approx(100 * 3 / 5 / 2),
        "ROUGE-L": pytest.approx(100 * 5 / 6 / 2),
    }
    assert {(score.task, score.num_answers) for score in found} == {("mine", 2)}


def test_translations_are_scored_as_one_corpus():
    prompts = [
        prompt("1", "wmt16", "Good day to you, Sir.", "wmt16"),
        prompt("2", "translation", "Thank you very much."),
    ]
    perfect = score_answers(prompts, {one.name: one.reference for one in prompts})
    assert [(one.task, one.metric, round(one.value, 6)) for one in perfect] == [
        ("wmt16", "BLEU", 100.0),
        ("wmt16", "chrF", 100.0),
        ("translation", "BLEU", 100.0),
        ("translation", "chrF", 100.0),
    ]
    # 5 tokens, the reference 6: precisions 4/5, 3/4, 2/3, 1/2 and a penalty of exp(1 - 6/5).
    rows = [prompt("1", "translation", "a b c d e f")]
    bleu, chrf = score_answers(rows, {"1": "a b c d\nx"})
    assert bleu.value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25 * 0.8187307531)
    assert 0 < chrf.value < 100


def test_an_empty_answer_scores_nothing():
    for task in ("gsm8k", "summarization", "translation"):
        assert {score.value for score in score_answers([prompt("1", task, "one 1 two")], {"1": ""})} == {0.0}


# --- what can be scored


def test_rows_without_reference_metric_or_answer_are_left_out():
    prompts = [
        prompt("1", "gsm8k", ""),
        prompt("2", "qa", "Paris"),
        prompt("3", "gsm8k", "#### 3"),
        prompt("4", "humaneval", "x", "humaneval"),
    ]
    assert [can_be_scored(one) for one in prompts] == [False, False, True, False]
    without = [
        prompt("5", "gsm8k", "no idea", "gsm8k"),
        prompt("6", "math_reasoning", "#### -"),
        prompt("7", "cnn_dm", " "),
    ]
    assert not any(map(can_be_scored, without))
    assert score_answers(prompts, {"1": "1", "2": "Paris", "4": "x"}) == ()


def test_nothing_to_score_and_packages_that_are_absent_are_named(monkeypatch):
    with pytest.raises(InvalidRequest, match="no row has a reference and one of the tasks gsm8k, math_reasoning, "):
        check_scoring([prompt("1", "qa", "Paris")], "--score")
    for package in ("rouge_score", "sacrebleu"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    check_scoring([prompt("1", "gsm8k", "#### 3")], "--score")
    with pytest.raises(InvalidRequest, match=r"needs rouge-score; install Paceline with the extra \[score\]"):
        check_scoring([prompt("1", "cnn_dm", "Rain.")], "--score")
    with pytest.raises(InvalidRequest, match="task translation needs sacrebleu"):
        check_scoring([prompt("1", "translation", "Good day.")], "--score")


# --- code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Sure:\n```python\ndef f():\n    return 1\n```\nIt works.\n```\nnot this\n```", "def f():\n    return 1\n"),
        ("``` Python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1", "x = 1\n"),
        ("    return 1\n\ndef g():\n    pass", "    return 1\n"),
        ("    y = 1\n    # why\n    return y\nprint(f())", "    y = 1\n    # why\n    return y"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("", ""),
    ],
)
def test_code_is_the_first_block_or_what_comes_before_something_new(answer, code):
    assert code_of(answer, "humaneval") == code


@pytest.mark.parametrize("benchmark", CODE_BENCHMARKS)
@pytest.mark.parametrize(
    "answer",
    [
        "```bash\npip install x\n```\nThen:\n```python\ny = 1\n```",
        "```python3\ny = 1\n```\nThat is all.\n",
        "```Py\ny = 1```\nThat is all.\n",
    ],
)
def test_a_block_of_another_language_is_passed_by_whole(benchmark, answer):
    assert code_of(answer, benchmark) == "y = 1\n"


def test_a_program_without_a_block_keeps_its_imports_and_functions():
    program = "import math\n\ndef half(x):\n    return x / 2\n\ndef area(r):\n    return half(math.tau) * r * r"
    for rest in ("", "\nprint(area(1))", "\nassert area(0) == 0", "\nif True:\n    print(area(1))"):
        assert code_of(program + rest, "mbpp") == program


def test_task_ids_are_those_of_the_benchmark():
    assert task_id(prompt("601", "mbpp", "", "mbpp")) == 601
    assert task_id(prompt("HumanEval/0", "humaneval", "", "humaneval")) == "HumanEval/0"
    assert json.dumps(task_id(prompt("7", "humaneval", "", "humaneval"))) == '"7"'

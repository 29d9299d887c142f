"""Benchmark prompts: rows of every form, Spec-Bench's tasks, even choice, blocks of one task."""

import codecs
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import InvalidRequest
from cluster.cli.bench.prompts import BenchPrompt, make_blocks, pick_rows, read_bench_prompts, user_says

SHARED = Path(__file__).resolve().parents[5].parent / "shared"


def write(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return file


def test_every_form_of_row_is_read(tmp_path):
    history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file = write(
        tmp_path,
        {"prompt": "one\u2028line"},
        "",
        {"turns": ["first", "second"], "category": "coding", "question_id": 7},
        {"messages": history, "task": "chat", "id": "x"},
        {"prompt_token_ids": [3, 0, 5], "expected": "ignored"},
        {"prompt": "say it again", "prediction": "it again"},
    )
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert read_bench_prompts(file, None) == [
        BenchPrompt("1", "prompts", user_says("one\u2028line")),
        BenchPrompt("7", "mt_bench", user_says("first")),
        BenchPrompt("x", "chat", tuple(history)),
        BenchPrompt("5", "prompts", token_ids=(3, 0, 5)),
        BenchPrompt("6", "prompts", user_says("say it again"), prediction="it again"),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", ":2 is '{'; it must be a row of JSON"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "exactly one of turns, prompt, messages, prompt_token_ids"),
        ('{"answer": "' + "x" * 1000 + '"}', "x'; a row needs exactly one of"),
        ("[" * 100_000, "it must be a row of JSON"),
        ('{"prompt": ' + "[" * 600 + "]" * 600 + "}", "got `array` - at `$.prompt`"),
        ('{"prompt": "half a pair: \\ud800"}', "it must be a row of JSON"),
        ('{"prompt": "a", "id": "\\udfff"}', "it must be a row of JSON"),
        ({"prompt": "a", "turns": ["b"]}, "exactly one of"),
        ({"prompt": ""}, "length >= 1 - at `$.prompt`"),
        ({"turns": []}, "length >= 1 - at `$.turns`"),
        ({"turns": [3]}, "got `int` - at `$.turns[0]`"),
        ({"turns": ["a", ""]}, "length >= 1 - at `$.turns[1]`"),
        ({"prompt": "a", "prediction": 3}, "got `int` - at `$.prediction`"),
        ({"messages": []}, "at `$.messages`"),
        ({"messages": [{"role": "user"}]}, "missing required field `content` - at `$.messages[0]`"),
        ({"prompt_token_ids": [1, True]}, "at `$.prompt_token_ids[1]`"),
        ({"prompt_token_ids": [-1]}, ">= 0 - at `$.prompt_token_ids[0]`"),
        ({"prompt": "b", "id": 1}, "id is '1'; every row needs an id of its own"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, said):
    with pytest.raises(InvalidRequest) as caught:
        read_bench_prompts(write(tmp_path, {"prompt": "a"}, row), None)
    assert said in str(caught.value)


def test_a_file_that_is_absent_empty_or_no_text_is_named(tmp_path):
    empty, binary = write(tmp_path, ""), tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for file in (empty, binary, tmp_path / "absent", tmp_path):
        with pytest.raises(InvalidRequest, match=str(file)):
            read_bench_prompts(file, None)


def test_the_first_turns_of_spec_bench_are_read_and_the_categories_of_mt_bench_are_one_task(tmp_path):
    names = {81: "writing", 91: "roleplay", 161: "translation", 481: "rag"}
    rows = [{"question_id": row, "category": name, "turns": [f"say {name}", "again"]} for row, name in names.items()]
    write(tmp_path, *rows).rename(tmp_path / "question.jsonl")
    found = read_bench_prompts(None, tmp_path)
    assert [prompt.task for prompt in found] == ["mt_bench", "mt_bench", "translation", "rag"]
    assert [(prompt.name, prompt.messages) for prompt in found] == [
        (str(row), user_says(f"say {name}")) for row, name in names.items()
    ]


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared absent")
def test_spec_bench_has_six_tasks_of_eighty_questions():
    prompts = read_bench_prompts(None, SHARED / "data" / "spec_bench")
    tasks = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    assert Counter(prompt.task for prompt in prompts) == dict.fromkeys(tasks, 80)
    assert len({prompt.name for prompt in prompts}) == 480
    assert prompts[0].name == "81"
    assert prompts[0].messages[0]["content"].startswith("Compose an engaging travel blog post")
    assert all(len(prompt.messages) == 1 for prompt in prompts)


def prompts_of(counts):
    return [BenchPrompt(f"{task}{row}", task) for task, count in counts.items() for row in range(count)]


def test_rows_are_picked_evenly_over_each_task():
    picked, left = pick_rows(prompts_of({"a": 80, "b": 2}), 4)
    assert [row.name for row in picked] == ["a0", "a20", "a40", "a60", "b0", "b1"]
    assert len(left) == 76
    assert pick_rows(prompts_of({"a": 3}), None) == (prompts_of({"a": 3}), [])


def test_blocks_hold_one_task_and_tasks_take_turns():
    blocks = make_blocks(prompts_of({"a": 5, "b": 2}), 2)
    assert [[row.name for row in block] for block in blocks] == [["a0", "a1"], ["b0", "b1"], ["a2", "a3"], ["a4"]]


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12), min_size=1), st.integers(1, 5), st.integers(1, 9))
def test_nothing_is_lost_or_doubled_between_picking_and_blocks(counts, per_task, size):
    rows = prompts_of(counts)
    picked, left = pick_rows(rows, per_task)
    assert sorted(row.name for row in (*picked, *left)) == sorted(row.name for row in rows)
    assert Counter(row.task for row in picked) == {task: min(per_task, count) for task, count in counts.items()}
    blocks = make_blocks(picked, size)
    assert sorted(row.name for block in blocks for row in block) == sorted(row.name for row in picked)
    assert all(len(block) <= size and len({row.task for row in block}) == 1 for block in blocks)

"""`paceline bench local --compare` on a tiny model: figures of the answers, which drafts do not change."""

import io
import json
from dataclasses import replace
from itertools import accumulate

import pytest
from typer.testing import CliRunner

from actors.models.loader import load_config
from actors.models.source import ModelSource
from cluster.cli.bench.app import app
from cluster.cli.bench.local import run_local
from cluster.cli.bench.options import LocalOptions
from cluster.cli.bench.prompts import BenchPrompt, user_says
from cluster.cli.bench.report import print_local_report
from cluster.cli.bench.speed import Difference
from cluster.offline.engine import LocalEngine
from paceline_testing.tiny_models import save_eagle_head, save_tiny_model, tiny_eagle_tensors

pytestmark = pytest.mark.whole
QUESTIONS = [
    {"question_id": 201, "category": "translation", "turns": ["abc abc abc abc abc"]},
    {"question_id": 101, "category": "writing", "turns": ["one two three one two three", "and once more"]},
    {"question_id": 81, "category": "roleplay", "turns": ["who are you?"]},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def local_options(directory, drafters, **more):
    return LocalOptions(model=str(directory), draft_model="none", drafters=[drafters], compare=True, **more)


def compare(*options):
    """What the command prints."""
    result = CliRunner().invoke(app, ["local", "--compare", *map(str, options)], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture(scope="module")
def compared(directory, tmp_path_factory):
    """What the command printed, and what it saved as JSON."""
    place = tmp_path_factory.mktemp("spec_bench")
    (place / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    options = ["--spec-bench", place, "--model", directory, "--draft-model", "none", "--json", place / "all.json"]
    out = compare(*options, "--drafter", "prompt_lookup", "--drafters", "suffix,soft_ngram", "--max-new-tokens", 24)
    return out, json.loads((place / "all.json").read_text())


def test_every_answer_is_that_of_decoding_without_drafts(compared, directory):
    _, saved = compared
    plain = LocalEngine(str(directory), draft_model="none", drafters=("none",), batch_size=1)
    texts = [[{"role": "user", "content": question["turns"][0]}] for question in QUESTIONS]
    wanted = {
        str(question["question_id"]): one.token_ids
        for question, one in zip(QUESTIONS, plain.generate(texts, max_new_tokens=24), strict=True)
    }
    for method in saved["methods"]:
        blocks = [block for block in saved["blocks"] if block["method"] == method["name"]]
        assert {block["prompts"][0]: block["answers"][0]["token_ids"] for block in blocks} == wanted
    assert [method["differences"] for method in saved["methods"]] == [None, [], []]


def test_the_figures_are_those_of_the_answers(compared):
    _, saved = compared
    assert [method["name"] for method in saved["methods"]] == ["none", "prompt_lookup", "suffix,soft_ngram"]
    for method in saved["methods"]:
        answers = [
            answer for block in saved["blocks"] if block["method"] == method["name"] for answer in block["answers"]
        ]
        num_tokens = sum(len(answer["token_ids"]) for answer in answers)
        rounds, drafts = (sum(answer[key] for answer in answers) for key in ("rounds", "draft_tokens"))
        assert method["overall"]["num_prompts"] == len(answers) == 3
        assert method["overall"]["tokens_per_round"] == pytest.approx(num_tokens / rounds)
        sources = method["acceptance"]["by_source"]
        assert sum(one["verified"] for one in sources.values()) == drafts
        accepted = {name: one["accepted"] for name, one in sources.items() if one["accepted"]}
        assert accepted == method["overall"]["accepted_tokens"]
        positions = method["acceptance"]["by_position"]
        assert [one["position"] for one in positions] == list(range(1, len(positions) + 1))
        assert sum(one["reached"] for one in positions) >= sum(accepted.values())
        for key in ("rounds", "reached"):
            counts = [one[key] for one in positions]
            assert counts == list(accumulate(counts, min)), "a deep node has its ancestors beside it"
    assert saved["methods"][0]["acceptance"] == {"by_position": [], "by_source": {}}
    assert saved["methods"][1]["acceptance"]["by_position"][0]["reached"] > 0, "the toy repeats itself"


def test_the_tables_are_plain_text_in_a_pipe(compared):
    out, saved = compared
    assert "\x1b" not in out
    lines = out.splitlines()
    assert "max_new_tokens 24, batch_size 1, gamma 4, temperature 0.0, seed 0" in lines[1]
    rows = [line.split() for line in lines]
    tail = ["drafts", "accepted", "tokens", "by", "source", "identical"]
    speed = rows.index(["method", "tokens/s", "x", "tokens/round", *tail])
    assert [row[0] for row in rows[speed + 1 : speed + 4]] == ["none", "prompt_lookup", "suffix,soft_ngram"]
    assert [row[-1] for row in rows[speed + 1 : speed + 4]] == ["reference", "3/3", "3/3"]
    assert ["method", "translation", "mt_bench", "all"] in rows
    first = saved["methods"][1]["acceptance"]["by_position"][0]
    assert f"{first['share']:.0%} of {first['rounds']}" in out
    source = saved["methods"][1]["acceptance"]["by_source"]["prompt_lookup"]
    numbers = [str(source[key]) for key in ("proposed", "verified", "accepted")]
    assert ["prompt_lookup", "prompt_lookup", *numbers, f"{source['share']:.0%}"] in rows


def test_sampled_answers_in_batches_are_those_of_plain_decoding_with_the_same_seeds(directory):
    prompts = tuple(
        BenchPrompt(str(index), task, user_says(text), prediction="ab ab")
        for index, (task, text) in enumerate([("a", "ab ab ab"), ("a", "cd cd"), ("a", "ef"), ("b", "gh gh")])
    )
    options = local_options(directory, "suffix,prediction", exact="bitwise", batch_size=2, max_new_tokens=16)
    cell = run_local(prompts, replace(options, temperature=0.8, seed=5))
    plain = LocalEngine(str(directory), draft_model="none", drafters=("none",), batch_size=4, exact="bitwise")
    wanted = plain.generate([list(prompt.messages) for prompt in prompts], max_new_tokens=16, temperature=0.8, seed=5)
    for method in ("none", "suffix,prediction"):
        found = {
            name: list(answer.token_ids)
            for block in cell.blocks
            if block.method == method
            for name, answer in zip(block.prompts, block.answers, strict=True)
        }
        assert found == {str(index): one.token_ids for index, one in enumerate(wanted)}
    assert cell.methods[1].acceptance.by_source["prediction"].proposed > 0


def test_answers_that_differ_are_told_with_the_index_where_they_part(directory):
    found = run_local((BenchPrompt("7", "t", token_ids=(65, 66)),), local_options(directory, "suffix"))
    parted = replace(found.methods[1], differences=(Difference("7", 3, 41, None),))
    out = io.StringIO()
    print_local_report(replace(found, methods=[found.methods[0], parted]), "title", out)
    assert out.getvalue().endswith("suffix: 1 answers differ\n  prompt 7, token 3: 41 became end\n\n")


def test_a_head_a_chain_and_quantized_weights_are_compared_on_the_same_terms(directory, tmp_path):
    config = load_config(ModelSource("tiny", "tiny", directory))
    head = tmp_path / "head"
    head.mkdir()
    save_eagle_head(head, config, tiny_eagle_tensors(config, "eagle"))
    rows, saved = tmp_path / "rows.jsonl", tmp_path / "out.json"
    texts = [[{"role": "user", "content": text}] for text in ("one two one two", "abc abc")]
    rows.write_text("".join(json.dumps({"messages": text}) + "\n" for text in texts))
    options = ["--prompts", rows, "--model", directory, "--draft-model", directory, "--eagle-head", head]
    options += ["--drafter", "eagle", "--drafter", "draft_model", "--branch", 1, "--quantization", "int8"]
    out = compare(*options, "--max-new-tokens", 12, "--json", saved)
    assert f"draft_model {directory}, eagle_head {head}, branch 1, dtype float32, quantization int8" in out
    cell = json.loads(saved.read_text())
    assert [method["drafters"] for method in cell["methods"]] == [[], ["eagle"], ["draft_model"]]
    plain = LocalEngine(str(directory), draft_model="none", drafters=("none",), quantization="int8")
    wanted = [one.token_ids for one in plain.generate(texts, max_new_tokens=12)]
    for method in ("none", "eagle", "draft_model"):
        blocks = [block for block in cell["blocks"] if block["method"] == method]
        assert [answer["token_ids"] for block in blocks for answer in block["answers"]] == wanted


def test_every_gamma_has_a_row_of_its_own_and_drafters_without_a_draft_model_have_one(
    directory, prompts_file, tmp_path
):
    saved = tmp_path / "out.json"
    options = ["--prompts", prompts_file, "--model", directory, "--draft-model", directory, "--gamma", "1,3,1"]
    options += ["--drafter", "suffix", "--drafter", "suffix,draft_model", "--max-new-tokens", 12, "--json", saved]
    assert "gamma 1,3,1, " in compare(*options)
    report = json.loads(saved.read_text())
    methods = report["methods"]
    assert [(method["name"], method["gamma"]) for method in methods] == [
        ("none", None),
        ("suffix", None),
        ("suffix,draft_model gamma 1", 1),
        ("suffix,draft_model gamma 3", 3),
    ]
    assert all(method["differences"] == [] for method in methods[1:])


def test_tool_calls_are_constrained_the_same_with_any_drafts_and_compared_with_free_answers(tmp_path):
    directory = save_tiny_model(tmp_path, max_positions=4096)
    out = compare("--task", "tools", "--model", directory, "--draft-model", "none", "--rows-per-task", 1,
                  "--learn-rows", 1, "--max-new-tokens", 24)  # fmt: skip
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line.startswith(("none", "auto"))}
    assert list(rows) == ["none", "auto", "auto, without grammar", "auto, unconstrained"]
    assert "task tools" in out
    speeds = out.partition("x of none")[0].splitlines()
    ends = [line.split()[-1] for line in speeds if line.startswith(("none", "auto"))]
    assert ends == ["reference", "2/2", "2/2", "-"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--task", "tools"], "give --compare, too"),
        (["--task", "tools", "--compare", "--prompts", "x"], "--task has prompts of its own"),
    ],
)
def test_options_that_do_not_go_with_a_task_are_refused(options, reason):
    result = CliRunner().invoke(app, ["local", *options])
    assert reason in str(result.exception)

"""`paceline compare` on a tiny model: figures against hand-made ones, answers that are lossless, files that are read
back."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from typer.testing import CliRunner

from actors.draft_tree import DraftTree
from actors.messages import Verdict, VerifyResult
from actors.models.loader import load_config
from actors.models.source import ModelSource
from actors.models.toy import save_eagle_head, save_tiny_model, tiny_eagle_tensors
from cluster.cli.app import app
from cluster.cli.bench.acceptance import AcceptanceCounter, PositionAcceptance, SourceAcceptance
from cluster.cli.bench.compare import ComparePlan, next_turn, run_compare
from cluster.cli.bench.compare_report import print_report
from cluster.cli.bench.prompts import BenchPrompt
from cluster.cli.bench.speed import Difference, Equality
from cluster.offline.engine import LocalEngine
from cluster.router.round import Round, RoundEntry, RoundSize
from cluster.router.trace import RoundTrace, trace_round
from cluster.router.traffic import Traffic

QUESTIONS = [
    {"question_id": 201, "category": "translation", "turns": ["abc abc abc abc abc"]},
    {"question_id": 101, "category": "writing", "turns": ["one two three one two three", "and once more", "again"]},
    {"question_id": 81, "category": "roleplay", "turns": ["who are you?", "really? really?"]},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def spec_bench(tmp_path_factory):
    place = tmp_path_factory.mktemp("spec_bench")
    (place / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return place


@pytest.fixture(scope="module")
def compared(directory, spec_bench):
    """What the command printed, and what it saved as JSON."""
    options = ["--spec-bench", spec_bench, "--model", directory]
    options += ["--draft-model", "none", "--drafter", "prompt_lookup", "--drafter", "suffix,soft_ngram"]
    options += ["--max-new-tokens", 24, "--json", spec_bench / "all.json"]
    result = CliRunner().invoke(app, ["compare", *map(str, options)], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout, json.loads((spec_bench / "all.json").read_text())


# --- acceptance


def trace(depths, proposed=None, verified=None, accepted=None):
    return RoundTrace(1, 1, 1, proposed or {}, verified or {}, accepted or {}, 1, (), tuple(depths), 0.1, 0.1)


def test_acceptance_by_position_and_source_is_what_is_counted_by_hand():
    counter = AcceptanceCounter()
    counter.add(trace([]))  # a prompt
    counter.add(trace([(3, 3)], {"suffix": 5}, {"suffix": 3}, {"suffix": 3}))
    counter.add(trace([(1, 0), (4, 2)], {"suffix": 9, "lookup": 2}, {"suffix": 5, "lookup": 1}, {"lookup": 1}))
    counter.add(trace([(2, 1)], {"lookup": 2, "idle": 7}, {"lookup": 2}, {"lookup": 1}))
    found = counter.result()
    assert found.by_position == (
        PositionAcceptance(1, 4, 3, 3 / 4),
        PositionAcceptance(2, 3, 2, 2 / 3),
        PositionAcceptance(3, 2, 1, 1 / 2),
        PositionAcceptance(4, 1, 0, 0.0),
    )
    assert found.by_source == {
        "idle": SourceAcceptance(7, 0, 0, None),
        "lookup": SourceAcceptance(4, 3, 2, 2 / 3),
        "suffix": SourceAcceptance(14, 8, 3, 3 / 8),
    }
    assert AcceptanceCounter().result().by_position == ()


def entry(seq_id, parents, num_verified):
    tree = np.array(parents, dtype=np.int32)
    return RoundEntry(
        sequence=None,
        seq_id=seq_id,
        num_tokens=5,
        rows=1,
        max_nodes=8,
        emits=True,
        is_coupled=True,
        target_known=4,
        proposals=[(0, DraftTree(tree, tree, np.ones(len(tree), np.float32)))],
        token_ids=np.arange(len(tree), dtype=np.int32) + 10,
        parents=tree,
        num_verified=num_verified,
    )


def test_a_trace_has_the_depth_of_every_sequences_tree_and_of_its_accepted_path():
    entries = [
        entry(1, [-1, -1, 0, 2, 1], 5),  # two branches, 3 and 2 deep; the shallow one is right
        entry(2, [-1, 0, 1], 2),  # the third node was not computed; nothing is right
        entry(3, [], 0),  # no drafts
    ]
    round = Round(7, 0.0, entries, [], RoundSize(3, 3, 3), Traffic())
    paths = {1: [1, 4], 2: [], 3: []}
    verdicts = [Verdict(seq, 5, 1, 99, np.array(path, dtype=np.int32)) for seq, path in paths.items()]
    found = trace_round(
        round, VerifyResult(7, verdicts, rows=10), [], source_names=("suffix",), draft_s=0.1, verify_s=0.2
    )
    assert found.depths == ((3, 2), (2, 0))
    assert found.rejected == (10, 12, 13, 10, 11)
    assert found.proposed == {"suffix": 8}


# --- what is compared


def test_every_answer_of_every_turn_is_that_of_decoding_without_drafts(compared, directory):
    _, saved = compared
    plain = LocalEngine(str(directory), draft_model="none", drafters=("none",), batch_size=1)
    wanted = {}
    for question in QUESTIONS:
        texts, messages = [], []
        for turn in question["turns"]:
            messages.append({"role": "user", "content": turn})
            text = plain.generate([messages], max_new_tokens=24)[0].text.strip()
            messages.append({"role": "assistant", "content": text})
            texts.append(text)
        wanted[str(question["question_id"])] = texts
    for method in saved["methods"]:
        found = {}
        for block in saved["blocks"]:
            if block["method"] == method["name"]:
                found.setdefault(block["prompts"][0].partition(",")[0], []).append(block["answers"][0]["text"].strip())
        assert found == wanted
    same = [method["equality"] for method in saved["methods"]]
    assert same == [None, {"num_compared": 6, "differences": []}, {"num_compared": 6, "differences": []}]


def test_the_figures_are_those_of_the_answers(compared):
    _, saved = compared
    assert [method["name"] for method in saved["methods"]] == ["none", "prompt_lookup", "suffix,soft_ngram"]
    for method in saved["methods"]:
        answers = [
            answer for block in saved["blocks"] if block["method"] == method["name"] for answer in block["answers"]
        ]
        num_tokens = sum(len(answer["token_ids"]) for answer in answers)
        rounds, drafts = (sum(answer[key] for answer in answers) for key in ("rounds", "draft_tokens"))
        assert method["overall"]["num_prompts"] == len(answers) == 6
        assert method["overall"]["tokens_per_round"] == pytest.approx(num_tokens / rounds)
        assert method["rows_per_token"] == pytest.approx((rounds + drafts) / num_tokens)
        assert method["target_rows"] == sum(answer["target_rows"] for answer in answers) > rounds + drafts
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
    assert "3 prompts with 6 turns, greedy, 24 new tokens a turn at most" in lines[2]
    rows = [line.split() for line in lines]
    tail = ["tokens", "per", "round", "rows", "per", "token", "identical"]
    speed = rows.index(["drafters", "tokens/s", "x", "median", "x", "seconds", *tail])
    assert [row[0] for row in rows[speed + 1 : speed + 4]] == ["none", "prompt_lookup", "suffix,soft_ngram"]
    assert [row[-1] for row in rows[speed + 1 : speed + 4]] == ["reference", "6/6", "6/6"]
    assert ["method", "translation", "mt_bench", "all"] in rows
    first = saved["methods"][1]["acceptance"]["by_position"][0]
    assert f"{first['share']:.0%} of {first['rounds']}" in out
    source = saved["methods"][1]["acceptance"]["by_source"]["prompt_lookup"]
    numbers = [str(source[key]) for key in ("proposed", "verified", "accepted")]
    assert ["prompt_lookup", "prompt_lookup", *numbers, f"{source['share']:.0%}"] in rows


def test_methods_take_turns_and_a_turn_is_asked_after_the_conversation_before_it(compared):
    _, saved = compared
    order = [(block["method"], block["prompts"][0]) for block in saved["blocks"]]
    none, lookup, mixed = "none", "prompt_lookup", "suffix,soft_ngram"
    later = ["101", "101, turn 2", "101, turn 3"]
    assert order[:3] == [(method, "201") for method in (none, lookup, mixed)]
    assert order[3:12] == [(method, name) for method in (lookup, mixed, none) for name in later]
    prompt = BenchPrompt("1", "t", ({"role": "user", "content": "a"},), later_turns=("b", "c"), prediction="x")
    after = next_turn(prompt, " said\n")
    assert [message["content"] for message in after.messages] == ["a", "said", "b"]
    assert [message["role"] for message in after.messages] == ["user", "assistant", "user"]
    assert (after.later_turns, after.prediction) == (("c",), "")


def test_sampled_answers_in_batches_are_those_of_plain_decoding_with_the_same_seeds(directory):
    prompts = tuple(
        BenchPrompt(str(index), task, ({"role": "user", "content": text},), prediction="ab ab")
        for index, (task, text) in enumerate([("a", "ab ab ab"), ("a", "cd cd"), ("a", "ef"), ("b", "gh gh")])
    )
    plan = ComparePlan(
        prompts,
        (("suffix", "prediction"),),
        model=str(directory),
        draft_model="none",
        max_new_tokens=16,
        temperature=0.8,
        seed=5,
        batch_size=2,
        exact="bitwise",
    )
    report = run_compare(plan)
    plain = LocalEngine(str(directory), draft_model="none", drafters=("none",), batch_size=4, exact="bitwise")
    wanted = plain.generate([list(prompt.messages) for prompt in prompts], max_new_tokens=16, temperature=0.8, seed=5)
    for method in ("none", "suffix,prediction"):
        found = {
            name: list(answer.token_ids)
            for block in report.blocks
            if block.method == method
            for name, answer in zip(block.prompts, block.answers, strict=True)
        }
        assert found == {str(index): one.token_ids for index, one in enumerate(wanted)}
    assert report.methods[1].acceptance.by_source["prediction"].proposed > 0


def test_answers_that_differ_are_told_with_the_index_where_they_part(directory):
    plan = ComparePlan((BenchPrompt("7", "t", token_ids=(65, 66)),), (("suffix",),), str(directory), "none")
    report = run_compare(plan)
    parted = Equality(1, (Difference("7", 3, 41, None, None),))
    out = io.StringIO()
    print_report(replace(report, methods=[report.methods[0], replace(report.methods[1], equality=parted)]), out)
    assert out.getvalue().endswith("suffix: 1 answers differ\n  prompt 7, token 3: 41 became end\n")


def test_a_head_a_chain_and_quantized_weights_are_compared_on_the_same_terms(directory, tmp_path):
    config = load_config(ModelSource("tiny", "tiny", directory))
    head = tmp_path / "head"
    head.mkdir()
    save_eagle_head(head, config, tiny_eagle_tensors(config, "eagle"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "one two one two"}\n{"question": "abc abc"}\n')
    saved = tmp_path / "out.json"
    options = ["--prompts", rows, "--model", directory, "--draft-model", directory, "--eagle-head", head]
    options += ["--drafter", "eagle", "--drafter", "draft_model", "--branch", 1, "--quantization", "int8"]
    options += ["--max-new-tokens", 12, "--json", saved]
    result = CliRunner().invoke(app, ["compare", *map(str, options)], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"draft model {directory} with branch 1, EAGLE head {head}, float32, quantization int8" in result.stdout
    report = json.loads(saved.read_text())
    assert [method["drafters"] for method in report["methods"]] == [[], ["eagle"], ["draft_model"]]
    plain = LocalEngine(str(directory), draft_model="none", drafters=("none",), quantization="int8")
    texts = [[{"role": "user", "content": text}] for text in ("one two one two", "abc abc")]
    wanted = [one.token_ids for one in plain.generate(texts, max_new_tokens=12)]
    for method in ("none", "eagle", "draft_model"):
        blocks = [block for block in report["blocks"] if block["method"] == method]
        assert [answer["token_ids"] for block in blocks for answer in block["answers"]] == wanted


def test_turns_that_the_model_may_have_no_room_for_are_refused_before_anything_is_computed(directory, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "fits"}\n{"turns": ["abc", "def", "ghi"], "id": "long"}\n')
    options = ["--prompts", rows, "--model", directory, "--draft-model", "none", "--max-new-tokens", 340]
    result = CliRunner().invoke(app, ["compare", *map(str, options)])
    assert "prompt long is '" in str(result.exception)
    assert "with 1020 new ones the model has room for 1024" in str(result.exception)


def test_every_gamma_has_a_row_of_its_own_and_drafters_without_a_draft_model_have_one(directory, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one two one two"}\n')
    saved = tmp_path / "out.json"
    options = ["--prompts", rows, "--model", directory, "--draft-model", directory, "--gamma", "1,3,1"]
    options += ["--drafter", "suffix", "--drafter", "suffix,draft_model", "--max-new-tokens", 12, "--json", saved]
    result = CliRunner().invoke(app, ["compare", *map(str, options)], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "gamma 1,3, batch 1" in result.stdout
    report = json.loads(saved.read_text())
    assert [(method["name"], method["gamma"]) for method in report["methods"]] == [
        ("none", None),
        ("suffix", None),
        ("suffix,draft_model gamma 1", 1),
        ("suffix,draft_model gamma 3", 3),
    ]
    assert all(method["equality"]["differences"] == [] for method in report["methods"][1:])
    assert report["config"]["gammas"] == [1, 3]

"""`paceline bench cache` from end to end on a tiny model, over servers of its own."""

import json

import numpy as np
import pytest

from actors.errors import InvalidRequest
from cluster.cli.bench.cache import CacheReport, run_cache
from cluster.cli.bench.cache_filling import stale_answer
from cluster.cli.bench.cache_prompts import make_scenarios
from cluster.cli.bench.options import CacheOptions
from cluster.cli.bench.prompts import BenchPrompt, user_says
from paceline_testing.tiny_models import save_tiny_model

pytestmark = pytest.mark.whole
KINDS = ["repeated", "templated", "edits", "unrelated", "other-topic", "stale", "random"]
SETS = (("cache",), ("soft_ngram",))
CHEAP = ((1, 0.03), (64, 0.031))  # drafts always pay


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_positions=2048)


@pytest.fixture(scope="module")
def report(directory):
    rows = tuple(BenchPrompt(str(row), f"task {row % 2}", user_says(f"word {row}")) for row in range(8))
    asked = {"rows": 2, "rows_per_task": 1, "rows_before": 2, "max_new_tokens": 12}
    options = CacheOptions(
        model=str(directory), drafters=["cache", "soft_ngram"], replica=True, row_times="1:30,64:31", **asked
    )
    report = CacheReport()
    run_cache(rows, options, report)
    return report


def text(prompt):
    return prompt.messages[0]["content"]


def test_prompts_differ_from_those_before_as_much_as_their_kind_says():
    for count in (1, 4, 50):
        repeated, templated, edits, *_ = make_scenarios((), count)
        assert [text(row) for row in repeated.before] == [text(row) for row in repeated.asked]
        assert len({text(row) for row in repeated.asked}) == len(repeated.asked) == count
        assert len(templated.before) == 3 * count
        assert not {text(row) for row in templated.before} & {text(row) for row in templated.asked}
        for before, asked in zip(edits.before, edits.asked, strict=True):
            (program,), (same,) = (
                [part for part in text(row).split("```") if "class" in part] for row in (before, asked)
            )
            assert program == same
            assert text(before) != text(asked)
            compile(program.removeprefix("python\n"), "program", "exec")
    names = [row.name for row in (*repeated.before, *repeated.asked, *templated.before, *templated.asked)]
    assert len(set(names)) == len(names)


def test_kinds_of_requests_are_chosen_by_name_and_unrelated_ones_need_a_prompts_file():
    assert [one.name for one in make_scenarios((), 4)] == [kind for kind in KINDS if kind != "unrelated"]
    assert [one.name for one in make_scenarios(("random", "stale"), 4)] == ["stale", "random"]
    for kind, limit in (("rnadom", "one of repeated, templated"), ("unrelated", "needs a file of prompts")):
        with pytest.raises(InvalidRequest, match=limit):
            make_scenarios((kind,), 4)


def test_a_stale_answer_has_another_token_in_every_fourth_place():
    answer = np.arange(30) % 7
    stale = stale_answer(answer.tolist(), 7, np.random.default_rng(1))
    assert np.flatnonzero(stale != answer).tolist() == list(range(3, 30, 4))
    assert (stale.dtype, stale.min() >= 0, stale.max() < 7) == (np.int32, True, True)
    assert stale_answer([1, 2, 3], 7, np.random.default_rng(1)).tolist() == [1, 2, 3]


def test_nothing_that_is_asked_has_been_asked_before_but_for_repeated_requests():
    rows = tuple(BenchPrompt(str(row), "task", user_says(f"word {row}")) for row in range(8))
    for one in make_scenarios((), 4, rows[:2], rows[2:])[1:]:
        assert not {text(row) for row in one.before} & {text(row) for row in one.asked}


def test_answers_are_the_same_whatever_the_cache_holds(report):
    assert [(one.drafters, one.name) for one in report.scenarios] == [(names, kind) for names in SETS for kind in KINDS]
    for one in report.scenarios:
        cold, *others = one.comparison.methods
        for other in others:
            assert (other.overall.num_prompts, other.differences) == (2, ())
            assert cold.overall.num_tokens == other.overall.num_tokens
        assert one.is_settled
    assert [one.num_before for one in report.scenarios] == 2 * [2, 6, 2, 4, 2, 0, 0]


def test_what_was_answered_before_takes_fewer_rounds_with_either_source(report):
    for one in report.scenarios:
        (source,) = one.drafters
        if one.name == "repeated":
            cold, warm = (method.overall for method in one.comparison.methods[:2])
            assert warm.tokens_per_round > cold.tokens_per_round
            assert warm.ratio > 1.0
            assert warm.accepted_tokens[source] > cold.accepted_tokens.get(source, 0)


def test_a_fresh_replica_begins_about_where_one_is_that_has_answered_before(report):
    for one in report.scenarios:
        names = [method.name for method in one.comparison.methods]
        if not one.num_before or one.drafters != SETS[0]:
            assert names == ["cold", "warm"]
            continue
        assert names == ["cold", "warm", "replica"]
        if one.name == "repeated":
            cold, warm, replica = (method.overall.tokens_per_round for method in one.comparison.methods)
            assert replica > cold
            assert warm >= 0.9 * replica


def test_figures_go_by_the_times_that_were_given(report):
    assert report.row_seconds == list(CHEAP)
    for one in report.scenarios:
        rounds = sum(
            answer.rounds for block in one.comparison.blocks if block.method == "cold" for answer in block.answers
        )
        cold = one.comparison.methods[0].overall
        assert 0.03 * rounds < cold.seconds < 0.045 * (rounds + cold.num_prompts)


def test_the_command_prints_plain_text_in_a_pipe_and_saves_everything(run, directory, tmp_path):
    saved = tmp_path / "out.json"
    options = ["--model", directory, "--rows", 1, "--max-new-tokens", 4, "--drafters", "cache"]
    status, out, _ = run("bench", "cache", *options, "--json", saved)
    assert status == 0
    assert "\x1b" not in out
    rows = [line.split() for line in out.splitlines()]
    kinds = [kind for kind in KINDS if kind != "unrelated"]
    for name in kinds:
        assert [row[-1] for row in rows if row and row[0] == name] == ["1/1"]
    assert [row[3] for row in rows if row[:1] == ["worth"]] == ["cache"]
    report = json.loads(saved.read_text())
    assert [one["name"] for one in report["scenarios"]] == kinds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--row-times", "1:36,8"], "--row-times is '1:36,8'; write rows:milliseconds"),
        (["--row-times", "0:36"], "--row-times is '0:36'"),
        (["--json", "/nowhere/out.json"], "--json is '/nowhere/out.json'; it cannot be written: No such file"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(refuse, options, message):
    assert message in refuse("bench", "cache", *options)

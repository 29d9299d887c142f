"""Tokens per round against traffic seen: the arithmetic of the window, and a picture with every drafter in it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from actors.models.toy import save_tiny_model
from cluster.cli.app import app
from cluster.cli.bench.learning_plot import AnswerRounds, draw_learning, learning_curve, window_for

ANSWERS = [AnswerRounds(10, 10), AnswerRounds(30, 10), AnswerRounds(8, 4), AnswerRounds(0, 0)]


def comments_of(svg):
    """matplotlib writes every text of an SVG as a comment beside its glyphs."""
    return [line.strip()[4:-3].strip() for line in svg.read_text().splitlines() if line.strip().startswith("<!--")]


def test_a_window_weighs_every_round_alike_and_stands_at_its_middle():
    curve = learning_curve(ANSWERS, 2)
    assert curve.answers_before == (0.5, 1.5, 2.5)
    assert curve.tokens_per_round == pytest.approx((40 / 20, 38 / 14, 8 / 4))


def test_few_answers_make_one_point_and_none_none():
    curve = learning_curve(ANSWERS[:2], 30)
    assert (curve.answers_before, curve.tokens_per_round) == ((0.5,), (2.0,))
    assert learning_curve([], 3).answers_before == ()
    assert learning_curve(ANSWERS[3:], 1).tokens_per_round == (0.0,)


def test_a_window_holds_equally_many_answers_of_each_task():
    assert [window_for(144, 6), window_for(100, 3), window_for(3, 6), window_for(0, 0)] == [30, 21, 6, 1]


def test_every_drafter_is_named_with_its_last_value(tmp_path):
    file = tmp_path / "learning.svg"
    rising = [AnswerRounds(10 + index, 10) for index in range(20)]
    level = [AnswerRounds(15, 10)] * 20
    draw_learning({"soft_ngram": rising, "suffix": level}, 1, "title", file, cold={"soft_ngram": level})
    said = comments_of(file)
    assert {"title", "suffix 1.50", "soft_ngram 2.75", "every request from an empty start"} <= set(said)


def test_the_axis_of_tokens_ends_with_the_last_answer(tmp_path):
    draw_learning({"suffix": [AnswerRounds(80, 50)] * 143}, 1, "title", tmp_path / "learning.svg")
    thousands = [int(text.replace(",", "")) for text in comments_of(tmp_path / "learning.svg") if "," in text]
    assert max(thousands) == 10_000, "12,000 would be beyond the 11,440 that there are"


@pytest.mark.parametrize("answers", [[], ANSWERS[:1], ANSWERS])
def test_hardly_any_answers_are_drawn_too(tmp_path, answers):
    draw_learning({"suffix": answers}, 2, "title", tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 1000


def test_the_command_draws_the_drafters_of_a_comparison(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "abc abc abc"}\n{"prompt": "one two one two"}\n')
    directory = save_tiny_model(tmp_path / "model")
    options = ["--prompts", rows, "--model", directory, "--draft-model", "none", "--max-new-tokens", 8]
    options += ["--drafter", "soft_ngram", "--drafter", "suffix", "--learning-plot", tmp_path / "learning.svg"]
    assert CliRunner().invoke(app, ["compare", *map(str, options)], catch_exceptions=False).exit_code == 0
    said = comments_of(tmp_path / "learning.svg")
    assert [name.split()[0] for name in said if name.startswith(("soft_ngram", "suffix"))] == ["soft_ngram", "suffix"]
    refused = CliRunner().invoke(app, ["compare", *map(str, options[:-1]), str(tmp_path / "learning.pdf")])
    assert str(refused.exception).startswith("--learning-plot is ")

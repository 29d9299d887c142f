"""A draft model trained in several runs is the one of a single run, and says how much it will save.

Covers `cluster.cli.drafter` and `actors.training.training_loop`, too.
"""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from actors.models.loader import load_draft_model
from actors.models.source import ModelSource
from actors.training import training_checkpoint
from actors.training.drafter_build import CARD_FILE, BuildRun, build_drafter
from actors.training.drafter_trainer import tokens_per_round
from actors.training.recipes import DrafterRecipe
from actors.training.training_checkpoint import TrainingCheckpoint
from cluster.cli.app import app
from cluster.offline.engine import LocalEngine
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [f"say {word} twice" for word in ("oak", "elm", "ash", "fir", "yew", "box", "bay", "may", "gum", "nut")]
RECIPE = DrafterRecipe(
    layers=1, vocab_size=120, text_tokens=400, answer_tokens=24, write_rows=8, epochs=3, batch_tokens=200, seed=1
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ModelSource:
    return ModelSource("target", "target", save_tiny_model(tmp_path_factory.mktemp("target"), seed=2, layers=2))


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """Directory and card of an uninterrupted build."""
    out = tmp_path_factory.mktemp("whole") / "d"
    return out, build_drafter(source, out, RECIPE, prompts=PROMPTS, device="cpu")


def files_of(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != CARD_FILE}


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("at", [1, 5])
def test_it_goes_on_where_it_was_interrupted_and_ends_the_same(source, whole, tmp_path, monkeypatch, at):
    monkeypatch.setattr(training_checkpoint, "_STEPS", 3)
    out = tmp_path / "d"

    def interrupt(stage, done, total):
        if stage == "distilling" and done == at:
            raise Interrupted

    with pytest.raises(Interrupted):
        build_drafter(
            source, out, RECIPE, prompts=PROMPTS, device="cpu", progress=interrupt, run=BuildRun(resumable=True)
        )
    assert not out.exists()
    seen = []
    card = build_drafter(
        source,
        out,
        RECIPE,
        prompts=PROMPTS,
        device="cpu",
        progress=lambda *one: seen.append(one[:2]),
        run=BuildRun(resumable=True),
    )
    assert "writing text" not in {stage for stage, _ in seen}
    assert next(done for stage, done in seen if stage == "distilling") == at // 3 * 3
    other, wanted = whole
    assert dataclasses.replace(card, seconds=wanted.seconds) == wanted
    assert files_of(out) == files_of(other)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".d.lock", "d"]


def test_a_checkpoint_of_another_training_or_a_torn_one_is_not_gone_on_from(source, whole, tmp_path):
    out = tmp_path / "d"
    stale = TrainingCheckpoint(out, "another")
    stale.write("text", {"answers": []})
    (tmp_path / ".d.training" / "step.pt").write_bytes(b"torn")
    assert stale.read("text") == {"answers": []}
    build_drafter(source, out, RECIPE, prompts=PROMPTS, device="cpu", run=BuildRun(resumable=True))
    assert files_of(out) == files_of(whole[0])


@pytest.mark.parametrize(
    ("hits", "length", "expected"),
    [
        ([[1, 1, 0, 1, 1, 1, 1, 1, 0]], 4, 9 / 3),  # 2 + 1, 4 + 1, 0 + 1
        ([[1] * 10], 4, 10 / 2),
        ([[1] * 10], 1, 10 / 5),
        ([[0, 0, 0], [0]], 4, 1.0),
        ([[0, 1, 1], [1, 1]], 4, 5 / 3),  # what an answer has no more is not emitted
        ([], 4, 1.0),
    ],
)
def test_tokens_a_round_are_those_of_a_chain_that_follows_the_answers(hits, length, expected):
    assert tokens_per_round([[bool(hit) for hit in answer] for answer in hits], length) == expected


def test_the_command_does_some_steps_at_a_time_and_says_what_is_left(source, tmp_path):
    questions = tmp_path / "prompts.jsonl"
    questions.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    out = tmp_path / "d"
    options = ["--kind", "model", "--target", source.path, "--out", out, "--prompts", questions, "--layers", 1]
    options += ["--tokens", 600, "--epochs", 2, "--vocab", 100, "--learning-rate", 0.001, "--seed", 3]
    arguments = ["drafter", "train", *map(str, options), "--device", "cpu", "--threads", "1"]
    first = CliRunner().invoke(app, [*arguments, "--steps", "1"], catch_exceptions=False)
    assert (first.exit_code, first.stdout, out.exists()) == (0, "", False)
    assert first.stderr.startswith("1 of ")
    assert first.stderr.endswith(" steps are done; the same command goes on from there\n")
    last = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert (last.exit_code, last.stdout) == (0, f"{out}\n")
    assert last.stderr.startswith("held-out acceptance ")
    assert "tokens a round in chains of 4" in last.stderr
    card = json.loads((out / CARD_FILE).read_text())
    assert card["recipe"] == dataclasses.asdict(DrafterRecipe(1, 100, 600, epochs=2, learning_rate=0.001, seed=3))
    assert 1.0 <= card["tokens_per_round"] <= 5.0
    assert len(load_draft_model(ModelSource("d", "d", out)).token_ids) == 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kind", "model", "--unroll", "3"], "--unroll is 3; it belongs to --kind eagle3"),
        (["--layers", "3"], "--layers is 3; it belongs to --kind model and parallel"),
        (["--kind", "model", "--parallel", "3"], "--parallel is 3; it belongs to --kind parallel"),
    ],
)
def test_an_option_of_the_other_kind_is_refused_before_a_model_is_looked_for(options, said):
    result = CliRunner().invoke(app, ["drafter", "train", "--target", "/no/such/model", *options])
    assert str(result.exception) == said


def test_a_parallel_model_that_the_command_has_trained_drafts_for_its_target(source, tmp_path):
    out, prompts = tmp_path / "d", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    # All layers: the first guess is then the target's own, but for the readout's ridge and its vocabulary.
    command = [
        "drafter",
        "build",
        "--kind",
        "parallel",
        "--target",
        str(source.path),
        "--out",
        str(out),
        "--layers",
        "2",
    ]
    command += ["--parallel", "3", "--prompts", str(prompts), "--tokens", "400", "--epochs", "1", "--threads", "1"]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert "tokens a round in chains of 3 (by depth: " in result.stderr
    card = json.loads((out / CARD_FILE).read_text())
    assert (card["chain_length"], len(card["agreement_by_depth"]), card["recipe"]["parallel"]) == (3, 3, 3)
    assert card["agreement"] == card["agreement_by_depth"][0] > 0.3
    local = LocalEngine(str(source.path), draft_model=str(out), drafters=("draft_model",), device="cpu", gamma=3)
    drafted = local.generate(PROMPTS[:3], max_new_tokens=24)
    plain = LocalEngine(str(source.path), drafters=("none",), draft_model="none", device="cpu")
    assert [one.token_ids for one in drafted] == [
        one.token_ids for one in plain.generate(PROMPTS[:3], max_new_tokens=24)
    ]
    assert sum(one.accepted_tokens.get("draft_model", 0) for one in drafted) > 0

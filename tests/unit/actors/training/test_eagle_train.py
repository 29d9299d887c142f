"""A head trained on its target's own text: it learns, goes on after an interruption, and loads like a published one."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from actors.eagle.head_loading import load_eagle_head
from actors.errors import ModelError
from actors.models.loader import load_config, load_model
from actors.models.source import ModelSource
from actors.training import eagle_train, training_checkpoint
from actors.training.eagle_train import train_head, unrolled_mask
from actors.training.recipes import HeadRecipe
from actors.training.training_checkpoint import TrainingPaused
from cluster.cli.app import app
from cluster.offline.engine import LocalEngine
from paceline_testing.tiny_models import (
    make_byte_tokenizer,
    make_tiny_model,
    save_eagle_head,
    save_tiny_model,
    tiny_eagle_tensors,
)

pytestmark = pytest.mark.whole
PROMPTS = [f"say {word} twice" for word in ("oak", "elm", "ash", "fir", "yew", "box", "bay", "may", "gum", "nut")]
RECIPE = HeadRecipe(
    vocab_size=200,
    text_tokens=900,
    answer_tokens=24,
    write_rows=8,
    epochs=8,
    unroll=3,
    batch_tokens=400,
    learning_rate=5e-3,
    seed=1,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ModelSource:
    """A target that looks at its last token only: what it says can be learnt in seconds."""
    path = tmp_path_factory.mktemp("target")
    model = make_tiny_model("llama", 2, 259, 4, 32, max_positions=256)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return ModelSource(str(path), "target", path)


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("heads") / "head"
    stages = []
    return out, train_head(source, out, RECIPE, PROMPTS, "cpu", lambda *done: stages.append(done)), stages


def test_a_row_of_a_later_step_sees_text_and_the_steps_that_led_to_it():
    assert (unrolled_mask(4, 0)[0, 0] == 0).tolist() == torch.ones(4, 4).tril().bool().tolist()
    second = (unrolled_mask(4, 2)[0, 0] == 0).reshape(4, 3, 4)
    assert second[3].tolist() == [[True, True, False, False], [False, False, True, False], [False, False, False, True]]
    assert second[0].sum() == second[1].sum() == 1  # these have nothing to go on from and do not count
    assert second[0, 2, 0]
    assert second[1, 2, 1]


def test_an_unrolled_step_is_what_drafting_computes(source, tmp_path, monkeypatch):
    """Step i of row t against a chain drafted with full recomputation behind position t - i."""
    monkeypatch.setattr(eagle_train, "fast_dtype", lambda device: "float32")
    target = make_tiny_model("llama", 3, 61, 4, 32)
    save_eagle_head(tmp_path, target.config, tiny_eagle_tensors(target.config, "eagle3", draft_vocab_size=23))
    head = load_eagle_head(tmp_path, target.config)
    head.config._attn_implementation = "sdpa"
    trainer = eagle_train._Trainer(target, head.draft_ids, RECIPE, "cpu")
    trainer.head = head
    ids = torch.arange(30, 50)
    text = eagle_train._Text(ids, 5)
    with torch.no_grad():
        guesses, _, _, counts = trainer._unroll([text])
        states = target(ids[None], output_hidden_states=True).hidden_states
        features = head.fc(torch.cat([states[layer] for layer in head.feature_layers], dim=-1))
        embedded = target.get_input_embeddings()(ids[None])
        for row in (7, 15):
            inputs = features[:, : row - 1]  # text up to t - 2, then two rows of its own
            for _ in range(2):
                count = inputs.shape[1]
                hidden = head(embedded[:, 1 : count + 1], inputs, torch.arange(count)[None])
                inputs = torch.cat([inputs, hidden[:, -1:]], dim=1)
            count = inputs.shape[1]
            hidden = head(embedded[:, 1 : count + 1], inputs, torch.arange(count)[None])
            wanted = head.logits(hidden[:, -1], target.get_output_embeddings())
            assert count == row + 1
            torch.testing.assert_close(guesses[2][:, row], wanted, rtol=1e-3, atol=1e-3)
    assert counts[0].tolist() == [False] * 3 + [True] * 16


def test_it_learns_and_says_how_well_it_guesses(trained):
    out, card, stages = trained
    assert card == eagle_train.HeadCard(**json.loads((out / "eagle.json").read_text()))
    assert card.text_tokens >= 900
    assert len(card.acceptance) == 3
    assert 0.0 < card.coverage <= 1.0
    assert min(card.acceptance) > 0.3  # chance: one in 200
    assert card.tokens_per_round > 1.3
    assert {stage for stage, _, _ in stages} == {"writing text", "training the head"}
    assert not out.with_name(".head.training").exists()


def test_training_lowers_the_loss(source):
    torch.manual_seed(0)
    target = load_model(source)
    trainer = eagle_train._Trainer(target, torch.arange(259), RECIPE, "cpu")
    texts = [eagle_train._Text(torch.randint(0, 250, (30,)), 4) for _ in range(4)]
    optimizer = torch.optim.AdamW(trainer.head.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        losses.append(trainer.loss(texts))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_it_goes_on_where_it_was_interrupted_and_ends_the_same(source, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(training_checkpoint, "_STEPS", 3)
    out = tmp_path / "head"
    written = []

    def stop(stage: str, done: int, total: int) -> None:
        written.append(stage == "writing text")
        if stage == "training the head" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_head(source, out, RECIPE, PROMPTS, "cpu", stop)
    assert any(written)
    assert not out.exists()
    steps = []
    card = train_head(source, out, RECIPE, PROMPTS, "cpu", lambda stage, done, total: steps.append((stage, done)))
    assert steps[0] == ("training the head", 3)
    other, whole, _ = trained
    assert (card.steps, card.acceptance) == (whole.steps, whole.acceptance)
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_the_head_loads_and_drafts_for_its_target(source, trained, drafts_pay):
    out, _, _ = trained
    assert load_eagle_head(out, load_config(source)).kind == "eagle3"
    local = LocalEngine(
        str(source.path), draft_model="none", drafters=("eagle",), eagle_head=out, device="cpu", kv_cache_tokens=1024
    )
    plain = local.generate(PROMPTS, max_new_tokens=24, drafters=())
    drafted = local.generate(PROMPTS, max_new_tokens=24)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert local.core.counters.accepted_tokens["eagle"] > 20


def test_the_command_trains_a_head_and_says_where_it_is(source, tmp_path):
    questions = tmp_path / "prompts.jsonl"
    questions.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    options = ["--out", tmp_path / "head", "--tokens", 200, "--epochs", 1, "--unroll", 2, "--prompts", questions]
    arguments = ["drafter", "train", "--target", source.path, "--device", "cpu", "--threads", 1, *options]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "head")
    assert re.search(
        r"held-out acceptance by depth, .*: 1: [\d.]+%, 2: [\d.]+%.*; [\d.]+ tokens a round", result.stderr
    )
    assert load_eagle_head(tmp_path / "head", load_config(source)).kind == "eagle3"


def test_a_training_in_runs_of_some_steps_ends_as_one_in_a_single_run(source, trained, tmp_path):
    other, whole, _ = trained
    out, done = tmp_path / "head", []
    while not out.exists():
        try:
            train_head(source, out, RECIPE, PROMPTS, "cpu", steps=whole.steps // 3 + 1)
        except TrainingPaused as pause:
            done.append((pause.step, pause.total))
    assert done == [((whole.steps // 3 + 1) * run, whole.steps) for run in (1, 2)]
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_what_cannot_be_trained_is_refused(source, tmp_path):
    with pytest.raises(ModelError, match="head unroll is 0; it must be between 1 and 32"):
        train_head(source, tmp_path / "head", HeadRecipe(unroll=0), PROMPTS, "cpu")
    shallow = save_tiny_model(tmp_path / "shallow", layers=2, hidden_size=16)
    with pytest.raises(ModelError, match="has 2 layers; EAGLE-3 reads the inputs of three"):
        train_head(ModelSource("s", "s", shallow), tmp_path / "head", RECIPE, PROMPTS, "cpu")

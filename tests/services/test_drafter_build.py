"""Draft models are built whole, the same twice, and agree with their target as often as their card says."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from actors.errors import ModelError
from actors.models.catalog import resolve_model
from actors.models.loader import load_draft_model, load_model, load_tokenizer, read_model_info
from actors.models.source import ModelSource
from actors.training.drafter_build import CARD_FILE, BuildRun, DrafterExists, build_drafter, default_drafter_dir
from actors.training.recipes import DrafterRecipe
from actors.training.target_text import encode_prompts, write_answers
from actors.training.target_writer import TargetWriter, batches_by_length
from cluster.cli import drafter as command
from cluster.cli.main import main
from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from cluster.serve import plan_cluster
from paceline_testing.tiny_models import TINY_KINDS, save_tiny_model

PROMPTS = [f"Say {word} twice" for word in ("oak", "elm", "ash", "fir", "yew", "box", "bay", "may", "gum", "nut")]
QUICK = DrafterRecipe(layers=1, vocab_size=120, text_tokens=600, answer_tokens=24, write_rows=16, epochs=1)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    return {
        kind: ModelSource(kind, kind, save_tiny_model(root / kind, kind, seed=2, layers=2, sliding_window=32))
        for kind in TINY_KINDS
    }


@pytest.fixture(scope="module")
def built(targets, tmp_path_factory):
    """A drafter of "llama" with the recipe QUICK, and the progress of its build. Tests do not change it."""
    out, seen = tmp_path_factory.mktemp("built") / "drafters" / "d", []
    build_drafter(targets["llama"], out, QUICK, prompts=PROMPTS, progress=lambda *step: seen.append(step))
    return out, seen


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_drafter_with_all_layers_agrees_wherever_its_vocabulary_reaches(targets, tmp_path, kind):
    recipe = dataclasses.replace(QUICK, layers=2, epochs=0)
    card = build_drafter(targets[kind], tmp_path / "d", recipe, prompts=PROMPTS)
    # The lens of a complete copy is the identity but for the ridge and, on some machines, bfloat16 answers.
    assert card.coverage > 0.5
    assert card.agreement == pytest.approx(card.coverage, abs=0.1)


def test_the_same_seed_gives_the_same_drafter_and_another_seed_another(targets, built, tmp_path):
    first, _ = built
    for name, seed in (("same", 0), ("other", 1)):
        build_drafter(targets["llama"], tmp_path / name, dataclasses.replace(QUICK, seed=seed), prompts=PROMPTS)
    for file in ("model.safetensors", "vocab_map.safetensors"):
        assert (first / file).read_bytes() == (tmp_path / "same" / file).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (tmp_path / "other" / "model.safetensors").read_bytes()


def test_a_drafter_is_a_normal_model_directory_whose_map_names_its_trained_rows(targets, tmp_path):
    card = build_drafter(targets["qwen3"], tmp_path / "d", QUICK, prompts=PROMPTS)
    source = ModelSource("d", "d", tmp_path / "d")
    reduced = load_draft_model(source)
    whole = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(reduced.model(ids).logits, whole(ids).logits[..., reduced.token_ids])
    assert whole.config.num_hidden_layers == 1
    assert len(reduced.token_ids) == 120
    assert load_tokenizer(source)("abc")["input_ids"] == load_tokenizer(targets["qwen3"])("abc")["input_ids"]
    assert json.loads((source.path / CARD_FILE).read_text()) == dataclasses.asdict(card)
    assert card.target_fingerprint == targets["qwen3"].weights_fingerprint()


def test_distillation_makes_a_drafter_agree_more_often(targets, tmp_path):
    longer = {"text_tokens": 2000, "answer_tokens": 48, "write_rows": 64, "epochs": 5}
    recipe = dataclasses.replace(QUICK, vocab_size=200, **longer)
    card = build_drafter(targets["llama"], tmp_path / "d", recipe, prompts=PROMPTS)
    assert card.agreement > card.agreement_before + 0.02


def test_the_card_tells_the_agreement_that_a_second_look_finds(targets, tmp_path):
    asked = [f"Question number {index}, on {index * index} things?" for index in range(12)]
    card = build_drafter(targets["qwen3"], tmp_path / "d", QUICK, prompts=PROMPTS, evaluate={"mine": asked})

    target, draft = load_model(targets["qwen3"]), load_draft_model(ModelSource("d", "d", tmp_path / "d"))
    same = count = 0
    for prompt in encode_prompts(load_tokenizer(targets["qwen3"]), asked, 512):
        ids = torch.tensor([prompt])
        said = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0]
        guess = draft.token_ids[draft.model(said[None]).logits[0].argmax(-1)]
        same += int((guess[len(prompt) - 1 : -1] == said[len(prompt) :]).sum())
        count += len(said) - len(prompt)
    # The card's text may be written in bfloat16 and part from this one somewhere.
    assert card.evaluation["mine"] == pytest.approx(same / count, abs=0.12)
    assert 0.05 < card.evaluation["mine"] < 0.95


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_answers_written_in_a_batch_are_those_of_generate(targets, kind):
    target = load_model(targets[kind])
    prompts = [list(range(5)), [7], list(range(60, 80))]
    answers = write_answers(target, prompts, [0.0, 0.0, 0.0], 30, eos_token_ids=(256,), seed=0)
    head = target.get_output_embeddings()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        said = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        assert answer.token_ids.tolist() == said[0].tolist()
        assert answer.argmax.tolist() == said[0, len(prompt) :].tolist()
        logits = target(answer.token_ids[None]).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(head(answer.hidden), logits, atol=1e-3, rtol=1e-3)


def test_sampled_answers_keep_the_greedy_choice_beside_the_token(targets):
    target = load_model(targets["llama"])
    mass = torch.zeros(259)
    (warm,) = write_answers(target, [[1, 2, 3]], [1.0], 50, eos_token_ids=(), seed=0, vocab_mass=mass)
    assert mass.sum().item() == pytest.approx(50, rel=1e-4)
    logits = target(warm.token_ids[None]).logits[0, 2:-1]
    assert warm.argmax.tolist() == logits.argmax(-1).tolist()
    assert warm.argmax.tolist() != warm.token_ids[3:].tolist()


@pytest.fixture
def spared(built):
    """The directory of the drafter that is there. The test must leave it as it is."""
    out, _ = built
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    yield out
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(entry.name for entry in out.parent.iterdir()) == [".d.lock", "d"]


@pytest.mark.parametrize("place", ["new", "taken"])
def test_a_build_that_fails_leaves_no_directory_and_spares_the_last_one(targets, spared, tmp_path, place):
    class Interrupted(Exception):
        pass

    def interrupt(stage, done, total):
        if stage == "distilling" and done:
            raise Interrupted

    out = tmp_path / "drafters" / "d" if place == "new" else spared
    with pytest.raises(Interrupted):
        build_drafter(targets["llama"], out, dataclasses.replace(QUICK, seed=3), prompts=PROMPTS, progress=interrupt)
    assert sorted(entry.name for entry in out.parent.iterdir()) == [".d.lock", "d"][: 1 if place == "new" else 2]


def test_a_drafter_that_is_there_is_left_where_that_is_wanted(targets, spared, capsys, monkeypatch):
    with pytest.raises(DrafterExists):
        build_drafter(targets["llama"], spared, dataclasses.replace(QUICK, seed=3), run=BuildRun(keeps=True))
    monkeypatch.setattr("sys.argv", ["paceline", "drafter", "build", "--keep", "--target", targets["llama"].spec])
    monkeypatch.setattr(command, "default_drafter_dir", lambda home, source: spared)
    monkeypatch.setattr(command, "resolve_model", lambda target, home, progress: targets["llama"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out.strip() == str(spared)


def test_progress_only_goes_forward_and_every_stage_ends(built):
    _, seen = built
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["writing text", "fitting the readout", "distilling"]
    for stage in {stage for stage, _, _ in seen}:
        steps = [(done, total) for name, done, total in seen if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"layers": 0},
        {"layers": 3},
        {"vocab_size": 260},
        {"vocab_size": 0},
        {"text_tokens": 0},
        {"epochs": -1},
        {"masks_from": 1.5},
    ],
)
def test_a_recipe_beyond_its_target_names_the_limit(targets, tmp_path, change):
    (name, value) = next(iter(change.items()))
    with pytest.raises(ModelError, match=f"drafter {name} is {value}; it must be"):
        build_drafter(targets["llama"], tmp_path / "d", dataclasses.replace(QUICK, **change))


def test_a_training_that_diverges_spares_the_last_drafter(targets, spared):
    diverging = dataclasses.replace(QUICK, learning_rate=1e30, epochs=3)
    with pytest.raises(ModelError, match=r"the training of the drafter has diverged; its learning_rate is 1e\+30"):
        build_drafter(targets["llama"], spared, diverging, prompts=PROMPTS)


def test_one_prompt_is_too_few_to_hold_one_out(targets, tmp_path):
    with pytest.raises(ModelError, match="at least 2"):
        build_drafter(targets["llama"], tmp_path / "d", QUICK, prompts=["same", "same"])


def test_hub_ids_make_one_directory_name(targets, tmp_path):
    source = ModelSource("a/b", "a/b", targets["llama"].path)
    name = f"a--b-{source.weights_fingerprint()[:8]}"
    assert default_drafter_dir(tmp_path, source) == tmp_path / "drafters" / name


def test_a_drafter_is_found_for_the_weights_it_was_made_from_and_no_others_of_their_name(tmp_path):
    mine, yours = (
        resolve_model(str(save_tiny_model(tmp_path / owner / "model", seed=seed, layers=1)), tmp_path)
        for seed, owner in enumerate(("mine", "yours"))
    )
    assert mine.name == yours.name
    made = default_drafter_dir(tmp_path, mine)
    save_tiny_model(made, seed=2, layers=1)
    options = {"drafters": ("draft_model",), "device": "cpu", "kv_cache_tokens": 512, "home": tmp_path}
    LocalEngine(str(mine.path), **options)
    with pytest.raises(ModelError, match="needs a draft model"):
        LocalEngine(str(yours.path), **options)
    plans = [plan_cluster(ClusterConfig(target={"model": str(one.path)}), tmp_path) for one in (mine, yours)]
    assert [plan.builds_drafter for plan in plans] == [False, True]
    assert [plan.draft.path == made for plan in plans] == [True, False]
    save_tiny_model(mine.path, seed=3, layers=1)
    with pytest.raises(ModelError, match="needs a draft model"):
        LocalEngine(str(mine.path), **options)


def test_the_command_builds_where_it_is_told_and_prints_only_the_place(targets, tmp_path, capfd):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"Say {word}"}) for word in ("one", "two", "three")))
    place = ["--target", str(targets["llama"].path), "--out", str(tmp_path / "d")]
    amounts = ["--layers", "1", "--vocab", "50", "--tokens", "100", "--epochs", "1", "--threads", "1"]
    texts = ["--prompts", str(prompts), "--evaluate", str(prompts)]
    command.app(["build", *place, *amounts, *texts], standalone_mode=False)
    out, err = capfd.readouterr()
    assert out == f"{tmp_path / 'd'}\n"
    assert "held-out tokens" in err
    assert "tokens for p" in err
    assert len(load_draft_model(ModelSource("d", "d", tmp_path / "d")).token_ids) == 50


def test_the_command_told_no_vocabulary_takes_all_of_a_target_that_has_few_tokens(targets, tmp_path):
    place = ["--target", str(targets["llama"].path), "--out", str(tmp_path / "d")]
    command.app(["build", *place, "--tokens", "100", "--epochs", "0", "--threads", "1"], standalone_mode=False)
    assert load_draft_model(ModelSource("d", "d", tmp_path / "d")).token_ids.tolist() == list(range(259))
    assert json.loads((tmp_path / "d" / CARD_FILE).read_text())["recipe"]["vocab_size"] == 259


@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(1, 8), st.integers(1, 300))
def test_batches_hold_every_prompt_once_beside_others_of_its_length(lengths, workers, at_least):
    batches = batches_by_length([[0] * length for length in lengths], workers, at_least)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    in_order = [lengths[row] for batch in batches for row in batch]
    assert in_order == sorted(lengths, reverse=True)
    assert len(batches) <= max(2 * workers, at_least)
    assert max(map(len, batches)) <= -(-len(lengths) // at_least)


def endless(targets):
    return dataclasses.replace(read_model_info(targets["llama"]), eos_token_ids=(), max_model_len=256)


def test_a_writer_keeps_held_out_answers_apart_and_in_order(targets):
    target, tokenizer = load_model(targets["llama"]), load_tokenizer(targets["llama"])
    writer = TargetWriter(target, tokenizer, endless(targets), DrafterRecipe(answer_tokens=12, write_rows=48, seed=3))
    asked = [f"Held out {'very ' * index}long" for index in (9, 0, 30, 3)]
    writing = writer.write((f"Question {index}" for index in range(10**6)), 700, asked, lambda *progress: None)
    for prompt, answer in zip(encode_prompts(tokenizer, asked, 244), writing.held_out, strict=True):
        ids = torch.tensor([prompt])
        said = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=[],
        )
        assert answer.token_ids.tolist() == said[0].tolist()
    assert 630 <= sum(answer.num_answer_tokens for answer in writing.answers) <= 900
    assert [answer.token_ids.tolist() for answer in writer.answer(asked)] == [
        answer.token_ids.tolist() for answer in writing.held_out
    ]
    sampled = sum(answer.num_answer_tokens for answer in writing.answers[::2])
    written = sum(answer.num_answer_tokens for answer in writing.answers)
    assert writing.vocab_mass.sum().item() == pytest.approx(sampled + written, rel=1e-3)


def test_an_interruption_ends_all_writers_at_once(targets):
    target, tokenizer = load_model(targets["llama"]), load_tokenizer(targets["llama"])
    writer = TargetWriter(target, tokenizer, endless(targets), DrafterRecipe(answer_tokens=128, write_rows=64, seed=3))
    calls = 0

    def interrupt(stage, done, total):
        nonlocal calls
        calls += 1
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        writer.write((f"Question {index}" for index in range(10**6)), 8000, [], interrupt)
    assert calls <= 2 * threads
    assert torch.get_num_threads() == threads

"""The draft model that comes with the package is the demo target's; packing keeps what a parallel one guesses."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.errors import ModelError
from actors.models.loader import load_draft_model, load_tokenizer
from actors.models.source import ModelSource
from actors.training import shipped_drafter
from actors.training.drafter_build import build_drafter, default_drafter_dir, ready_drafter
from actors.training.drafter_card import CARD_FILE
from actors.training.recipes import DrafterRecipe
from actors.training.shipped_drafter import (
    SHIPPED,
    pack_drafter,
    shipped_weights,
    small_tensors,
    unpack_drafter,
    whole_tensors,
)
from cluster.cli import drafter as command
from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from cluster.serve import plan_cluster
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [f"Say {word} twice" for word in ("oak", "elm", "ash", "fir")]
QUICK = DrafterRecipe(layers=1, vocab_size=120, text_tokens=200, answer_tokens=16, write_rows=8, epochs=1, parallel=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> ModelSource:
    path = save_tiny_model(tmp_path_factory.mktemp("target") / "t", seed=2, layers=2)
    return ModelSource("t", "t", path)


@pytest.fixture(scope="module")
def built(target, tmp_path_factory) -> Path:
    """A parallel draft model. Tests do not change it."""
    directory = tmp_path_factory.mktemp("built") / "d"
    build_drafter(target, directory, QUICK, prompts=PROMPTS)
    return directory


def test_what_is_unpacked_guesses_as_what_was_packed(target, built, tmp_path):
    packed = tmp_path / "packed.safetensors"
    pack_drafter(built, packed)
    assert packed.stat().st_size < 0.6 * (built / "model.safetensors").stat().st_size
    unpack_drafter(packed, target, tmp_path / "home" / "d")
    made, unpacked = (ModelSource("d", "d", path) for path in (built, tmp_path / "home" / "d"))
    assert unpacked.read_json(CARD_FILE) == made.read_json(CARD_FILE)
    assert unpacked.read_json("config.json") == made.read_json("config.json")
    assert unpacked.tokenizer_fingerprint() == target.tokenizer_fingerprint()
    ids = torch.tensor([[5, 6, 7, made.read_json("config.json")["pard_token"]]])
    wanted, found = (load_draft_model(source).model(ids).logits for source in (made, unpacked))
    assert float((found - wanted).std()) < 0.1 * float(wanted.std())  # matrices were in int8


def test_one_that_is_there_is_kept_where_that_is_wanted(target, tmp_path):
    (packed := tmp_path / "p").write_bytes(b"nothing that could be read")
    (out := tmp_path / "d").mkdir()
    unpack_drafter(packed, target, out, keeps=True)
    assert not any(out.iterdir())


def test_what_cannot_be_packed_is_refused_by_name(target, built, tmp_path):
    with pytest.raises(ModelError, match="is no parallel draft model"):
        pack_drafter(target.path, tmp_path / "packed")
    with pytest.raises(ModelError, match="nowhere/packed: cannot be written"):
        pack_drafter(built, tmp_path / "nowhere" / "packed")
    other = shutil.copytree(built, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["wte"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has no model\.embed_tokens\.weight"):
        pack_drafter(other, tmp_path / "packed")


def test_what_does_not_divide_into_blocks_stays_whole():
    weights = {"odd": torch.randn(3, 48).bfloat16(), "zero": torch.zeros(2, 32).bfloat16()}
    for name, tensor in whole_tensors(small_tensors(weights)).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)


def test_it_is_there_at_once_for_a_server_an_engine_and_the_command(target, built, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shipped_drafter, "SHIPPED", tmp_path)
    pack_drafter(built, tmp_path / f"{target.weights_fingerprint()}.safetensors")
    config = ClusterConfig(target={"model": str(target.path)}, draft={"build": False})
    plan = plan_cluster(config, tmp_path / "server")
    assert (plan.draft.path, plan.builds_drafter) == (default_drafter_dir(tmp_path / "server", target), False)
    options = {"drafters": ("draft_model",), "device": "cpu", "kv_cache_tokens": 512, "home": tmp_path / "engine"}
    assert LocalEngine(str(target.path), **options).drafter_names == ("draft_model",)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "command"))
    command.app(["build", "--target", str(target.path), "--threads", "1"], standalone_mode=False)
    assert capsys.readouterr().out == f"{default_drafter_dir(tmp_path / 'command', target)}\n"


def test_a_home_that_cannot_be_written_costs_the_draft_model_and_no_start(target, built, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shipped_drafter, "SHIPPED", tmp_path)
    pack_drafter(built, tmp_path / f"{target.weights_fingerprint()}.safetensors")
    (home := tmp_path / "home").touch()
    assert ready_drafter(home, target) is None
    assert "could not be unpacked" in caplog.text
    assert "cannot be written" in caplog.text


def test_other_targets_have_none(target, tmp_path):
    assert shipped_weights(target) is None
    assert ready_drafter(tmp_path, target) is None
    assert not any(tmp_path.iterdir())


# The demo target's own greedy answers
ANSWERS = {
    "Why do leaves change colour in autumn?": "The Autumn leaves change colour in autumn due to the changing of the "
    "seasons. The autumn equinox, which occurs around September 22, is a natural phenomenon that occurs when",
    "Give me two tips for a first marathon.": "1. **1. Don't forget to start your marathon! It's a marathon, not a "
    "marathoner.\n2. **2. Don't forget to start your marathon! It's a",
    "A box holds 12 pens. How many pens do 7 boxes hold?": "To solve this problem, we need to think about the total "
    "number of boxes that can hold 12 pens. Since there are 12 pens in a box, we can think of it as",
    "Write a Python function that reverses a string.": "```python\ndef reverse_string(input_str):\n    return "
    "input_str[::-1]\n```\n\nThis function uses slicing to reverse the input string. The `[::-1]`",
    "Tell me about the city of Lisbon.": "Lisbon, the capital of Portugal, is a city that has been a beacon of "
    "culture, history, and art for centuries. It's a vibrant and cosmopolitan city that's steeped in tradition and",
}


def test_the_demos_own_is_for_its_weights_small_and_right_at_once(smollm2_dir, tmp_path):
    demo = ModelSource("smollm2", "smollm2", smollm2_dir)
    (packed,) = SHIPPED.iterdir()
    assert shipped_weights(demo) == packed
    assert packed.stat().st_size <= 20_000_000
    directory = ready_drafter(tmp_path, demo)
    assert directory == default_drafter_dir(tmp_path, demo)
    source = ModelSource("d", "d", directory)
    card = source.read_json(CARD_FILE)
    assert card["target_fingerprint"] == demo.weights_fingerprint()
    assert set(card["recipe"]) == set(dataclasses.asdict(DrafterRecipe()))
    draft, tokenizer = load_draft_model(source), load_tokenizer(demo)
    right = total = 0
    for prompt, answer in ANSWERS.items():
        messages = [{"role": "user", "content": prompt}]
        before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        after = tokenizer(answer, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            guesses = draft.model(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1].argmax(-1)
        right += int((draft.token_ids[guesses] == torch.tensor(after)).sum())
        total += len(after)
    assert right / total > 0.4

"""One-pass heads change no token, under both rules of acceptance, and what their masks guess is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.offline.engine import LocalEngine
from paceline_testing.plain_dflash import dflash_config, dflash_tensors, save_dflash
from paceline_testing.tiny_models import save_eagle_head, save_tiny_model, tiny_eagle_tensors

PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm")] + [[65]]
MASK, TOLD = 3, 90  # tokens that no prompt has
OPTIONS = {"max_new_tokens": 16, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("drafts_pay")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    """A target that mostly says the same token, a P-EAGLE head that knows no other, and a random DFlash head."""
    path = save_tiny_model(tmp_path_factory.mktemp("target"), "llama", 5, layers=4, hidden_size=48, max_positions=512)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    embeddings = model.get_input_embeddings().weight.data
    embeddings += 5 * embeddings[0].clone()  # what comes before hardly matters
    with torch.no_grad():
        usual = model.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0].mean(0)
        model.lm_head.weight *= 0.2
        model.lm_head.weight[TOLD] = 0.2 * usual
    model.save_pretrained(path)
    tensors = tiny_eagle_tensors(model.config, "eagle3", 9, draft_vocab_size=1)
    tensors["d2t"] = torch.tensor([TOLD])
    tensors["t2d"] = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill_(0, tensors["d2t"], True)
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * 48)
    config = save_eagle_head(path / "p-eagle", model.config, tensors) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"ptd_token_id": MASK}))
    dflash = dflash_config(48, model.config.vocab_size, MASK, [0, 1, 2], num_target_layers=4)
    save_dflash(path / "dflash", dflash, dflash_tensors(48, 3))
    return path


def engine(target_dir: Path, head: str, **options) -> LocalEngine:
    return LocalEngine(
        str(target_dir), draft_model="none", drafters=("eagle",), eagle_head=target_dir / head, batch_size=3,
        kv_cache_tokens=2048, device="cpu", eagle_depth=3, eagle_top_k=2, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head", "acceptance"),
    [
        ("p-eagle", "coupled"),
        ("p-eagle", "rejection"),
        ("dflash", "coupled"),
        pytest.param("dflash", "rejection", marks=pytest.mark.slow),
    ],
)
def test_no_token_changes(target_dir, head, acceptance):
    """Guesses are no draws, so that a token's distribution under rejection is a point, and what replaces it is the
    target's own draw."""
    local = engine(target_dir, head, acceptance=acceptance)
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}):
        plain = local.generate(PROMPTS, drafters=(), **OPTIONS, **sampling)
        drafted = local.generate(PROMPTS, **OPTIONS, **sampling)
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        rounds = sum(one.rounds for one in drafted)
        if head == "p-eagle" and sampling["temperature"] == 0.0:
            assert rounds < 0.5 * sum(one.rounds for one in plain), "more than the first guess is accepted"
    assert local.core.counters.drafted_tokens["eagle"] > 0
    assert not local.core.counters.invalid_trees
    assert local.core._traffic.of([""]).head_depth.level_s == 0.0, "a deeper draft costs no further forward"

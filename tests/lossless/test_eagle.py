"""EAGLE heads only draft: with every kind of head, load and accident the text is the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from actors.errors import InvalidRequest, ModelError
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import (
    make_byte_tokenizer,
    make_tiny_model,
    save_eagle_head,
    save_knowing_target,
    save_tiny_model,
    tiny_eagle_tensors,
)

HEADS: dict[str, tuple[str, dict]] = {
    "eagle1": ("eagle", {}),
    "eagle2": ("eagle", {"has_bias": False}),
    "eagle3": ("eagle3", {}),
    "eagle3-reduced": ("eagle3", {"draft_vocab_size": 130}),
}
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash", "fir", "yew", "box", "bay")]
PROMPTS.append([65])
LONG = [list((f"{number}: " + "the quick brown fox " * 9).encode()) for number in range(3)]
SAMPLING: dict[str, dict] = {"greedy": {}, "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 7}}
BITWISE = {"max_new_tokens": 20, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("drafts_pay")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    """A target of 4 layers with a head of each kind beside it, by the names of HEADS."""
    path = save_tiny_model(
        tmp_path_factory.mktemp("target"), "llama", 5, layers=4, hidden_size=48, heads=4, kv_heads=2, max_positions=512
    )
    config = AutoModelForCausalLM.from_pretrained(path).config
    for name, (kind, options) in HEADS.items():
        save_eagle_head(path / name, config, tiny_eagle_tensors(config, kind, 9, **options))
    return path


@pytest.fixture(scope="module")
def knowing_dir(tmp_path_factory) -> Path:
    """A target that looks at nothing but its last token, with a head that knows its table by heart."""
    path = tmp_path_factory.mktemp("knowing")
    model = make_tiny_model("llama", 4, 259, 2, 48, eos_token_id=256)
    save_knowing_target(path, model)
    make_byte_tokenizer().save_pretrained(path)
    return path


def local_engine(path: Path, head: str, batch_size: int = 8, **options) -> LocalEngine:
    names = ("eagle",) if head != "none" else ("none",)
    eagle_head = path / head if head != "none" else "none"
    options = {"kv_cache_tokens": 4096, "eagle_depth": 3, "eagle_top_k": 4} | options
    return LocalEngine(
        str(path),
        draft_model="none",
        drafters=names,
        eagle_head=eagle_head,
        batch_size=batch_size,
        device="cpu",
        **options,
    )


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


@pytest.fixture(scope="module")
def plain_tokens(target_dir) -> dict[str, list[list[int]]]:
    local = local_engine(target_dir, "none", exact="bitwise")
    return {name: tokens(local.generate(PROMPTS, **BITWISE, **sampling)) for name, sampling in SAMPLING.items()}


@pytest.mark.parametrize(
    ("head", "batch_size"),
    [
        pytest.param(head, batch_size, marks=pytest.mark.slow if batch_size != usual else ())
        for head, usual in zip(HEADS, (8, 1, 1, 8), strict=True)
        for batch_size in (1, 8)
    ],
)
def test_bitwise_no_head_changes_a_token(target_dir, plain_tokens, head, batch_size):
    local = local_engine(target_dir, head, batch_size, exact="bitwise")
    prompts = PROMPTS if batch_size > 1 else PROMPTS[:3]
    for name, sampling in SAMPLING.items():
        drafted = local.generate(prompts, **BITWISE, **sampling)
        assert tokens(drafted) == plain_tokens[name][: len(prompts)]
    assert local.core.counters.drafted_tokens["eagle"] > 0


FEW, MANY = ({"max_new_tokens": count, "ignore_eos": True} for count in (16, 40))


@pytest.fixture(scope="module")
def plain_few(target_dir) -> list[list[int]]:
    return tokens(local_engine(target_dir, "none").generate(LONG, **FEW))


@pytest.fixture(scope="module")
def plain_many(target_dir) -> list[list[int]]:
    return tokens(local_engine(target_dir, "none").generate(PROMPTS, **MANY))


@pytest.mark.parametrize("head", HEADS)
def test_prompts_in_chunks_and_cached_prefixes_change_nothing(target_dir, plain_few, head):
    """Together the prompts are longer than a round takes; then they come again, and their prefix is cached."""
    local = local_engine(target_dir, head)
    assert tokens(local.generate(LONG, **FEW)) == plain_few
    again = local.generate(LONG, **FEW)
    assert tokens(again) == plain_few
    computed = sum(generation.target_rows - generation.draft_tokens for generation in again)
    assert computed < 0.5 * sum(map(len, LONG))
    check_integrity(local.target)
    assert local.target.pool.num_free == local.target.pool.num_blocks


@pytest.mark.parametrize("head", ["eagle2", "eagle3-reduced"])
def test_sequences_that_make_room_or_are_sent_again_lose_nothing(target_dir, plain_many, head):
    """Blocks for less than all of them, so that the youngest start over; and a target that forgets half-way."""
    crowded = local_engine(target_dir, head, kv_cache_tokens=256)
    assert tokens(crowded.generate(PROMPTS, **MANY)) == plain_many
    assert crowded.core.counters.preempted > 0
    forgetful = local_engine(target_dir, head)
    rounds = iter(range(10**6))

    def forget(trace) -> None:
        if next(rounds) % 7 == 6:
            forgetful.target.clear()

    assert tokens(forgetful.generate(PROMPTS, on_round=forget, **MANY)) == plain_many
    assert forgetful.core.counters.stale_sequences > 0


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_head_that_knows_the_target_saves_most_rounds(knowing_dir, batch_size):
    options = {"max_new_tokens": 60, "ignore_eos": True}
    local = local_engine(knowing_dir, "head", batch_size)
    generations = local.generate(PROMPTS, **options)
    plain = local_engine(knowing_dir, "none").generate(PROMPTS, **options)
    assert tokens(generations) == tokens(plain)
    assert sum(generation.rounds for generation in generations) < 0.5 * sum(generation.rounds for generation in plain)
    for generation in generations:
        assert generation.accepted_tokens["eagle"] + generation.rounds == 60
    assert local.core.counters.head_s > 0.0
    assert not local.core.counters.invalid_trees


def test_requests_without_the_drafter_cost_the_head_nothing(knowing_dir):
    local = local_engine(knowing_dir, "head")
    plain = local.generate(PROMPTS, max_new_tokens=20, drafters=())
    assert local.core.counters.head_s == 0.0
    assert all(generation.draft_tokens == 0 for generation in plain)
    assert tokens(local.generate(PROMPTS, max_new_tokens=20)) == tokens(plain)
    assert local.core.counters.head_s > 0.0


def test_auto_includes_a_head_that_is_there_and_asking_for_one_that_is_not_is_an_error(knowing_dir):
    auto = LocalEngine(str(knowing_dir), draft_model="none", eagle_head=knowing_dir / "head", kv_cache_tokens=512)
    assert "eagle" in auto.drafter_names
    assert auto.core.source_names[-2:] == ("eagle", "draft_model")
    seen = []
    auto.generate(PROMPTS, max_new_tokens=30, on_round=seen.append)
    assert sum(trace.proposed.get("eagle", 0) for trace in seen) > 0
    without = LocalEngine(str(knowing_dir), draft_model="none", kv_cache_tokens=512)
    assert "eagle" not in without.drafter_names
    with pytest.raises(InvalidRequest, match="drafters is 'eagle'; this engine was made with"):
        without.generate(PROMPTS, drafters=["eagle"])
    with pytest.raises(ModelError, match="drafter 'eagle' needs a head of the model, and --eagle-head is 'none'"):
        LocalEngine(str(knowing_dir), draft_model="none", drafters=("eagle",))
    with pytest.raises(InvalidRequest, match="eagle_depth is 0; it must be at least 1"):
        local_engine(knowing_dir, "head", eagle_depth=0)


def test_under_rejection_a_head_drafts_and_changes_no_token(knowing_dir):
    options = {"draft_model": "none", "eagle_head": knowing_dir / "head", "acceptance": "rejection"}
    local = LocalEngine(str(knowing_dir), kv_cache_tokens=512, drafters=("eagle",), **options)
    sampled = {"max_new_tokens": 20, "temperature": 0.9, "seed": 3}
    plain = local.generate(PROMPTS, drafters=(), **sampled)
    drafted = local.generate(PROMPTS, **sampled)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert local.core.counters.head_s > 0.0

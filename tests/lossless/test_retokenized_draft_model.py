"""A draft model of another vocabulary changes no token, whatever it guesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from cluster.offline.engine import LocalEngine
from paceline_testing.integrity import check_integrity
from paceline_testing.other_vocabularies import (
    TEXT,
    merging_tokenizer,
    save_renumbered_pair,
    sentence_piece_tokenizer,
)
from paceline_testing.tiny_models import save_tiny_model

NEW_TOKENS = 24
PROMPTS = [TEXT[first : first + 30] for first in range(0, 56, 14)] + ["x"]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
TOKENIZERS = {
    "merges": lambda: merging_tokenizer(),
    "shuffled": lambda: merging_tokenizer(290, seed=4),
    "sentence piece": sentence_piece_tokenizer,
}
PAIRS = [
    ("bytes", "merges"),
    ("merges", "shuffled"),
    ("sentence piece", "merges"),
]
SHAPE = {"hidden_size": 48, "max_positions": 512}


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory) -> tuple[Path, Path]:
    """A target and itself behind other numbers of the same tokens."""
    return save_renumbered_pair(tmp_path_factory.mktemp("renumbered"))


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> dict[str, Path]:
    """Random models, each with a tokenizer of its own: they write bytes that are seldom characters."""
    home = tmp_path_factory.mktemp("models")
    dirs = {
        name: save_tiny_model(home / name, "llama", 5, tokenizer=make(), layers=2, **SHAPE)
        for name, make in TOKENIZERS.items()
    }
    return dirs | {"bytes": save_tiny_model(home / "bytes", "llama", 5, layers=2, **SHAPE)}


def engine(target: Path, draft: Path | str, batch_size: int = 8, **options) -> LocalEngine:
    drafters = ("none",) if draft == "none" else ("draft_model",)
    options = {"exact": "bitwise", "kv_cache_tokens": 8192} | options
    return LocalEngine(
        str(target), draft_model=str(draft), drafters=drafters, batch_size=batch_size, device="cpu", **options
    )


def tokens(local: LocalEngine, prompts=PROMPTS, **options) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS} | options
    generations = local.generate(prompts, **options)
    draft = local._drafts.get("draft")
    if draft is not None:
        check_integrity(draft)
    assert local.target.pool.num_free == local.target.pool.num_blocks
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize(
    ("target", "draft", "sampling"),
    [
        pytest.param(*PAIRS[0], SAMPLED, marks=pytest.mark.slow),
        *((*pair, SAMPLED) for pair in PAIRS[1:]),
        (*PAIRS[0], GREEDY),
        *(pytest.param(*pair, GREEDY, marks=pytest.mark.slow) for pair in PAIRS[1:]),
    ],
)
def test_tokens_are_the_same_with_and_without_drafts_of_another_vocabulary(model_dirs, target, draft, sampling):
    plain = tokens(engine(model_dirs[target], "none", 1), **sampling)
    for batch_size in (1, 8):
        drafted = engine(model_dirs[target], model_dirs[draft], batch_size)
        assert isinstance(drafted._drafts["draft"], RetokenizedDraftEngine)
        assert tokens(drafted, **sampling) == plain


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        pytest.param(SAMPLED, marks=pytest.mark.slow),
        SAMPLED | {"repetition_penalty": 1.3, "presence_penalty": 0.7},
    ],
)
def test_right_guesses_come_through_and_change_no_token(renumbered, options):
    plain = tokens(engine(renumbered[0], "none", 1), **options)
    for batch_size in (1, 8):
        drafted = engine(*renumbered, batch_size)
        assert tokens(drafted, **options) == plain
    if options is GREEDY:
        generation = engine(*renumbered, 1).generate([PROMPTS[0]], max_new_tokens=80)[0]
        assert generation.accepted_tokens["draft_model"] >= 0.9 * generation.draft_tokens
        assert generation.draft_tokens > 0


def test_it_is_said_once_that_drafts_go_by_way_of_the_text(renumbered, caplog):
    with caplog.at_level("INFO", logger="actors.build"):
        engine(*renumbered)
    assert [record.message for record in caplog.records if "its own vocabulary" in record.message] == [
        f"draft model {renumbered[1]} has its own vocabulary: its drafts are translated through the text"
    ]
    caplog.clear()
    with caplog.at_level("INFO", logger="actors.build"):
        assert not isinstance(engine(renumbered[0], renumbered[0])._drafts["draft"], RetokenizedDraftEngine)
    assert not caplog.records


def test_rejection_at_temperature_zero_is_greedy(renumbered, model_dirs):
    for target, draft in (renumbered, (model_dirs["bytes"], model_dirs["merges"])):
        plain = tokens(engine(target, "none", 1))
        assert tokens(engine(target, draft, acceptance="rejection")) == plain


def test_a_stream_that_is_left_and_a_model_that_fails_leave_nothing_behind(renumbered, monkeypatch, caplog):
    local = engine(*renumbered)
    wanted = tokens(local)
    stream = local.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    next(stream)
    stream.close()
    fresh = engine(*renumbered)  # new: it asks the draft model before it knows what that costs
    inner = fresh._drafts["draft"]._inner
    forward, calls = inner._runner.forward, []

    def failing(batch, logit_rows):
        calls.append(batch.num_rows)
        if len(calls) % 3 == 0:
            raise IndexError("index out of range in self")
        return forward(batch, logit_rows)

    monkeypatch.setattr(inner._runner, "forward", failing)
    assert tokens(fresh) == wanted
    assert len(calls) >= 3
    assert "the draft model failed" in caplog.text
    assert tokens(local) == wanted


def test_a_short_draft_model_and_a_long_prompt(model_dirs, tmp_path):
    """The draft model's positions end within the answer, or before it."""
    short = save_tiny_model(tmp_path / "short", "gpt2", 5, tokenizer=merging_tokenizer(), layers=1, max_positions=64)
    prompts = [TEXT, TEXT[:110]]
    plain = tokens(engine(model_dirs["bytes"], "none", 1), prompts, max_new_tokens=40)
    assert tokens(engine(model_dirs["bytes"], short), prompts, max_new_tokens=40) == plain


@pytest.mark.slow
def test_the_demo_model_writes_the_same_with_a_draft_model_of_another_vocabulary(smollm2_dir, model_dirs):
    prompts = ["The capital of France is", [{"role": "user", "content": "Say 🙂 and naïve in 3 words."}]]
    local = engine(smollm2_dir, model_dirs["merges"], 1, exact="default", kv_cache_tokens=1024)
    assert isinstance(local._drafts["draft"], RetokenizedDraftEngine)
    plain = tokens(local, prompts, max_new_tokens=8, drafters=("none",))
    assert tokens(local, prompts, max_new_tokens=8) == plain

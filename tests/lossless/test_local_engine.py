"""`LocalEngine` against the unpatched model and against itself without drafts: whatever drafts, the text stays."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from actors.drafters.registry import DRAFTER_NAMES
from actors.errors import InvalidRequest, ModelError
from actors.lookahead.window import LookaheadWindow
from actors.models.loader import load_config
from actors.models.source import VOCAB_MAP_FILE, ModelSource
from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import TINY_KINDS, save_eagle_head, save_tiny_model, tiny_eagle_tensors

NEW_TOKENS = 24
EOS = 256
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash", "fir", "yew", "box", "bay")]
PROMPTS.append([65])
TOGETHER = (8, len(PROMPTS))  # batch size and prompts
ALONE = ("llama", 1, 3)  # model kind, batch size and prompts: one after the other takes longer than all at a time
SAMPLED = {"max_new_tokens": NEW_TOKENS, "temperature": 0.9, "top_p": 0.95, "seed": 7, "ignore_eos": True}

# Heads of every published format, of random weights: what they draft is right now and then.
HEADS: dict[str, tuple[str, dict]] = {
    "eagle1": ("eagle", {}),
    "eagle2": ("eagle", {"has_bias": False}),
    "eagle3": ("eagle3", {}),
    "eagle3-reduced": ("eagle3", {"draft_vocab_size": 130}),
}

# Every drafter that has a name is tested here, because it is found by its name.
DRAFTERS = [(name,) for name in DRAFTER_NAMES if name != "none"]
ALL = tuple(name for name in DRAFTER_NAMES if name not in ("none", "auto"))
WAYS = [pytest.param(names, {}, id="+".join(names)) for names in DRAFTERS]
WAYS.append(pytest.param(ALL, {}, id="all together"))
WAYS += [
    pytest.param(("draft_model",), {"branch": branch}, id=f"branch {branch}") for branch in (1, 4)
]  # of its trees, else 2
# One kind of target has every drafter alone; the others have them together, and those that read their hidden states.
FEW = {"auto", "eagle", "all together"}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Target and draft model by kind; the draft has the target's first layer and is right now and then."""
    shape = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "sliding_window": 6, "max_positions": 256}
    dirs = {}
    for kind in TINY_KINDS:
        target, draft = tmp_path_factory.mktemp(kind), tmp_path_factory.mktemp(f"{kind}-draft")
        dirs[kind] = (
            save_tiny_model(target, kind, 5, layers=3, **shape),
            save_tiny_model(draft, kind, 5, layers=1, **shape),
        )
        config = load_config(ModelSource(kind, kind, target))
        for name, (head_kind, options) in HEADS.items():
            save_eagle_head(target / name, config, tiny_eagle_tensors(config, head_kind, 9, **options))
    return dirs


def engine(dirs: tuple[Path, Path], drafters: tuple[str, ...], batch_size: int = 8, **options) -> LocalEngine:
    if "eagle" in drafters:
        options.setdefault("eagle_head", dirs[0] / "eagle3-reduced")
    return LocalEngine(
        str(dirs[0]), draft_model=str(dirs[1]), drafters=drafters, batch_size=batch_size, device="cpu",
        kv_cache_tokens=4096, **options,
    )  # fmt: skip


def ways_of(all_of: tuple, *few_of: tuple) -> list:
    """Every way with the first case (kind, batch size, prompts), and FEW ways with the others."""
    return [
        pytest.param(
            *case, *way.values, marks=() if case == all_of or way.id in FEW else pytest.mark.slow, id=_id(case, way)
        )
        for case in (all_of, *few_of)
        for way in WAYS
    ]


def _id(case: tuple, way) -> str:
    return "-".join([*map(str, case), way.id])


@cache
def transformers_greedy(directory: Path) -> list[list[int]]:
    """What the unpatched model says to each of PROMPTS."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    answers = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=EOS, pad_token_id=258
        )
        tokens = output[0, len(prompt) :].tolist()
        answers.append(tokens[: tokens.index(EOS)] if EOS in tokens else tokens)
    return answers


def edited(answers: list[list[int]]) -> list[list[int]]:
    """The same with other tokens here and there, as predictions that are right, wrong, and right again."""
    return [[token if at % 7 else (token + 1) % EOS for at, token in enumerate(tokens)] for tokens in answers]


@cache
def plain_samples(dirs: tuple[Path, Path]) -> list[list[int]]:
    generations = engine(dirs, ("none",), 1, exact="bitwise").generate(PROMPTS, **SAMPLED)
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize(
    ("kind", "batch_size", "count", "drafters", "options"),
    ways_of(("llama", *TOGETHER), *((kind, *TOGETHER) for kind in TINY_KINDS if kind != "llama"), ALONE),
)
def test_greedy_tokens_are_those_of_transformers(model_dirs, kind, batch_size, count, drafters, options):
    local = engine(model_dirs[kind], drafters, batch_size, **options)
    wanted = transformers_greedy(model_dirs[kind][0])[-count:]
    generations = local.generate(PROMPTS[-count:], max_new_tokens=NEW_TOKENS, predictions=edited(wanted))
    assert [generation.token_ids for generation in generations] == wanted


@pytest.mark.parametrize(("kind", "batch_size", "count", "drafters", "shape"), ways_of(ALONE, ("gemma3", *TOGETHER)))
def test_bitwise_a_seed_gives_the_same_tokens_with_any_drafter_and_batch_size(
    model_dirs, kind, batch_size, count, drafters, shape
):
    local = engine(model_dirs[kind], drafters, batch_size, exact="bitwise", **shape)
    wanted = plain_samples(model_dirs[kind])[:count]
    generations = local.generate(PROMPTS[:count], predictions=edited(wanted), **SAMPLED)
    assert [g.token_ids for g in generations] == wanted


@pytest.mark.parametrize(("branch", "temperature"), [pytest.param(1, 0.9, marks=pytest.mark.slow), (2, 0.0), (4, 0.9)])
def test_a_draft_model_of_few_words_costs_no_token(model_dirs, drafts_pay, tmp_path, temperature, branch):
    target = model_dirs["llama"][0]
    few = shutil.copytree(target, tmp_path / "few")  # right where the target says one of its words
    save_file({"token_ids": torch.arange(0, 259, 2)}, few / VOCAB_MAP_FILE)
    options = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "seed": 7, "ignore_eos": True}
    plain = engine((target, few), ("none",), 1, exact="bitwise").generate(PROMPTS, **options)
    accepted = 0
    for batch_size in (1, 8):
        drafted = engine((target, few), ("draft_model",), batch_size, exact="bitwise", branch=branch)
        generations = drafted.generate(PROMPTS, **options)
        assert [g.token_ids for g in generations] == [g.token_ids for g in plain]
        accepted += sum(g.accepted_tokens.get("draft_model", 0) for g in generations)
    assert accepted


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_two_draft_models_cost_no_token(model_dirs, drafts_pay, temperature):
    target, other = model_dirs["llama"]
    options = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "seed": 7, "ignore_eos": True}
    plain = engine((target, other), ("none",), 1, exact="bitwise").generate(PROMPTS, **options)
    config = ClusterConfig.model_validate({"more_drafts": {"twin": {"model": str(target), "kv_cache_tokens": 4096}}})
    both = engine((target, other), ("draft_model", "draft_model.twin"), 8, exact="bitwise", config=config)
    generations = both.generate(PROMPTS, **options)
    assert [g.token_ids for g in generations] == [g.token_ids for g in plain]
    assert sum(g.accepted_tokens.get("draft_model.twin", 0) for g in generations) > 0
    named = both.generate(PROMPTS, drafters=("draft_model",), **options)
    assert [g.token_ids for g in named] == [g.token_ids for g in plain]
    assert {source for g in named for source in g.accepted_tokens} <= {"draft_model"}


def test_penalties_are_the_same_with_and_without_drafts(model_dirs):
    options = {"max_new_tokens": NEW_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    options |= {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    plain = engine(model_dirs["llama"], ("none",), 1, exact="bitwise").generate(PROMPTS, **options)
    drafted = engine(model_dirs["llama"], ("auto",), 8, exact="bitwise").generate(PROMPTS, **options)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    unpenalised = engine(model_dirs["llama"], ("none",), 1, exact="bitwise").generate(
        PROMPTS, max_new_tokens=NEW_TOKENS, temperature=0.8, seed=3, ignore_eos=True
    )
    assert [g.token_ids for g in unpenalised] != [g.token_ids for g in plain]


def test_rejection_at_temperature_zero_is_greedy(model_dirs):
    drafted = engine(model_dirs["llama"], ("draft_model",), 8, acceptance="rejection")
    generations = drafted.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [generation.token_ids for generation in generations] == transformers_greedy(model_dirs["llama"][0])


def test_a_drafter_equal_to_the_target_is_always_accepted(model_dirs, drafts_pay):
    target = model_dirs["llama"][0]
    generation = engine((target, target), ("draft_model",), 1, branch=1).generate(
        [PROMPTS[0]], max_new_tokens=200, ignore_eos=True
    )[0]
    assert generation.accepted_tokens.get("draft_model", 0) >= 0.9 * generation.draft_tokens
    assert generation.rounds < 100


def test_lookahead_on_a_drafter_equal_to_the_target_is_accepted_and_goes_before_its_trees(model_dirs):
    target = model_dirs["llama"][0]
    local = engine((target, target), ("draft_model", "ouroboros"), 1)
    options = {"max_new_tokens": 200, "ignore_eos": True}
    plain = local.generate([PROMPTS[0]], drafters=(), **options)[0]
    generation = local.generate([PROMPTS[0]], **options)[0]
    assert generation.token_ids == plain.token_ids
    # How often drafting pays is for the machine to say; what is drafted is right.
    assert set(generation.accepted_tokens) <= {"ouroboros"}
    assert sum(generation.accepted_tokens.values()) >= 0.2 * generation.draft_tokens
    check_integrity(local._drafts["draft"])
    trees = local.generate([PROMPTS[0]], drafters=("draft_model",), **options)[0]
    assert trees.token_ids == plain.token_ids
    assert "ouroboros" not in trees.accepted_tokens
    with pytest.raises(ModelError, match="drafter 'ouroboros' needs a draft model, and --draft-model is 'none'"):
        LocalEngine(str(target), draft_model="none", drafters=("ouroboros",), kv_cache_tokens=512)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lookahead_on_the_target_finds_phrases_and_changes_no_token(model_dirs, temperature):
    """A window that is wider than the rows of a round that are given by default, penalties, stop tokens."""
    shape = {"window_size": 15, "lookahead_level": 6, "guess_set_size": -1}
    local = engine(model_dirs["qwen3"], ("lookahead",), 4, exact="bitwise", drafter_options={"lookahead": shape})
    options = {"max_new_tokens": 30, "temperature": temperature, "seed": 5, "ignore_eos": True}
    for more in ({}, {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "stop_token_ids": (97, 120, 200, 32)}):
        plain = local.generate(PROMPTS[:2], drafters=(), **options, **more)
        found = local.generate(PROMPTS[:2], **options, **more)
        assert [(g.token_ids, g.finish_reason) for g in found] == [(g.token_ids, g.finish_reason) for g in plain]
    assert local.core.counters.drafted_tokens["lookahead"] > 74  # the rows of a full window
    assert local.core.counters.drafter_errors.total() == local.core.counters.invalid_trees.total() == 0
    with pytest.raises(InvalidRequest, match=r"^max_rows is 40; it must be at least 75 "):
        engine(model_dirs["qwen3"], ("lookahead",), drafter_options={"lookahead": shape}, max_rows=40)


@pytest.mark.parametrize(
    "drafters",
    [("suffix",), ("soft_ngram", "prompt_lookup"), ("token_recycling", "ngram_table", "lookahead"), ("ouroboros",)],
)
def test_under_rejection_drafts_that_are_not_drawn_change_no_token(model_dirs, drafts_pay, drafters):
    """Their law is the coupled rule's, and so are their tokens, also where they know the answer of the same seed."""
    options = {"max_new_tokens": 30, "temperature": 0.9, "seed": 5, "ignore_eos": True}
    target, _ = model_dirs["llama"]
    local = engine((target, target), drafters, 4, acceptance="rejection")  # its guesses are right now and then
    plain = local.generate(PROMPTS, drafters=(), **options)
    for _ in range(2):
        drafted = local.generate(PROMPTS, **options)
        assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    assert sum(sum(g.accepted_tokens.values()) for g in drafted) > 0
    assert local.core.counters.invalid_trees.total() == 0


def test_a_request_under_rejection_has_phrases_but_no_window(model_dirs, monkeypatch):
    monkeypatch.setattr(LookaheadWindow, "add_to", lambda *_: pytest.fail("a window"))
    local = engine(model_dirs["llama"], ("lookahead",), 8, acceptance="rejection")
    generations = local.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [generation.token_ids for generation in generations] == transformers_greedy(model_dirs["llama"][0])
    assert local.core.counters.drafted_tokens["lookahead"] > 0


def test_length_limits_are_exact(model_dirs):
    local = engine(model_dirs["llama"], ("auto",))
    for count in (1, 2, 17):
        assert [len(g.token_ids) for g in local.generate(PROMPTS, max_new_tokens=count, ignore_eos=True)] == [count] * 8
    full = local.generate([[65] * 250], ignore_eos=True)[0]  # the default: as far as there is room
    assert (len(full.token_ids), full.finish_reason) == (6, "length")  # the model has 256 positions
    assert len(local.generate([[65] * 250], max_new_tokens=6, ignore_eos=True)[0].token_ids) == 6
    with pytest.raises(InvalidRequest, match=r"max_new_tokens is 7; with the 250 tokens .* the limit of 256"):
        local.generate([[65] * 250], max_new_tokens=7)


def test_requests_leave_nothing_behind(model_dirs):
    local = engine(model_dirs["llama"], ("auto",))
    first = local.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert local.target.num_sequences == 0
    check_integrity(local.target)
    assert local.target.pool.num_free == local.target.pool.num_blocks
    assert [g.token_ids for g in local.generate(PROMPTS, max_new_tokens=NEW_TOKENS)] == [g.token_ids for g in first]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_engine_that_was_interrupted_in_the_middle_of_a_round_serves_on(model_dirs, error, monkeypatch):
    local = engine(model_dirs["llama"], ("auto",))
    wanted = [g.token_ids for g in local.generate(PROMPTS, max_new_tokens=NEW_TOKENS)]
    runner = local.target._runner
    forward, calls = runner.forward, []

    def stopping(batch, logit_rows):
        calls.append(batch.num_rows)
        if len(calls) == 4:
            raise error
        return forward(batch, logit_rows)

    monkeypatch.setattr(runner, "forward", stopping)
    with pytest.raises(error):
        local.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert (local.core.num_running, local.core.num_waiting, local.target.num_sequences) == (0, 0, 0)
    assert [g.token_ids for g in local.generate(PROMPTS, max_new_tokens=NEW_TOKENS)] == wanted


def test_a_draft_model_that_fails_costs_its_drafts_and_nothing_else(model_dirs, monkeypatch, caplog):
    plain = engine(model_dirs["llama"], ("none",))
    wanted = [g.token_ids for g in plain.generate(PROMPTS, max_new_tokens=NEW_TOKENS)]
    local = engine(
        model_dirs["llama"], ("draft_model",)
    )  # new: it asks the draft model before it knows what that costs
    draft = local._drafts["draft"]
    forward, calls = draft._runner.forward, []

    def failing(batch, logit_rows):
        calls.append(batch.num_rows)
        if len(calls) % 3 == 0:
            raise IndexError("index out of range in self")
        return forward(batch, logit_rows)

    monkeypatch.setattr(draft._runner, "forward", failing)
    assert [g.token_ids for g in local.generate(PROMPTS, max_new_tokens=NEW_TOKENS)] == wanted
    assert len(calls) >= 3
    assert "the draft model failed" in caplog.text


def test_what_cannot_be_served_is_refused_with_a_reason(model_dirs):
    local = engine(model_dirs["llama"], ("auto",))
    with pytest.raises(InvalidRequest, match=r"prompts\[1\] is 256 tokens; there is room for at most 256"):
        local.generate([PROMPTS[0], [65] * 256])
    with pytest.raises(InvalidRequest, match="258"):
        local.generate([[4000]])
    with pytest.raises(InvalidRequest, match="at least one token"):
        local.generate([[]])
    for prompts, message in (
        ("abc", "prompts is 'abc'; it must be a list of prompts"),
        ([[65, 1.5]], r"prompts\[0\] is 1.5; token ids are integers"),
        ([[True]], r"prompts\[0\] is true; token ids are integers"),
        ([None], r"prompts\[0\] is null; it must be a text, a list of messages or a list of token ids"),
        ([{"role": "user"}], r"prompts\[0\] is .*; it must be a text, a list of messages"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            local.generate(prompts)
    assert local.generate([np.array([65, 66])], max_new_tokens=1)
    for field, value in (
        ("top_p", 0.0),
        ("min_p", -0.1),
        ("temperature", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
        ("max_new_tokens", 0),
        ("stop_token_ids", (-1,)),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field} is "):
            local.generate([PROMPTS[0]], **{field: value})
    assert local.generate([PROMPTS[0]], max_new_tokens=3)[0].token_ids  # still works
    with pytest.raises(InvalidRequest, match="known drafters"):
        engine(model_dirs["llama"], ("oracle",))
    config = ClusterConfig.model_validate({"target": {"block_size": 512, "kv_cache_tokens": 256}})
    with pytest.raises(ModelError, match="kv_cache_tokens is 256; it must be at least block_size, 512"):
        LocalEngine(str(model_dirs["llama"][0]), config=config, draft_model="none", device="cpu")
    with pytest.raises(ModelError, match="nowhere"):
        LocalEngine("/nowhere/at/all")
    for field, value in (("max_rows", 0), ("max_draft_tokens", -1), ("max_draft_tokens", 257), ("batch_size", 0)):
        with pytest.raises(InvalidRequest, match=f"^{field} is {value}; it must be "):
            LocalEngine(str(model_dirs["llama"][0]), draft_model="none", **{field: value})


def test_a_right_prediction_saves_rounds_and_a_wrong_one_costs_no_token(model_dirs, drafts_pay):
    local = engine(model_dirs["llama"], ("prediction",), 8)
    options = {"max_new_tokens": 100, "ignore_eos": True}
    plain = local.generate(PROMPTS, **options)
    wanted = [generation.token_ids for generation in plain]
    assert all(generation.draft_tokens == 0 for generation in plain)
    right = local.generate(PROMPTS, predictions=wanted, **options)
    assert [generation.token_ids for generation in right] == wanted
    assert max(generation.rounds for generation in right) < 40
    assert all(generation.accepted_tokens["prediction"] > 60 for generation in right)
    wrong = local.generate(PROMPTS, predictions=[tokens[::-1] for tokens in wanted], **options)
    assert [generation.token_ids for generation in wrong] == wanted
    text = local.generate(PROMPTS[:1], predictions=[plain[0].text], **options)[0]
    assert text.token_ids == wanted[0]
    with pytest.raises(InvalidRequest, match=r"predictions is '1 of them'; there are 8 prompts"):
        local.generate(PROMPTS, predictions=[[1]])
    with pytest.raises(InvalidRequest, match=r"predictions\[1\]"):
        local.generate(PROMPTS[:2], predictions=["", [10**6]])

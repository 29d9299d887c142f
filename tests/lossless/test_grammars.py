"""Constrained answers against a reference that knows no drafts: one forward of the unpatched model a token, a mask by a
matcher that reads the answer from its beginning, one draw."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.draft_model.answer_grammars import AnswerGrammars
from actors.draft_tree import DraftTree
from actors.drafters.registry import DRAFTER_NAMES
from actors.errors import InvalidRequest
from actors.grammar import grammars as grammars_module
from actors.grammar import matcher as matcher_module
from actors.grammar.grammars import Grammars
from actors.grammar.matcher import GrammarMatcher, TreeMasks
from actors.messages import FREE_ROW, TokenMasks, VerifyBatch, VerifyResult
from actors.sampling.rows import rows_for
from actors.sampling.sampler import sample_tokens
from actors.sampling.sequence_sampling import SequenceSampling
from cluster.config import ClusterConfig
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.generation import generation_options
from cluster.offline.engine import LocalEngine
from cluster.text.constraint_grammar import constraint_grammar
from cluster.text.special_tokens import special_token_ids
from paceline_testing.chi_square import chi_square_tail
from paceline_testing.grammar_cases import HARD_TAIL, PERSON, few_items
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer, save_tiny_model

EOS = 256
NEW_TOKENS = 40
# Short, so that a random model writes some: ordinary text, and two special tokens.
TRIGGERS = dict(zip([*"aeo%7Kq", "ü", "<|start|>", "<|pad|>"], "abcdefghij", strict=True))
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "json_object": {"json_object": True},
    "regex": {"regex": r"[a-f]{3,9}-(north|south|southwest)(, [0-9]{2}){1,3}"},
    "choice": {"choice": ["the dog", "the dogs", "the quick fox", "a"]},
    "structural_tag": {
        "structural_tag": {
            "structures": [
                {"begin": f"{trigger}(", "schema": {"enum": [letter * 4, letter * 2]}, "end": ")"}
                for trigger, letter in TRIGGERS.items()
            ],
            "triggers": list(TRIGGERS),
        }
    },
    "grammar": {"grammar": 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,4}/'},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 11},
    "everything": {
        "temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": ((34, 3.0), (44, -2.0)),
    },
}  # fmt: skip
PROMPTS = [list(f"say {word} and".encode()) for word in ("oak", "elm", "ash", "fir", "yew")]
# All constraints have answers with all options, and each other way has some of them.
QUICK = {"greedy": ("json", "choice"), "sampled": ("structural_tag",), "everything": tuple(CONSTRAINTS)}
# They propose whatever comes next, grammar or not, as the n-gram table does: all of them together stand for each.
ALIKE = ("prompt_lookup", "retrieval", "soft_ngram", "suffix", "token_recycling")
DRAFTERS = [name for name in DRAFTER_NAMES if name not in ("none", "eagle")]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A target, and a draft model that is right now and then."""
    shape = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "max_positions": 256}
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    return save_tiny_model(target, "llama", 5, layers=3, **shape), save_tiny_model(draft, "llama", 5, layers=1, **shape)


def engine(models: tuple[Path, Path], drafters: tuple[str, ...], **options: Any) -> LocalEngine:
    return LocalEngine(
        str(models[0]), draft_model=str(models[1]), drafters=drafters, device="cpu", kv_cache_tokens=4096, **options
    )


@cache
def _unpatched(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


@cache
def _grammars() -> Grammars:
    return Grammars(make_byte_tokenizer, BYTE_VOCAB_SIZE, [EOS], "tiny")


@cache
def reference(directory: Path, constraint: str, way: str) -> list[tuple[list[int], str]]:
    """Answer and finish reason for each prompt. They are equally long, so that one forward is for all."""
    outputs = StructuredOutputs.model_validate(CONSTRAINTS[constraint])
    text = constraint_grammar(outputs, special_token_ids(make_byte_tokenizer()), "test")
    options = generation_options(**WAYS[way])
    states = []
    for index, prompt in enumerate(PROMPTS):
        states.append(SequenceSampling(options.sampling((options.seed or 0) + index), len(prompt)))
        states[-1].extend(np.array(prompt))
    answers: list[list[int]] = [[] for _ in PROMPTS]
    matchers = [_grammars().matcher(text) for _ in PROMPTS]
    stopped: set[int] = set()
    for count in range(NEW_TOKENS):
        running = [index for index in range(len(PROMPTS)) if index not in stopped]
        if not running:
            break
        with torch.inference_mode():
            texts = torch.tensor([PROMPTS[index] + answers[index] for index in running])
            last = _unpatched(directory)(texts).logits[:, -1:]
        for index, logits in zip(running, last, strict=True):
            answer, state = answers[index], states[index]
            masked = torch.full_like(logits, -torch.inf)
            allowed = matchers[index].allowed_tokens()
            masked[0, allowed] = logits[0, allowed]
            no_path = [np.empty(0, np.int32)]
            rows = rows_for([state], np.zeros(1, np.int64), np.array([len(PROMPTS[index]) + count]), no_path)
            token = int(sample_tokens(masked, rows))
            if token == EOS:
                stopped.add(index)
                continue
            answer.append(token)
            state.extend(np.array([token]))
            matchers[index] = _grammars().matcher(text)
            assert matchers[index].follow(answer)
            if matchers[index].is_complete:
                stopped.add(index)
    return [(answer, "stop" if index in stopped else "length") for index, answer in enumerate(answers)]


def wanted_of(models: tuple[Path, Path], constraint: str, way: str) -> list[tuple[list[int], str]]:
    return reference(models[0], constraint, way)


def answers_of(local: LocalEngine, constraint: str, way: str, **options: Any) -> list[tuple[list[int], str]]:
    options = {"max_new_tokens": NEW_TOKENS, "structured_outputs": CONSTRAINTS[constraint], **WAYS[way], **options}
    return [(found.token_ids, found.finish_reason) for found in local.generate(PROMPTS, **options)]


@pytest.mark.parametrize(
    ("constraint", "way"),
    [
        pytest.param(constraint, way, marks=() if constraint in QUICK[way] else pytest.mark.slow)
        for constraint in CONSTRAINTS
        for way in WAYS
    ],
)
def test_answers_are_those_of_the_reference_with_and_without_drafts(models, drafts_pay, constraint, way):
    local = engine(models, ("auto", "prompt_lookup", "token_recycling", "ngram_table"))
    wanted = wanted_of(models, constraint, way)
    assert answers_of(local, constraint, way, drafters=("none",)) == wanted
    predictions = [tokens for tokens, _ in wanted]
    for _ in range(2):  # cold, and with what was learnt
        assert answers_of(local, constraint, way, predictions=predictions) == wanted


@pytest.mark.parametrize("exact", ["default", pytest.param("bitwise", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in DRAFTERS]
)
def test_no_drafter_changes_a_constrained_answer(models, drafts_pay, drafter, exact):
    local = engine(models, (drafter,), exact=exact)
    for constraint, times in (("json", 2), ("structural_tag", 1)):  # cold, and with what was learnt
        wanted = wanted_of(models, constraint, "sampled")
        for _ in range(times):
            assert answers_of(local, constraint, "sampled", predictions=[tokens for tokens, _ in wanted]) == wanted
    assert local.core.counters.invalid_trees.total() == local.core.counters.drafter_errors.total() == 0


def test_bitwise_all_drafters_together_change_no_constrained_answer(models, drafts_pay):
    local = engine(models, tuple(DRAFTERS), exact="bitwise")
    wanted = wanted_of(models, "json", "sampled")
    assert answers_of(local, "json", "sampled", predictions=[tokens for tokens, _ in wanted]) == wanted


def test_free_and_constrained_answers_share_rounds(models, drafts_pay):
    local = engine(models, ("auto",))
    free = local.generate(PROMPTS, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=11)
    streams = [
        local.stream(prompt, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=11 + index, **more)
        for index, prompt in enumerate(PROMPTS)
        for more in ({}, {"structured_outputs": CONSTRAINTS["json"]}, {"structured_outputs": CONSTRAINTS["choice"]})
    ]
    found: list[list[int]] = [[] for _ in streams]
    while any(streams):
        for index, stream in enumerate(streams):
            piece = None if stream is None else next(stream, None)
            if piece is None:
                streams[index] = None
            else:
                found[index] += piece.token_ids
    assert found[0::3] == [answer.token_ids for answer in free]
    assert found[1::3] == [tokens for tokens, _ in wanted_of(models, "json", "sampled")]
    assert found[2::3] == [tokens for tokens, _ in wanted_of(models, "choice", "sampled")]


def test_rejection_at_temperature_zero_is_greedy_within_the_grammar(models, drafts_pay):
    local = engine(models, ("draft_model",), acceptance="rejection")
    for constraint in ("json", "regex", "choice"):
        assert answers_of(local, constraint, "greedy") == wanted_of(models, constraint, "greedy")


def test_under_rejection_answers_have_the_law_of_answers_without_drafts(models, drafts_pay):
    counts = []
    constraint = {"choice": ["the dog", "the dogs", "the quick fox", "a", "an oak"]}
    drafting = {"acceptance": "rejection", "drafters": ("draft_model", "suffix", "grammar")}
    for options in ({"drafters": ("none",)}, drafting):
        local = engine(models, batch_size=64, **options)
        answers = local.generate([PROMPTS[0]] * 400, structured_outputs=constraint, temperature=1.5, seed=1)
        texts = [answer.text for answer in answers]
        counts.append([texts.count(choice) for choice in constraint["choice"]])
        assert sum(counts[-1]) == len(texts)
    first, second = np.array(counts)
    seen = first + second > 0
    statistic = float(((first - second)[seen] ** 2 / (first + second)[seen]).sum())
    assert chi_square_tail(statistic, int(seen.sum()) - 1) > 1e-3
    assert seen.sum() > 2


def shares_within(directory: Path, tokens: list[int], allowed: list[int], temperature: float) -> np.ndarray:
    with torch.inference_mode():
        logits = _unpatched(directory)(torch.tensor([tokens])).logits[0, -1]
    return (logits[torch.tensor(allowed)].double() / temperature).softmax(-1).numpy()


def test_under_rejection_tokens_have_the_masked_models_law(models, drafts_pay):
    """A chain that is drawn within the grammar and sent as if it were not, or the other way round, is accepted too
    often, or never; one that is judged without the mask leaves the grammar."""
    letters, count, temperature = list(range(64, 90)), 400, 2.0  # a to z
    firsts = shares_within(models[0], PROMPTS[0], letters, temperature)
    seconds = [shares_within(models[0], [*PROMPTS[0], first], letters, temperature) for first in letters]
    expected = count * firsts[:, None] * np.stack(seconds)
    local = engine(models, ("draft_model",), acceptance="rejection", batch_size=64)
    options = {"structured_outputs": {"regex": "[a-z][a-z]"}, "temperature": temperature, "seed": 1}
    answers = local.generate([PROMPTS[0]] * count, **options)
    found = np.zeros_like(expected)
    np.add.at(found, tuple(np.array([answer.token_ids for answer in answers]).T - letters[0]), 1)
    is_rare = expected < 3  # together
    counts, wanted = (np.append(one[~is_rare], one[is_rare].sum()) for one in (found, expected))
    assert len(counts) > 12
    assert chi_square_tail(float(((counts - wanted) ** 2 / wanted).sum()), len(counts) - 1) > 1e-3
    assert sum(sum(answer.accepted_tokens.values()) for answer in answers) > 50


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_drafts_within_the_grammar_save_rounds(models, drafts_pay, monkeypatch, acceptance):
    """Of a draft model that is the target itself, but for the mask."""
    options = {"structured_outputs": CONSTRAINTS["json"], "max_new_tokens": 24, **WAYS["sampled"]}
    rounds = []
    for _ in range(2):
        local = engine((models[0], models[0]), ("draft_model",), acceptance=acceptance)
        rounds.append(sum(answer.rounds for answer in local.generate(PROMPTS, **options)))
        monkeypatch.setattr(AnswerGrammars, "masks", lambda self, sequence, paths: None)
    assert rounds[0] < 0.6 * rounds[1]


def test_forced_tokens_save_rounds_cold(models, drafts_pay):
    local = engine(models, ("grammar",))
    answers = local.generate(PROMPTS, structured_outputs=CONSTRAINTS["json"], max_new_tokens=NEW_TOKENS)
    assert sum(answer.rounds for answer in answers) < 0.8 * sum(len(answer.token_ids) for answer in answers)


def test_choices_are_learnt(models, drafts_pay):
    local = engine(models, ("grammar",))
    options = {"structured_outputs": CONSTRAINTS["json"], "max_new_tokens": NEW_TOKENS}
    cold, warm = (sum(answer.rounds for answer in local.generate(PROMPTS, **options)) for _ in range(2))
    assert warm < 0.7 * cold


def test_a_prompt_that_is_cached_is_done_sooner_than_planned_and_masked_all_the_same(models):
    config = ClusterConfig.model_validate({"router": {"max_prefill_rows": 16}, "target": {"block_size": 4}})
    local = engine(models, ("none",), config=config)
    prompt = list(b"a prompt of some forty tokens, in chunks")
    options = {"structured_outputs": CONSTRAINTS["json"], "max_new_tokens": 8}
    first = local.generate([prompt], **options)[0]
    again = local.generate([prompt], **options)[0]
    assert again.token_ids == first.token_ids
    assert again.target_rows < first.target_rows - 30  # it was cached


def test_a_round_whose_answer_is_lost_while_a_prompt_is_computed_changes_no_token(models, monkeypatch):
    """The target has carried it out, so it finishes the prompt sooner than the router plans."""
    config = ClusterConfig.model_validate({"router": {"max_prefill_rows": 16}, "target": {"block_size": 4}})
    options = {"structured_outputs": CONSTRAINTS["json"], "max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    prompts = [list(f"prompt {name} of some forty tokens, in chunks".encode()) for name in ("one", "two")]
    whole = engine(models, ("none",))
    answers = [whole.generate([prompt], **options)[0].token_ids for prompt in prompts]
    local = engine(models, ("none",), config=config)
    verify = local._verify
    num_asked = lost = 0

    def lossy(batch: VerifyBatch) -> VerifyResult | None:
        nonlocal num_asked
        num_asked += 1
        result = verify(batch)
        return None if num_asked == lost else result

    monkeypatch.setattr(local, "_verify", lossy)
    for prompt, answer in zip(prompts, answers, strict=True):
        lost = num_asked + 2
        assert local.generate([prompt], **options)[0].token_ids == answer


def test_an_answer_ends_with_its_grammar_whoever_drafts_and_whatever_is_ignored(models, drafts_pay):
    local = engine(models, ("prediction",))
    options = {"structured_outputs": {"regex": "[0-9]{5}"}, "max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    plain = local.generate(PROMPTS, ignore_eos=True, drafters=("none",), **options)
    drafted = local.generate(PROMPTS, ignore_eos=True, predictions=[answer.token_ids for answer in plain], **options)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert {len(answer.token_ids) for answer in plain} == {5}
    assert sum(answer.rounds for answer in drafted) < sum(answer.rounds for answer in plain)
    empty = local.generate(PROMPTS[:1], structured_outputs={"regex": "()"}, ignore_eos=True)[0]
    assert (empty.token_ids, empty.finish_reason) == ([], "stop")


@pytest.mark.parametrize("way", [pytest.param("sampled", marks=pytest.mark.slow), "everything"])
@pytest.mark.parametrize("num_masked", [0, 1, 2])
def test_masks_that_are_too_complex_behind_a_node_cost_what_is_drawn_there(
    models, drafts_pay, monkeypatch, num_masked, way
):
    """The target has the whole draft by then, and draws from free rows behind these nodes."""
    local = engine(models, ("auto",))
    wanted = wanted_of(models, "json", way)
    masks = GrammarMatcher.masks

    def of_first_nodes(self: GrammarMatcher, tree: DraftTree) -> TreeMasks:
        found = masks(self, tree).masks
        index = found.index.copy()
        index[1 + num_masked :] = FREE_ROW
        return TreeMasks(TokenMasks(found.words, index), max(0, len(tree) - num_masked))

    monkeypatch.setattr(GrammarMatcher, "masks", of_first_nodes)
    options = {**WAYS[way], "structured_outputs": CONSTRAINTS["json"], "max_new_tokens": NEW_TOKENS}
    answers = local.generate(PROMPTS, predictions=[tokens for tokens, _ in wanted], **options)
    assert [(answer.token_ids, answer.finish_reason) for answer in answers] == wanted
    assert all(len(answer.token_ids) <= (1 + num_masked) * answer.rounds for answer in answers)
    assert sum(answer.draft_tokens for answer in answers) > (1 + num_masked) * sum(answer.rounds for answer in answers)


def test_no_time_to_look_behind_drafts_changes_no_token(models, drafts_pay, monkeypatch):
    monkeypatch.setattr(matcher_module, "MOST_AHEAD_S", 0.0)
    local = engine(models, ("auto",))
    wanted = wanted_of(models, "json", "sampled")
    assert answers_of(local, "json", "sampled", predictions=[tokens for tokens, _ in wanted]) == wanted


@pytest.mark.parametrize("most_items", [4, 10, 15])
def test_an_answer_that_becomes_too_complex_has_the_same_tokens_with_drafts_beyond_that_place(
    models, drafts_pay, monkeypatch, most_items
):
    """The limit is a real one: masks fail behind a draft's nodes first, then behind the answer itself."""
    monkeypatch.setattr(grammars_module, "LIMITS", few_items(most_items))
    unmasked: list[int] = []
    masks = GrammarMatcher.masks

    def noted(self: GrammarMatcher, tree: DraftTree) -> TreeMasks:
        found = masks(self, tree)
        unmasked.append(found.num_unmasked)
        return found

    monkeypatch.setattr(GrammarMatcher, "masks", noted)
    local = engine(models, ("prediction",))

    def delivered(index: int, *predictions: list[int]) -> list[int]:
        tokens: list[int] = []
        options = {"structured_outputs": {"grammar": HARD_TAIL}, "max_new_tokens": 30, "ignore_eos": True}
        pieces = local.stream(PROMPTS[index], predictions=predictions, temperature=1.0, seed=index, **options)
        with pytest.raises(InvalidRequest, match="too complex to be followed"):
            tokens.extend(token for piece in pieces for token in piece.token_ids)
        return tokens

    plain = [delivered(index) for index in range(len(PROMPTS))]
    assert all(plain)
    assert not any(unmasked)
    tails = make_byte_tokenizer().encode("ccxaaa")
    assert [delivered(index, [*tokens, *tails]) for index, tokens in enumerate(plain)] == plain
    assert any(unmasked)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_mask_that_is_left_out_at_one_row_is_noticed(models, drafts_pay, monkeypatch, row):
    """Of the root, or of the first or second draft node: what the tests above would say."""
    masks = GrammarMatcher.masks

    def without_one(self: GrammarMatcher, tree: DraftTree) -> TreeMasks:
        found = masks(self, tree).masks
        index = found.index.copy()
        index[row : row + 1] = FREE_ROW
        return TreeMasks(TokenMasks(found.words, index), 0)

    local = engine(models, ("auto",))
    wanted = wanted_of(models, "json", "sampled")
    options = {"predictions": [tokens for tokens, _ in wanted]}
    assert answers_of(local, "json", "sampled", **options) == wanted
    monkeypatch.setattr(GrammarMatcher, "masks", without_one)
    with pytest.raises(InvalidRequest, match="too complex to be followed"):
        answers_of(local, "json", "sampled", **options)
    monkeypatch.undo()
    assert answers_of(local, "json", "sampled", **options) == wanted  # nothing is left of the failed ones


@pytest.mark.parametrize("way", ["greedy", pytest.param("sampled", marks=pytest.mark.slow), "everything"])
def test_a_mask_that_is_left_out_behind_a_trigger_inside_a_draft_is_noticed(models, drafts_pay, monkeypatch, way):
    """Behind a trigger the grammar forces a token. Before it the answer is free, so nothing else is masked."""
    masks = GrammarMatcher.masks
    left_out: list[int] = []

    def without_one(self: GrammarMatcher, tree: DraftTree) -> TreeMasks:
        found = masks(self, tree).masks
        forced = np.flatnonzero(found.index[1:] < 0)
        if left_out or not len(forced):
            return TreeMasks(found, 0)
        left_out.append(int(forced[0]))
        index = found.index.copy()
        index[1 + forced[0]] = FREE_ROW
        return TreeMasks(TokenMasks(found.words, index), 0)

    local = engine(models, ("prediction",))
    wanted = wanted_of(models, "structural_tag", way)
    options = {"predictions": [tokens for tokens, _ in wanted]}
    assert answers_of(local, "structural_tag", way, **options) == wanted
    monkeypatch.setattr(GrammarMatcher, "masks", without_one)
    with pytest.raises(InvalidRequest, match="too complex to be followed"):
        answers_of(local, "structural_tag", way, **options)
    assert left_out
    monkeypatch.undo()
    assert answers_of(local, "structural_tag", way, **options) == wanted


def test_text_that_looks_like_a_special_token_is_spelled_with_ordinary_ones(models, drafts_pay):
    local = engine(models, ("auto",))
    for constraint in ({"choice": ["<|end|>a"]}, {"json": {"const": "<|end|>"}}, {"regex": r"b<\|end\|>"}):
        for drafters in (("none",), ("auto",)):
            (answer,) = local.generate(
                PROMPTS[:1],
                structured_outputs=constraint,
                max_new_tokens=40,
                drafters=drafters,
                temperature=1.0,
                seed=1,
            )
            assert "<|end|>" in answer.text
            assert answer.finish_reason == "stop"
            assert max(answer.token_ids) < EOS


def test_what_cannot_be_followed_is_refused_before_anything_is_computed(models):
    local = engine(models, ("none",))
    for given, field, reason in (
        ({"json": {"type": "foo"}}, "structured_outputs.json.type", "foo"),
        ({"regex": "[a"}, "structured_outputs.regex", "regex"),
        ({"grammar": "start: x"}, "structured_outputs.grammar", "unknown name"),
        ({"json": "{"}, "structured_outputs.json", "not valid JSON"),
        (
            {"json": {}, "regex": "a"},
            "structured_outputs",
            "exactly one of json, json_object, regex, choice, grammar and structural_tag",
        ),
        ({}, "structured_outputs", "exactly one of"),
        ({"choice": []}, "structured_outputs.choice", "at least 1 item"),
        ({"jsn": {}}, "structured_outputs.jsn", "no such parameter"),
    ):
        with pytest.raises(InvalidRequest, match=reason) as error:
            local.generate([PROMPTS[0]], structured_outputs=given)
        assert error.value.field == field


def test_an_answer_that_ends_by_its_grammar_is_valid(models, drafts_pay):
    local = engine(models, ("auto",))
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["alpha", "beta", None, 3]},
            "flags": {"type": "array", "items": {"type": "boolean"}},
        },
        "required": ["kind", "flags"],
        "additionalProperties": False,
    }
    no_spaces = tuple((space, -100.0) for space in b" \n\r\t")
    answers = local.generate(
        PROMPTS, structured_outputs={"json": schema}, max_new_tokens=150, temperature=1.5, seed=2, logit_bias=no_spaces
    )
    assert any(answer.finish_reason == "stop" for answer in answers)
    for answer in answers:
        if answer.finish_reason == "stop":
            assert set(json.loads(answer.text)) == {"kind", "flags"}

"""`GrammarMatcher` against a matcher that reads every path from the beginning."""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from actors.draft_tree import DraftTree
from actors.drafters.contract import DraftContext
from actors.drafters.registry import create_drafter
from actors.errors import InvalidRequest
from actors.grammar import grammars as grammars_module
from actors.grammar import matcher as matcher_module
from actors.grammar.grammars import Grammars
from actors.grammar.matcher import GrammarMatcher, TreeMasks
from actors.messages import FREE_ROW, SamplingParams
from paceline_testing.grammar_cases import GRAMMARS, HARD_TAIL, allowed_after, few_items, toy_grammars, unpacked
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer
from paceline_testing.toy_tokenizer import toy_tokenizer


def paths_of(tree: DraftTree) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def tree_of(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(len(tokens), np.float32))


@st.composite
def answers_with_trees(draw) -> tuple[str, list[int], DraftTree]:
    """A grammar, an answer that follows it, and a tree of tokens of which most are allowed."""
    grammars, vocab_size, _ = toy_grammars()
    text = GRAMMARS[draw(st.sampled_from(sorted(GRAMMARS)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    matcher = grammars.matcher(text)
    answer: list[int] = []
    for _ in range(draw(st.integers(0, 24))):
        token = int(rng.choice(matcher.allowed_tokens()))
        if matcher.is_complete:
            break
        assert matcher.follow([token])
        answer.append(token)
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        parent = int(rng.integers(-1, len(tokens)))
        path = paths_of(
            DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(len(tokens), np.float32))
        )
        allowed = allowed_after(grammars, text, answer + (path[parent] if parent >= 0 else []))
        token = int(rng.choice(allowed if allowed is not None and rng.random() < 0.8 else np.arange(vocab_size)))
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    return text, answer, tree_of(tokens, parents)


def standing_behind(text: str, answer: list[int]) -> GrammarMatcher:
    matcher = toy_grammars()[0].matcher(text)
    assert matcher.follow(answer)
    return matcher


@settings(max_examples=150, deadline=None)
@given(answers_with_trees())
def test_masks_and_pruning_are_those_of_each_path_alone(case: tuple[str, list[int], DraftTree]) -> None:
    text, answer, tree = case
    grammars, vocab_size, _ = toy_grammars()
    matcher = standing_behind(text, answer)
    expected = [allowed_after(grammars, text, answer + path) for path in [[], *paths_of(tree)]]
    masks = matcher.masks(tree).masks
    words = masks.words.reshape(-1, -(-vocab_size // 32))
    assert len({row.tobytes() for row in words}) == len(words)
    for index, allowed in zip(masks.index.tolist(), expected, strict=True):
        if allowed is None:
            assert index == FREE_ROW
        elif index >= 0:
            assert unpacked(words[index], vocab_size).tolist() == allowed.tolist()
        else:
            assert [-1 - index] == allowed.tolist()
    kept = [path for path, allowed in zip(paths_of(tree), expected[1:], strict=True) if allowed is not None]
    pruned = matcher.fitted(tree)
    assert paths_of(pruned) == kept
    assert pruned.is_valid(vocab_size)
    extended = matcher.fitted(tree, 6)
    assert paths_of(extended)[: len(kept)] == kept
    assert len(kept) <= len(extended) <= len(kept) + 6
    assert extended.is_valid(vocab_size)
    for path in paths_of(extended)[len(kept) :]:
        assert allowed_after(grammars, text, answer + path[:-1]).tolist() == [path[-1]]
        assert path[:1] in kept  # behind a node that was there
    assert matcher.allowed_tokens().tolist() == expected[0].tolist()  # it stands where it stood
    assert matcher.masks(tree).masks.index.tolist() == masks.index.tolist()


@settings(max_examples=60, deadline=None)
@given(answers_with_trees())
def test_forced_tokens_are_the_only_ones_allowed(case: tuple[str, list[int], DraftTree]) -> None:
    text, answer, _ = case
    forced = standing_behind(text, answer).forced_tokens()
    for count, token in enumerate(forced):
        assert allowed_after(toy_grammars()[0], text, answer + forced[:count]).tolist() == [token]


def test_an_answer_that_cannot_go_on_is_complete_and_only_its_end_may_follow() -> None:
    _, _, eos = toy_grammars()
    grammars, vocab_size, _ = toy_grammars()
    matcher = grammars.matcher(GRAMMARS["date"])
    for character in "2024-12-31":
        assert not matcher.is_complete
        token = next(t for t in matcher.allowed_tokens().tolist() if toy_text(t) == character)
        assert matcher.follow([token])
    assert matcher.is_complete
    assert matcher.allowed_tokens().tolist() == [eos]
    assert matcher.forced_tokens() == []
    assert unpacked(matcher.masks(DraftTree.empty()).masks.words, vocab_size).tolist() == [eos]


def test_text_of_a_special_token_is_spelled_the_same_by_a_draft_and_token_by_token() -> None:
    """Behind "<|start|" the tokenizer's next token reaches beyond the special token's text."""
    grammars = Grammars(lambda: byte_tokenizer_with(">", "a"), BYTE_VOCAB_SIZE + 1, [257], "bytes")
    text = LLMatcher.grammar_from_lark('start: "<|start|>ab"')
    answer: list[int] = []
    while (allowed := allowed_after(grammars, text, answer)) is not None and 257 not in allowed:
        assert len(allowed) == 1
        answer.append(int(allowed[0]))
    assert 256 in answer
    tree = tree_of(answer, list(range(-1, len(answer) - 1)))
    forced = grammars.matcher(text).forced_tokens()
    assert forced
    assert forced == answer[: len(forced)]
    matcher = grammars.matcher(text)
    extended = matcher.fitted(tree_of(answer[:1], [-1]), len(answer))
    assert extended.token_ids.tolist() == answer[: len(extended)]
    for looked in (matcher, grammars.matcher(text)):  # with what is known already, and without
        assert looked.masks(tree).masks.index[: len(answer)].tolist() == [-1 - token for token in answer]


def byte_tokenizer_with(first: str, second: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer, with these characters as token 256, before its special ones."""
    written = json.loads(make_byte_tokenizer().backend_tokenizer.to_str())
    written["model"]["vocab"][first + second] = 256
    written["model"]["merges"] = [[first, second]]
    for token in written["added_tokens"]:
        token["id"] += 1
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)), eos_token="<|end|>")


def toy_text(token: int) -> str:
    return str(toy_tokenizer().decode([token]))


def test_a_token_that_does_not_follow_is_refused_and_copies_go_their_own_way() -> None:
    matcher = standing_behind(GRAMMARS["choice"], [])
    copy = matcher.copy()
    assert copy.hash_of_allowed() == matcher.hash_of_allowed()
    assert copy.follow([int(copy.allowed_tokens()[0])])
    assert copy.hash_of_allowed() != matcher.hash_of_allowed()
    forbidden = next(token for token in range(300) if token not in matcher.allowed_tokens())
    assert not matcher.follow([forbidden])


def test_more_columns_than_tokens_are_never_allowed() -> None:
    _, width, _ = toy_grammars()
    grammars, vocab_size, _ = toy_grammars(width + 45)
    assert vocab_size == width + 45
    matcher = grammars.matcher(GRAMMARS["any object"])
    assert matcher.allowed_tokens().max() < width
    assert len(matcher.masks(DraftTree.empty()).masks.words) % -(-vocab_size // 32) == 0


@pytest.mark.parametrize(("most_items", "num_unmasked"), [(4, 5), (10, 3), (15, 2), (30, 0)])
def test_from_the_first_node_on_behind_which_a_mask_is_too_complex_there_are_none(
    monkeypatch, most_items: int, num_unmasked: int
) -> None:
    text = LLMatcher.grammar_from_lark(HARD_TAIL)
    tokenizer = make_byte_tokenizer()
    tree = tree_of([tokenizer.encode(char)[0] for char in "accxaaa"], [-1, -1, 1, 2, 3, 4, 5])

    def masks() -> TreeMasks:
        return Grammars(make_byte_tokenizer, BYTE_VOCAB_SIZE, [256], "bytes").matcher(text).masks(tree)

    wanted = masks()
    assert wanted.num_unmasked == 0
    monkeypatch.setattr(grammars_module, "LIMITS", few_items(most_items))
    found = masks()
    assert found.num_unmasked == num_unmasked
    width = -(-BYTE_VOCAB_SIZE // 32)
    rows = len(tree) + 1 - num_unmasked
    for place, expected in zip(found.masks.index[:rows].tolist(), wanted.masks.index[:rows].tolist(), strict=True):
        assert (place < 0) == (expected < 0)
        if place < 0:
            assert place == expected
        else:
            words, others = (one.masks.words.reshape(-1, width) for one in (found, wanted))
            assert words[place].tolist() == others[expected].tolist()
    assert set(found.masks.index[rows:].tolist()) <= {FREE_ROW}


AMBIGUOUS = LLMatcher.grammar_from_lark("start: e\ne: /[a-z]/ | e e | e e e")


def test_an_ambiguous_grammar_is_given_up_before_its_masks_are_slow() -> None:
    """Every token makes the next mask slower. With eight times the items and 49,000 tokens, one took 0.7 s."""
    matcher = toy_grammars()[0].matcher(AMBIGUOUS)
    token = toy_tokenizer().encode("x")[0]
    slowest, num_tokens = 0.0, 0
    while num_tokens < 130 and matcher.follow([token]):
        num_tokens += 1
        started = time.thread_time()
        matcher.masks(DraftTree.empty())
        slowest = max(slowest, time.thread_time() - started)
    assert 5 < num_tokens < 120
    assert slowest < 0.1


def test_an_object_of_400_optional_properties_is_not_too_complex() -> None:
    schema = {"type": "object", "properties": {f"property_{n}": {"type": ["string", "null"]} for n in range(400)}}
    matcher = toy_grammars()[0].matcher(LLMatcher.grammar_from_json_schema(schema))
    text = '{"property_7":"a","property_350":null,"property_399":"b"'
    for token in toy_tokenizer().encode(text):
        assert matcher.masks(DraftTree.empty()).num_unmasked == 0
        assert matcher.follow([token])


def test_when_the_time_to_look_ahead_is_up_only_the_root_has_a_mask_and_drafts_are_cut(monkeypatch) -> None:
    tokens = toy_tokenizer().encode('{"a":1}')
    tree = tree_of(tokens, list(range(-1, len(tokens) - 1)))
    wanted = standing_behind(GRAMMARS["any object"], []).masks(tree)
    monkeypatch.setattr(matcher_module, "MOST_AHEAD_S", 0.0)
    matcher = standing_behind(GRAMMARS["any object"], [])
    assert not matcher.has_time
    found = matcher.masks(tree)
    assert (wanted.num_unmasked, found.num_unmasked) == (0, len(tree))
    assert found.masks.index[0] == wanted.masks.index[0]
    assert set(found.masks.index[1:].tolist()) == {FREE_ROW}
    assert len(matcher.fitted(tree)) == 1
    assert matcher.follow(tokens)  # what the target has drawn goes on


def test_a_long_answer_of_another_router_is_followed_in_milliseconds() -> None:
    matcher = toy_grammars()[0].matcher(LLMatcher.grammar_from_regex("[a-z ]*"))
    answer = toy_tokenizer().encode("the quick brown fox jumps " * 2_000)
    started = time.thread_time()
    assert matcher.follow(answer)
    assert time.thread_time() - started < 0.1  # of which all but 0.01 s is for a slow machine


def test_a_long_answer_takes_no_more_memory_where_it_is_learnt_from() -> None:
    grammars, _, eos = toy_grammars()
    matcher = grammars.matcher(LLMatcher.grammar_from_regex("[a-z ]*"))
    drafter = create_drafter("grammar")
    rng = np.random.default_rng(0)
    answer: list[int] = []
    sizes: list[int] = []
    tracemalloc.start()
    for _ in range(600):
        known, tokens = len(answer), np.array([1, *answer], np.int32)
        sampling = SamplingParams(1)
        drafter.propose([DraftContext(7, tokens, known, 1, 4, sampling, namespace="a", grammar=matcher)])
        allowed = matcher.allowed_tokens()
        answer.append(int(rng.choice(allowed[allowed != eos])))
        assert matcher.follow(answer[-1:])
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    learnt = drafter.memory_bytes()
    assert learnt > 0  # choices were counted
    assert sizes[-1] - sizes[200] < 300_000


def test_where_the_answer_itself_is_too_complex_no_row_has_a_mask_and_no_token_follows(monkeypatch) -> None:
    monkeypatch.setattr(grammars_module, "LIMITS", few_items(4))
    matcher = Grammars(make_byte_tokenizer, BYTE_VOCAB_SIZE, [256], "bytes").matcher(
        LLMatcher.grammar_from_lark(HARD_TAIL)
    )
    tokens = [make_byte_tokenizer().encode(char)[0] for char in "ccx"]
    assert matcher.follow(tokens[:2])
    assert matcher.masks(tree_of(tokens[2:], [-1])).num_unmasked == 1
    assert not matcher.follow(tokens[2:])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"grammars": [{"json_schema": {"type": "foo"}}]}', "Invalid type: foo"),
        ('{"grammars": [{"json_schema": {"unevaluatedItems": false}}]}', "unevaluatedItems"),
        ("start: missing", 'unknown name: "missing"'),
        ("start: /[a/", "regex"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match="response_format") as error:
        toy_grammars()[0].matcher(text, "response_format")
    assert reason in str(error.value)

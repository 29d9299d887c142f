"""Draft models guess within the grammars of constrained answers, against masks by a matcher that reads from the
beginning.

Covers the masks of `actors.draft_model.guesser`, too.
"""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from actors.draft_model import answer_grammars
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_tree import DraftTree
from actors.engine.options import EngineOptions
from actors.errors import InvalidRequest
from actors.grammar import matcher as matcher_module
from actors.grammar.grammars import Grammars
from actors.grammar.matcher import GrammarMatcher
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from paceline_testing.grammar_cases import GRAMMARS, allowed_after
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer, make_tiny_model

EOS = 256
PROMPT = list(b"say oak")
SAMPLINGS = {
    "greedy": SamplingParams(1, temperature=0.0),
    "sampled": SamplingParams(2, temperature=1.2),
    "truncated": SamplingParams(3, temperature=0.9, top_p=0.9, repetition_penalty=1.2),
    "rejection": SamplingParams(4, temperature=1.2, acceptance="rejection"),
}
# Without the end of the answer
REDUCED = torch.tensor(
    sorted(make_byte_tokenizer().encode("".join(map(chr, range(32, 127))), add_special_tokens=False))
)


def new_grammars() -> Grammars:
    return Grammars(make_byte_tokenizer, BYTE_VOCAB_SIZE, [EOS], "tiny", are_checked=True)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """That know those of the tests."""
    grammars = new_grammars()
    for text in GRAMMARS.values():
        grammars.matcher(text)
    return grammars


@pytest.fixture(autouse=True)
def _time_for_all_masks(monkeypatch) -> None:
    monkeypatch.setattr(matcher_module, "MOST_AHEAD_S", 60.0)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_tiny_model("llama", seed=3, vocab_size=BYTE_VOCAB_SIZE, layers=2)


def engine_of(model: torch.nn.Module, grammars: Grammars | None, vocab_map: torch.Tensor | None = None, **options: Any):
    model = copy.deepcopy(model)
    if vocab_map is not None:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[vocab_map])
        model.lm_head.out_features = len(vocab_map)
    return DraftEngine(model, EngineOptions(512, 4), vocab_map, grammars=grammars, **options)


def item(sampling: SamplingParams, start: int, tokens: list[int], grammar: str, branch: int = 2) -> DraftItem:
    delta = SequenceDelta(1, start, np.array(tokens[start:], np.int32))
    begin = None if start else SequenceStart(sampling, len(PROMPT), grammar=grammar)
    return DraftItem(delta, 8, begin, max_depth=4, branch=branch)


def guesses_of(tree: DraftTree) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def refused(grammars: Grammars, grammar: str, answer: list[int], tree: DraftTree) -> int:
    """Guesses that the grammar does not allow. Nothing but the end follows the end."""
    paths = [[*answer, *path] for path in guesses_of(tree) if EOS not in path[:-1]]
    found = [allowed_after(grammars, grammar, path[:-1]) for path in paths]
    return sum(allowed is None or path[-1] not in allowed for path, allowed in zip(paths, found, strict=True))


def rounds(
    engine: DraftEngine, grammars: Grammars, sampling: SamplingParams, grammar: str
) -> list[tuple[list[int], DraftTree]]:
    """Answers so far, and drafts behind them. An answer goes on as guessed, or otherwise."""
    rng = np.random.default_rng(0)
    answer: list[int] = []
    found: list[tuple[list[int], DraftTree]] = []
    known = 0
    while len(found) < 5:
        tree = engine.draft(DraftBatch(len(found) + 1, [item(sampling, known, PROMPT + answer, grammar)])).trees[0]
        check_integrity(engine)
        while engine.work_ahead():
            pass
        found.append((list(answer), tree))
        known = len(PROMPT) + len(answer)
        guess = (guesses_of(tree) or [[]])[-1 if len(found) % 3 else 0]
        if EOS not in guess and not refused(grammars, grammar, answer, tree):
            answer += guess
        allowed = allowed_after(grammars, grammar, answer)
        assert allowed is not None
        token = int(rng.choice(allowed)) if len(allowed) else EOS
        if token == EOS:
            break
        answer.append(token)
    return found


@pytest.mark.parametrize("way", SAMPLINGS)
@pytest.mark.parametrize("vocab_map", [None, REDUCED], ids=["whole", "reduced"])
def test_every_guess_is_one_that_the_grammar_allows(model, grammars, way, vocab_map):
    for name in ("person", "date"):
        text = GRAMMARS[name]
        found = rounds(engine_of(model, grammars, vocab_map, ahead=2), grammars, SAMPLINGS[way], text)
        assert sum(len(tree) for _, tree in found) > len(found)
        assert [refused(grammars, text, *one) for one in found] == [0] * len(found)
        free = rounds(engine_of(model, None, vocab_map), grammars, SAMPLINGS[way], text)
        assert sum(refused(grammars, text, *one) for one in free) > 0


def masked_logits(model: torch.nn.Module, grammars: Grammars, text: str, answer: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + answer])).logits[0, -1]
    masked = torch.full_like(logits, -torch.inf)
    allowed = allowed_after(grammars, text, answer)
    masked[allowed] = logits[allowed]
    return masked


def test_a_greedy_chain_is_the_argmax_within_the_grammar(model, grammars):
    text = GRAMMARS["person"]
    engine = engine_of(model, grammars)
    (tree,) = engine.draft(DraftBatch(1, [item(SAMPLINGS["greedy"], 0, PROMPT, text, branch=1)])).trees
    wanted: list[int] = []
    for _ in range(4):
        wanted.append(int(masked_logits(model, grammars, text, wanted).argmax()))
    assert tree.token_ids.tolist() == wanted


def test_under_rejection_the_distribution_that_is_sent_is_the_masked_one(model, grammars):
    text, sampling = GRAMMARS["date"], SAMPLINGS["rejection"]
    engine = engine_of(model, grammars)
    (tree,) = engine.draft(DraftBatch(1, [item(sampling, 0, PROMPT, text)])).trees
    assert tree.probs is not None
    assert len(tree) == 4
    for place, path in enumerate(guesses_of(tree)):
        ids, shares = (part.reshape(4, -1)[place] for part in (tree.probs.token_ids, tree.probs.probs))
        wanted = (masked_logits(model, grammars, text, path[:-1]) / sampling.temperature).softmax(-1)
        assert np.allclose(shares, wanted[torch.from_numpy(ids.astype(np.int64))].numpy(), atol=1e-5)
        assert shares[ids == path[-1]] > 0


def test_until_a_new_grammar_is_compiled_and_where_it_is_refused_guesses_are_free(model, monkeypatch):
    grammars, may_compile = new_grammars(), threading.Event()
    matcher = Grammars.matcher

    def later(self: Grammars, *given: Any) -> Any:
        assert may_compile.wait(20)
        return matcher(self, *given)

    monkeypatch.setattr(Grammars, "matcher", later)
    free = engine_of(model, None).draft(DraftBatch(1, [item(SAMPLINGS["greedy"], 0, PROMPT, "")])).trees[0]
    text = GRAMMARS["date"]
    for given, may_be_masked in ((text, True), ("no grammar", False)):
        engine = engine_of(model, grammars)
        found = engine.draft(DraftBatch(1, [item(SAMPLINGS["greedy"], 0, PROMPT, given)])).trees[0]
        assert found.token_ids.tolist() == free.token_ids.tolist()
        may_compile.set()
        deadline, is_masked = time.monotonic() + (20 if may_be_masked else 0.2), False
        while not is_masked and time.monotonic() < deadline:
            found = engine.draft(DraftBatch(2, [item(SAMPLINGS["greedy"], 0, PROMPT, given)])).trees[0]
            is_masked = found.token_ids.tolist() != free.token_ids.tolist()
        assert is_masked == may_be_masked
    assert refused(grammars, text, [], free) > 0
    with pytest.raises(InvalidRequest):
        grammars.matcher("no grammar")


def test_an_answer_that_does_not_follow_its_grammar_is_drafted_for_as_a_free_one(model, grammars):
    answer = PROMPT + list(b"no date")
    found = []
    for engine, text in ((engine_of(model, grammars), GRAMMARS["date"]), (engine_of(model, None), "")):
        trees = [engine.draft(DraftBatch(1, [item(SAMPLINGS["greedy"], 0, PROMPT, text)])).trees[0]]
        trees += engine.draft(DraftBatch(2, [item(SAMPLINGS["greedy"], len(PROMPT), answer, text)])).trees
        found.append([tree.token_ids.tolist() for tree in trees])
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_grammars_of_fewer_tokens_than_the_model_has_are_ignored(grammars):
    wide = make_tiny_model("llama", seed=3, vocab_size=BYTE_VOCAB_SIZE + 1, layers=1)
    trees = [
        engine_of(wide, one).draft(DraftBatch(1, [item(SAMPLINGS["greedy"], 0, PROMPT, GRAMMARS["date"])])).trees[0]
        for one in (grammars, None)
    ]
    assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()


@pytest.mark.parametrize("way", ["greedy", "rejection"])
def test_masks_that_are_slow_are_given_up(model, grammars, monkeypatch, way):
    """Under rejection those behind drawn tokens, of a time that depends on these."""
    limit = "_SLOW_DRAWN_S" if way == "rejection" else "_SLOW_S"
    monkeypatch.setattr(answer_grammars, "_SLOW_S", 60.0)
    monkeypatch.setattr(answer_grammars, "_SLOW_DRAWN_S", 60.0)
    monkeypatch.setattr(answer_grammars, limit, 0.0)
    text, answer = GRAMMARS["date"], [int(allowed_after(grammars, GRAMMARS["date"], [])[0])]
    engine = engine_of(model, grammars)
    tree = engine.draft(DraftBatch(1, [item(SAMPLINGS[way], 0, PROMPT, text, branch=1)])).trees[0]
    num_masked = 4 if way == "rejection" else 3
    assert refused(grammars, text, [], tree) == len(tree) - num_masked
    tree = engine.draft(DraftBatch(2, [item(SAMPLINGS[way], len(PROMPT), PROMPT + answer, text, 1)])).trees[0]
    assert (tree.token_ids[0] in allowed_after(grammars, text, answer)) == (way == "rejection")
    assert refused(grammars, text, answer, tree) == 3 + (way != "rejection")


def test_a_mask_that_fails_costs_its_answers_masks_alone(model, grammars, monkeypatch):
    free = engine_of(model, None).draft(DraftBatch(1, [item(SAMPLINGS["greedy"], 0, PROMPT, "")])).trees[0]

    def fail(self: GrammarMatcher, paths: Any) -> None:
        raise ValueError

    monkeypatch.setattr(GrammarMatcher, "masks_behind", fail)
    engine = engine_of(model, grammars)
    found = engine.draft(DraftBatch(1, [item(SAMPLINGS["greedy"], 0, PROMPT, GRAMMARS["date"])])).trees[0]
    assert found.token_ids.tolist() == free.token_ids.tolist()


def test_grammars_of_answers_that_have_ended_are_not_compiled(model, monkeypatch):
    grammars, may_compile, compiled = new_grammars(), threading.Event(), []
    matcher = Grammars.matcher

    def later(self: Grammars, text: str) -> Any:
        assert may_compile.wait(20)
        compiled.append(text)
        return matcher(self, text)

    monkeypatch.setattr(Grammars, "matcher", later)
    engine = engine_of(model, grammars)
    texts = [GRAMMARS["date"], GRAMMARS["person"], GRAMMARS["date"]]
    for seq_id, text in enumerate(texts, 1):
        delta = SequenceDelta(seq_id, 0, np.array(PROMPT, np.int32))
        begin = SequenceStart(SAMPLINGS["greedy"], len(PROMPT), grammar=text)
        engine.draft(DraftBatch(seq_id, [DraftItem(delta, 4, begin, max_depth=2, branch=1)]))
    engine.draft(DraftBatch(4, [], [2]))
    may_compile.set()
    deadline = time.monotonic() + 20
    while len(compiled) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert compiled == [GRAMMARS["date"]] * 2

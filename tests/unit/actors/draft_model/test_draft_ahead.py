"""Drafting ahead of the request changes when a draft is made, never the draft."""

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_model.draft_ahead import DraftAhead, TreeShape
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.known_guesses import KnownGuesses
from actors.draft_tree import DraftTree
from actors.engine.options import EngineOptions
from actors.messages import DraftBatch, DraftItem, DraftResult, SamplingParams, SequenceDelta, SequenceStart
from paceline_testing.drafting import Path, count_forwards, paths_of
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model

VOCAB = 61
SHAPE = {"max_nodes": 8, "max_depth": 4, "branch": 2, "min_confidence": 0.08}
GREEDY = SamplingParams(seed=1, temperature=0.0)
PROMPT = list(range(3, 12))
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "presence_penalty": 1.5, "top_k": 20},
    {"temperature": 1.0, "acceptance": "rejection"},
]


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {kind: make_tiny_model(kind, seed=3, vocab_size=VOCAB, layers=2, sliding_window=6) for kind in TINY_KINDS}


@pytest.fixture(scope="module")
def oracles(models) -> dict[str, DraftEngine]:
    """Engines that are told every text from its start."""
    return {kind: DraftEngine(copy.deepcopy(model), EngineOptions(512, 4)) for kind, model in models.items()}


def engine_of(model: torch.nn.Module, num_blocks: int = 256, ahead: int = 4) -> DraftEngine:
    return DraftEngine(copy.deepcopy(model), EngineOptions(num_blocks, 4), ahead=ahead)


def item(seq_id: int, start: int, tokens: list[int], params: SamplingParams = GREEDY, **fields: Any) -> DraftItem:
    begin = None if start else SequenceStart(params, len(tokens))
    return DraftItem(SequenceDelta(seq_id, start, np.array(tokens, np.int32)), begin=begin, **(SHAPE | fields))


def ask(engine: DraftEngine, *items: DraftItem, finished: tuple[int, ...] = ()) -> DraftResult:
    result = engine.draft(DraftBatch(1, list(items), list(finished)))
    check_integrity(engine)
    return result


def work_ahead(engine: DraftEngine, most: int = 1000) -> int:
    """Forwards made, or tried."""
    for count in range(most):
        if not engine.work_ahead():
            return count
        check_integrity(engine)
    assert most < 1000, "no end"
    return most


def assert_same(found: DraftTree, wanted: DraftTree) -> None:
    assert_same_chances(*(dict(zip(paths_of(tree), tree.confidence, strict=True)) for tree in (found, wanted)))
    if wanted.probs is not None:
        assert found.probs is not None
        mine, its = (
            list(zip(tree.probs.token_ids.tolist(), tree.probs.probs, strict=True)) for tree in (found, wanted)
        )
        for start in range(0, len(its), wanted.probs.k):
            assert_same_chances(*(dict(one[start : start + wanted.probs.k]) for one in (mine, its)))


def assert_same_chances(mine: dict, its: dict) -> None:
    assert len(mine) == len(its)
    for key in mine.keys() | its.keys():
        if key in mine and key in its:
            assert mine[key] == pytest.approx(its[key], abs=1e-4)
        else:  # one of several that are as likely was the last to find room
            assert (mine | its)[key] == pytest.approx(min(its.values()), abs=1e-4)


def likely_outcomes(oracle: DraftEngine, text: list[int], params: SamplingParams) -> list[Path]:
    """Ends of accepted paths with one of the tokens that the draft model thinks likely behind them."""
    tree = ask(oracle, item(1, 0, text, params, max_nodes=30, branch=4)).trees[0]
    return paths_of(tree)


@dataclass
class Text:
    """A sequence as the router knows it."""

    tokens: list[int]
    params: SamplingParams
    num_prompt: int
    known: int = 0  # tokens its worker has been sent
    last: list[Path] = field(default_factory=list)  # nodes of the last draft


@pytest.mark.whole
@settings(max_examples=8)
@given(st.data())
def test_drafts_are_those_of_an_engine_that_is_told_each_text_from_its_start(models, oracles, data):
    kind = data.draw(st.sampled_from(TINY_KINDS))
    oracle = oracles[kind]
    engine = engine_of(models[kind], data.draw(st.sampled_from([24, 60, 256])), data.draw(st.sampled_from([1, 4, 20])))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    texts: dict[int, Text] = {}
    for _ in range(7):
        finished = [seq_id for seq_id in texts if random.random() < 0.05]
        for seq_id in finished:
            del texts[seq_id]
        while len(texts) < 3:
            params = SamplingParams(seed=int(random.integers(99)), **SAMPLINGS[random.integers(len(SAMPLINGS))])
            prompt = random.integers(3, VOCAB, random.integers(1, 40)).tolist()
            texts[int(random.integers(1 << 20))] = Text(prompt, params, len(prompt))
        items = []
        for seq_id, text in texts.items():
            if random.random() < 0.2:
                continue
            start = 0 if random.random() < 0.05 else min(text.known, len(text.tokens))
            start = start if random.random() < 0.95 or start < 2 else start - 1  # then it is stale
            shape = SHAPE if random.random() < 0.7 else {
                "max_nodes": int(random.integers(0, 12)),
                "max_depth": int(random.integers(0, 6)),
                "branch": int(random.integers(1, 4)),
                "method": "lookahead" if random.random() < 0.3 else "tree",
            }  # fmt: skip
            begin = None if start else SequenceStart(text.params, text.num_prompt)
            delta = SequenceDelta(seq_id, start, np.array(text.tokens[start:], np.int32))
            items.append(DraftItem(delta, begin=begin, **(SHAPE | shape)))
        result = ask(engine, *items, finished=tuple(finished))
        answered = dict(zip(result.seq_ids, result.trees, strict=True))
        for sent in items:
            seq_id, text = sent.delta.seq_id, texts[sent.delta.seq_id]
            tree = answered.get(seq_id)
            text.known = 0 if tree is None else len(text.tokens)
            text.last = [] if tree is None else paths_of(tree)
            if tree is not None and len(tree.token_ids) and sent.method == "tree":
                begin = SequenceStart(text.params, text.num_prompt)
                whole = DraftItem(
                    SequenceDelta(1, 0, np.array(text.tokens, np.int32)),
                    sent.max_nodes,
                    begin,
                    sent.max_depth,
                    sent.branch,
                    min_confidence=sent.min_confidence,
                )
                assert_same(tree, ask(oracle, whole).trees[0])
            if random.random() < 0.9:
                ends: list[Path] = [()]
                if text.last and random.random() < 0.8:
                    ends = text.last
                elif random.random() < 0.5 and text.params.acceptance != "rejection":
                    ends = likely_outcomes(oracle, text.tokens, text.params)
                text.tokens += [*ends[random.integers(len(ends))], *random.integers(3, VOCAB, random.integers(0, 2))]
        work_ahead(engine, int(random.integers(0, 12)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_likely_outcomes_find_their_draft_without_a_forward(models, oracles, kind, temperature):
    params = SamplingParams(seed=6, temperature=temperature)
    engine = engine_of(models[kind])
    rows = count_forwards(engine)
    text = list(PROMPT)
    start = 0
    ready = Counter[bool]()
    for _ in range(6):
        result = ask(engine, item(1, start, text[start:], params))
        assert_same(result.trees[0], ask(oracles[kind], item(1, 0, text, params)).trees[0])
        assert result.num_ahead == (start > 0)
        work_ahead(engine)
        # The outcome that is likeliest by the draft model: of what was not sent.
        sent = set(paths_of(result.trees[0]))
        tree = ask(oracles[kind], item(1, 0, text, params, max_nodes=40, max_depth=6, branch=4)).trees[0]
        likeliest = max(
            (path for path in paths_of(tree) if path not in sent and (len(path) == 1 or path[:-1] in sent)),
            key=dict(zip(paths_of(tree), tree.confidence.tolist(), strict=True)).__getitem__,
        )
        start = len(text)
        text += likeliest
        rows.clear()
        result = ask(engine, item(1, start, text[start:], params))
        ready[not rows] += 1
        assert result.num_ready == (not rows)
        work_ahead(engine)
        start = len(text)
        text += [*paths_of(result.trees[0])[-1], 5 if text[-1] != 5 else 6]
    assert ready[True] >= 5


def test_a_partly_grown_outcome_is_grown_on(models, oracles):
    outcome = list(_first_outcome(models["llama"]))
    forwards = []
    for done in (0, 2, 1000):
        engine = engine_of(models["llama"])
        ask(engine, item(1, 0, PROMPT))
        work_ahead(engine, done)
        rows = count_forwards(engine)
        result = ask(engine, item(1, len(PROMPT), outcome))
        assert_same(result.trees[0], ask(oracles["llama"], item(1, 0, [*PROMPT, *outcome])).trees[0])
        forwards.append(len(rows))
    assert forwards[0] > forwards[1] > forwards[2] == 0


def _first_outcome(model: torch.nn.Module) -> Path:
    engine = engine_of(model)
    ask(engine, item(1, 0, PROMPT))
    work_ahead(engine, 2)
    growths = engine._ahead[1].plan._growths
    assert growths is not None
    return growths[0][1].base


def test_a_failure_ahead_costs_only_what_was_drafted_ahead(models, oracles):
    engine = engine_of(models["llama"])
    outcome = list(_first_outcome(models["llama"]))
    ask(engine, item(1, 0, PROMPT), item(2, 0, PROMPT[:4]))
    forward = engine._runner.forward
    for num_made in (0, 2):
        work_ahead(engine, num_made)

        def failing(batch, logit_rows):
            raise RuntimeError("a bug")

        engine._runner.forward = failing  # type: ignore[method-assign]
        assert not engine.work_ahead()
        assert not engine.work_ahead()
        engine._runner.forward = forward  # type: ignore[method-assign]
        check_integrity(engine)
        start = len(PROMPT) + (len(outcome) if num_made else 0)
        text = [*PROMPT, *outcome, *([9] if num_made else [])]
        result = ask(engine, item(1, start, text[start:]))
        assert (result.stale_seq_ids, result.num_ahead) == ([], 0)
        assert_same(result.trees[0], ask(oracles["llama"], item(1, 0, text)).trees[0])


@pytest.mark.parametrize("ahead", [4, 30])
def test_whoever_has_room_without_work_ahead_has_it_with(models, ahead):
    """The pool holds what two sequences need, and little more."""
    room = 2 * -(-(len(PROMPT) + 30 + 4 * SHAPE["max_nodes"]) // 4)
    plain, engine = engine_of(models["llama"], room, 0), engine_of(models["llama"], room, ahead)
    outcome = _first_outcome(models["llama"])
    texts = {1: list(PROMPT), 2: list(PROMPT)}
    starts = {1: 0, 2: 0}
    for _ in range(6):
        batch = [item(seq_id, starts[seq_id], text[starts[seq_id] :]) for seq_id, text in texts.items()]
        wanted, found = ask(plain, *batch), ask(engine, *batch)
        assert (found.seq_ids, found.stale_seq_ids) == (wanted.seq_ids, [])
        assert all(len(tree.token_ids) for tree in wanted.trees)
        for tree, same in zip(found.trees, wanted.trees, strict=True):
            assert_same(tree, same)
        work_ahead(engine)
        starts = {seq_id: len(text) for seq_id, text in texts.items()}
        texts = {seq_id: [*text, *outcome] for seq_id, text in texts.items()}
    # A third one takes what is left over, and what is held for outcomes.
    tokens = [5] * (4 * plain.pool.num_free - 32)
    assert engine.pool.num_free * 4 < len(tokens)
    assert [len(ask(one, item(3, 0, tokens)).trees[0].token_ids) > 0 for one in (plain, engine)] == [True, True]


def test_drafts_ahead_end_with_the_positions(caplog):
    model = make_tiny_model("gpt2", seed=3, vocab_size=VOCAB, layers=2, max_positions=24)
    oracle, engine = engine_of(model, ahead=0), engine_of(model, ahead=8)
    text = list(PROMPT)
    start = 0
    while len(text) <= 24:
        tree = ask(engine, item(1, start, text[start:])).trees[0]
        assert_same(tree, ask(oracle, item(1, 0, text)).trees[0])
        work_ahead(engine)
        start = len(text)
        text += paths_of(tree)[0]
    assert not caplog.records  # a row beyond the last position would be a logged failure


def test_a_sequence_that_has_ended_or_is_not_a_tree_is_not_drafted_ahead_for(models):
    engine = engine_of(models["llama"])
    rejection = SamplingParams(seed=1, temperature=1.0, acceptance="rejection")
    ask(engine, item(1, 0, PROMPT, rejection), item(2, 0, PROMPT, method="lookahead"), item(3, 0, PROMPT, max_nodes=0))
    assert work_ahead(engine) == 0
    ask(engine, item(4, 0, PROMPT))
    ask(engine, finished=(4,))
    assert work_ahead(engine) == 0
    ask(engine, item(4, 0, PROMPT))
    engine.clear()
    assert work_ahead(engine) == 0
    plain = engine_of(models["llama"], ahead=0)
    ask(plain, item(1, 0, PROMPT))
    assert work_ahead(plain) == 0


def test_kv_of_accepted_nodes_is_moved_after_a_failure_ahead(models, monkeypatch, caplog):
    engine, oracle = engine_of(models["llama"], ahead=8), engine_of(models["llama"], ahead=0)
    ask(engine, item(1, 0, PROMPT))
    work_ahead(engine)
    (known,) = engine._known.values()
    accepted = list(known.nodes)[1]  # comes after another node, and all of the next draft is known behind it
    ask(engine, item(1, len(PROMPT), list(accepted)))
    kv = engine._runner.kv
    assert kv.waiting_moves.size

    def without_memory(moves: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(kv, "copy_slots", without_memory)
        engine.work_ahead()
    assert "drafting ahead failed" in caplog.text
    text = [*PROMPT, *accepted]
    tree = ask(engine, item(1, len(text), [7])).trees[0]
    assert_same(tree, ask(oracle, item(1, 0, [*text, 7])).trees[0])


def test_the_likeliest_outcomes_are_taken_and_no_end_is_computed_that_cannot_have_one():
    sent = DraftTree(
        np.array([5, 6, 7], np.int32), np.array([-1, 0, -1], np.int32), np.array([0.7, 0.42, 0.03], np.float32)
    )
    known = KnownGuesses(3)
    known.add((), [(5, 0.7), (7, 0.03), (8, 0.025), (9, 0.005)])
    known.add((5,), [(6, 0.6), (4, 0.3), (3, 0.1)])
    plan = DraftAhead(sent, known, TreeShape(8, 1, 2), 10, 3)
    (ends,) = plan.wanted()
    # Behind 7 nothing can be likelier than 0.07, and three outcomes may be: 5 4 with 0.21, 5 3 with 0.07, 8 with 0.025.
    assert (ends.paths, ends.chance) == ([(5, 6), (7,)], pytest.approx(0.42))
    known.add((5, 6), [(1, 0.9), (2, 0.08), (3, 0.02)])
    known.add((7,), [(1, 0.9)])
    assert [wanted.paths for wanted in plan.wanted()] == [[(5, 6, 1)], [(5, 4)], [(5, 3)]]
    assert [wanted.chance for wanted in plan.wanted()] == pytest.approx([0.378, 0.21, 0.07])
    for path in ((5, 6, 1), (5, 4), (5, 3)):
        known.add(path, [(1, 0.5)])
    assert plan.wanted() == []


def test_what_is_known_behind_committed_tokens_is_kept():
    known = KnownGuesses(1)
    for path in ((), (5,), (7,), (5, 6), (7, 1), (5, 6, 2), (5, 3)):
        known.add(path, [(len(path), 0.5)])
    assert known.follow((5, 9)) is None
    assert known.follow(()) is None
    assert known.follow((5,)) == ([0], [2, 4, 5])
    check_integrity(known)
    assert known.nodes == {(6,): 0, (6, 2): 1, (3,): 2}
    assert known.guesses == {(): [(1, 0.5)], (6,): [(2, 0.5)], (6, 2): [(3, 0.5)], (3,): [(2, 0.5)]}
    tokens, parents = known.arrays([(6, 4), (8,)])
    assert (tokens.tolist(), parents.tolist()) == ([6, 2, 3, 4, 8], [-1, 0, -1, 0, -1])

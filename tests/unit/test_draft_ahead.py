"""Drafting ahead of the request changes when a draft is made, never the draft."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.engine.draft_ahead import DraftAhead, TreeShape
from actors.engine.draft_engine import DraftEngine
from actors.engine.known_guesses import KnownGuesses
from actors.engine.options import EngineOptions
from actors.messages import (
    DraftBatch,
    DraftItem,
    DraftResult,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    TreeMessage,
    no_tokens,
)
from actors.models.toy import TINY_KINDS, make_tiny_model

VOCAB = 61
SHAPE = {"max_nodes": 8, "max_depth": 4, "branch": 2}
GREEDY = SamplingParams(seed=1, temperature=0.0)
PROMPT = list(range(3, 12))
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "presence_penalty": 1.5, "top_k": 20},
    {"temperature": 1.0, "acceptance": "rejection"},
]

Path = tuple[int, ...]


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {kind: make_tiny_model(kind, seed=3, vocab_size=VOCAB, layers=2, sliding_window=6) for kind in TINY_KINDS}


@pytest.fixture(scope="module")
def oracles(models) -> dict[str, DraftEngine]:
    """Engines that are told every text from its start."""
    return {kind: DraftEngine(copy.deepcopy(model), EngineOptions(512, 4)) for kind, model in models.items()}


def engine_of(model: torch.nn.Module, num_blocks: int = 256, ahead: int = 4) -> DraftEngine:
    return DraftEngine(copy.deepcopy(model), EngineOptions(num_blocks, 4), ahead=ahead)


def counting(engine: DraftEngine) -> list[int]:
    """Rows of each forward from now on."""
    rows: list[int] = []
    forward = engine._runner.forward

    def counted(batch, logit_rows):
        rows.append(batch.num_rows)
        return forward(batch, logit_rows)

    engine._runner.forward = counted  # type: ignore[method-assign]
    return rows


def item(seq_id: int, start: int, tokens: list[int], params: SamplingParams = GREEDY, **fields: Any) -> DraftItem:
    begin = None if start else SequenceStart(params, len(tokens))
    return DraftItem(SequenceDelta(seq_id, start, np.array(tokens, np.int32)), begin=begin, **(SHAPE | fields))


def ask(engine: DraftEngine, *items: DraftItem, finished: tuple[int, ...] = ()) -> DraftResult:
    result = engine.draft(DraftBatch(1, list(items), list(finished)))
    assert engine.check_integrity() is None
    return result


def work_ahead(engine: DraftEngine, most: int = 1000) -> int:
    """Forwards made, or tried."""
    for count in range(most):
        if not engine.work_ahead():
            return count
        assert engine.check_integrity() is None
    assert most < 1000, "no end"
    return most


def paths_of(tree: TreeMessage) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def assert_same(found: TreeMessage, wanted: TreeMessage) -> None:
    mine, its = (dict(zip(paths_of(tree), tree.confidence.tolist(), strict=True)) for tree in (found, wanted))
    assert len(mine) == len(its)
    for path in mine.keys() | its.keys():
        if path in mine and path in its:
            assert mine[path] == pytest.approx(its[path], abs=1e-4)
        else:  # one of several that are as likely was the last to find room
            assert (mine | its)[path] == pytest.approx(min(its.values()), abs=1e-4)
    if wanted.probs is not None:
        assert found.probs is not None
        assert found.probs.token_ids.tolist() == wanted.probs.token_ids.tolist()


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


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_drafts_are_those_of_an_engine_that_is_told_each_text_from_its_start(models, oracles, data):
    kind = data.draw(st.sampled_from(TINY_KINDS))
    oracle = oracles[kind]
    engine = engine_of(models[kind], data.draw(st.sampled_from([24, 60, 256])), data.draw(st.sampled_from([1, 4, 20])))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    texts: dict[int, Text] = {}
    num_ready = 0
    for _ in range(8):
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
        num_ready += result.num_ready
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
                )
                assert_same(tree, ask(oracle, whole).trees[0])
            if random.random() < 0.9:
                ends: list[Path] = [()]
                if text.last and random.random() < 0.8:
                    ends = text.last
                elif random.random() < 0.5 and not text.params.acceptance == "rejection":
                    ends = likely_outcomes(oracle, text.tokens, text.params)
                text.tokens += [*ends[random.integers(len(ends))], *random.integers(3, VOCAB, random.integers(0, 2))]
        work_ahead(engine, int(random.integers(0, 12)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_likely_outcomes_find_their_draft_without_a_forward(models, oracles, kind, temperature):
    params = SamplingParams(seed=6, temperature=temperature)
    engine = engine_of(models[kind])
    rows = counting(engine)
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

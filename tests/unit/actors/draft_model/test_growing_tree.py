"""Trees of the draft model: the same nodes and confidences as brute force with the unpatched model finds."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.growing_tree import ROOT, GrowingTree, most_computed
from actors.draft_tree import DraftTree, depths_of
from actors.draft_worth import no_worth
from actors.engine.options import EngineOptions
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart, no_tokens
from actors.sampling import noise
from paceline_testing.drafting import Path, count_forwards, paths_of
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model

VOCAB = 61
MAX_EXPANDED = 4
PROMPTS = [list(range(3, 3 + count)) for count in (1, 9, 30)]
REDUCED = torch.tensor([token for token in range(VOCAB) if token % 3])

Candidates = Callable[[Path], list[tuple[int, float]]]


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {kind: make_tiny_model(kind, seed=3, vocab_size=VOCAB, layers=2, sliding_window=6) for kind in TINY_KINDS}


def candidates_of(
    model: torch.nn.Module, text: list[int], num_prompt: int, params: SamplingParams, branch: int, ids: torch.Tensor
) -> Candidates:
    """The best tokens behind a path with their probabilities, by the whole text through the model and the formula."""

    def candidates(path: Path) -> list[tuple[int, float]]:
        with torch.no_grad():
            scores = model(torch.tensor([[*text, *path]])).logits[0, -1, ids].double()
        for token in {*text[num_prompt:], *path}:
            scores[ids == token] -= params.presence_penalty
        if not params.is_greedy:
            seed, position = torch.tensor([params.seed]), torch.tensor([len(text) + len(path)])
            scores += params.temperature * noise.gumbel(seed, position, ids)[0]
        best, columns = scores.softmax(0).sort(descending=True)
        return list(zip(ids[columns[:branch]].tolist(), best[:branch].tolist(), strict=True))

    return candidates


def brute_force(candidates: Candidates, max_nodes: int, max_depth: int, min_confidence: float) -> dict[Path, float]:
    confidence: dict[Path, float] = {}
    expanded: set[Path] = set()
    for step in range(max_depth):
        best = sorted(confidence, key=lambda path: -confidence[path])[: max_nodes - 1]
        sure = [path for path in best if path not in expanded and confidence[path] >= min_confidence]
        for path in sure[:MAX_EXPANDED] if step else [()]:
            expanded.add(path)
            for token, share in candidates(path):
                confidence[(*path, token)] = confidence.get(path, 1.0) * share
    best = sorted(confidence, key=lambda path: -confidence[path])[:max_nodes]
    return {path: confidence[path] for path in best}


def assert_is(tree: DraftTree, wanted: dict[Path, float]) -> None:
    assert (np.diff(tree.confidence) <= 0).all()
    found = dict(zip(paths_of(tree), tree.confidence.tolist(), strict=True))
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, abs=1e-4)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 0.9, "presence_penalty": 1.5},
]


@pytest.mark.parametrize("vocab_map", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        pytest.param(kind, sampling, marks=() if kind == "llama" or sampling is SAMPLINGS[-1] else pytest.mark.slow)
        for kind in TINY_KINDS
        for sampling in SAMPLINGS
    ],
)
def test_trees_are_those_of_brute_force_also_after_a_sibling_was_accepted(models, kind, sampling, vocab_map):
    branch, max_nodes, max_depth = 3, 10, 4
    model = copy.deepcopy(models[kind])
    if vocab_map is not None:
        head = model.get_output_embeddings()
        reduced = torch.nn.Linear(head.in_features, len(vocab_map), bias=False)
        reduced.weight = torch.nn.Parameter(head.weight[vocab_map].clone(), requires_grad=False)
        model.set_output_embeddings(reduced)
    engine = DraftEngine(model, EngineOptions(64, 4), vocab_map)
    ids = torch.arange(VOCAB) if vocab_map is None else vocab_map
    texts = [list(prompt) for prompt in PROMPTS]
    params = [SamplingParams(seed=seed, **sampling) for seed in range(len(texts))]
    known = [0] * len(texts)
    through_siblings = 0
    for round_id, min_confidence in enumerate((0.0, 0.08, 0.3, 0.02)):
        items = [
            DraftItem(
                SequenceDelta(index, known[index], np.array(text[known[index] :], np.int32)),
                max_nodes,
                SequenceStart(params[index], len(PROMPTS[index])) if not round_id else None,
                max_depth,
                branch,
                min_confidence=min_confidence,
            )
            for index, text in enumerate(texts)
        ]
        result = engine.draft(DraftBatch(round_id, items))
        assert result.stale_seq_ids == []
        for index, (text, tree) in enumerate(zip(texts, result.trees, strict=True)):
            candidates = candidates_of(models[kind], text, len(PROMPTS[index]), params[index], branch, ids)
            assert_is(tree, brute_force(candidates, max_nodes, max_depth, min_confidence))
            known[index] = len(text)
            # Another path each round, then a token of the target's own.
            paths = paths_of(tree)
            taken = max(paths, key=lambda path: (len(path), paths.index(path)))
            through_siblings += tree.parents[paths.index(taken)] != paths.index(taken) - 1
            text += [*taken, 7 + round_id]
        check_integrity(engine)
    assert through_siblings


@pytest.mark.parametrize("share", [0.0, 1.0, 3.0, 30.0])
def test_a_forward_for_several_sequences_is_made_where_their_nodes_together_pay(models, share):
    def chains(number, worth):
        items = []
        for index, prompt in enumerate(PROMPTS[:2]):
            begin = SequenceStart(SamplingParams(seed=1), len(prompt))
            items.append(DraftItem(SequenceDelta(2 * number + index, 0, np.array(prompt, np.int32)), 6, begin))
        return engine.draft(DraftBatch(number, items, worth=worth))

    engine = DraftEngine(copy.deepcopy(models["llama"]), EngineOptions(64, 4))
    full = chains(0, no_worth())
    assert full.num_forwards == 6
    cut = chains(1, np.array([0.0, 1.0, 0.0, share], np.float32))  # a node brings `share` times its confidence
    paid = share * (full.trees[0].confidence + full.trees[1].confidence)
    wanted = next((level for level in range(1, 6) if paid[level - 1] < 1.0), 6)
    assert cut.num_forwards == wanted
    for tree, whole in zip(cut.trees, full.trees, strict=True):
        assert tree.token_ids.tolist() == whole.token_ids[:wanted].tolist()


def test_the_kv_of_an_accepted_path_is_kept_and_of_others_dropped(models):
    model = copy.deepcopy(models["llama"])
    engine = DraftEngine(model, EngineOptions(64, 4))
    rows = count_forwards(engine)
    prompt = np.array(PROMPTS[1], np.int32)
    begin = SequenceStart(SamplingParams(seed=1, temperature=0.0), len(prompt))
    tree = engine.draft(DraftBatch(1, [DraftItem(SequenceDelta(1, 0, prompt), 12, begin, 3, 3)])).trees[0]
    assert rows[0] == len(prompt)
    assert max(rows[1:]) > 1
    assert len(rows) == 3  # one forward for each depth
    rows.clear()
    depths = depths_of(tree.parents)
    deep = int(np.flatnonzero((depths == 2) & np.isin(np.arange(len(depths)), tree.parents))[-1])
    path = np.array([*paths_of(tree)[deep], 5], np.int32)
    engine.draft(DraftBatch(2, [DraftItem(SequenceDelta(1, len(prompt), path), 1)]))
    assert rows == [1]  # only the target's own token is new
    engine.draft(DraftBatch(3, [DraftItem(SequenceDelta(1, len(prompt) + 3, path[:2]), 0)]))
    assert rows == [1, 1]


def test_one_sibling_is_the_chain_that_is_drawn_by_itself(models):
    def tree(branch: int, max_nodes: int, temperature: float) -> DraftTree:
        engine = DraftEngine(copy.deepcopy(models["llama"]), EngineOptions(64, 4))
        begin = SequenceStart(SamplingParams(seed=5, temperature=temperature), 9)
        delta = SequenceDelta(1, 0, np.array(PROMPTS[1], np.int32))
        return engine.draft(DraftBatch(1, [DraftItem(delta, max_nodes, begin, 4, branch)])).trees[0]

    for temperature in (0.0, 1.0):
        chain = tree(1, 4, temperature)
        assert chain.parents.tolist() == list(range(-1, len(chain.parents) - 1))
        assert paths_of(chain)[0] in paths_of(tree(4, 16, temperature))
        assert paths_of(tree(4, 16, temperature))[0] == paths_of(chain)[0]
        assert len(tree(4, 16, temperature).token_ids) > len(chain.token_ids)


def test_masked_tokens_are_no_guesses(models):
    engine = DraftEngine(copy.deepcopy(models["llama"]), EngineOptions(64, 4))
    begin = SequenceStart(SamplingParams(seed=5, temperature=1.0, top_k=1), 9)
    item = DraftItem(SequenceDelta(1, 0, np.array(PROMPTS[1], np.int32)), 16, begin, 4, 4)
    tree = engine.draft(DraftBatch(1, [item])).trees[0]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert tree.confidence.tolist() == [1.0] * 4


def test_rejection_has_a_chain_whatever_is_asked_for(models):
    engine = DraftEngine(copy.deepcopy(models["llama"]), EngineOptions(64, 4))
    params = SamplingParams(seed=5, temperature=1.0, top_k=4, acceptance="rejection")
    begin = SequenceStart(params, 9)
    coupled = SequenceStart(SamplingParams(seed=5, temperature=1.0), 9)
    delta = SequenceDelta(1, 0, np.array(PROMPTS[1], np.int32))
    both = [DraftItem(delta, 12, begin, 3, 4), DraftItem(SequenceDelta(2, 0, delta.token_ids), 12, coupled, 3, 4)]
    chain, tree = engine.draft(DraftBatch(1, both)).trees
    assert chain.parents.tolist() == list(range(-1, len(chain.parents) - 1))
    assert 1 <= len(chain.token_ids) <= 3
    assert chain.probs is not None
    assert len(chain.probs.probs) == chain.probs.k * len(chain.token_ids)
    assert tree.probs is None
    assert len(tree.token_ids) > 3


def test_a_tree_without_room_is_empty(models):
    engine = DraftEngine(copy.deepcopy(models["llama"]), EngineOptions(3, 4))
    begin = SequenceStart(SamplingParams(seed=5, temperature=0.0), 9)
    prompt = np.array(PROMPTS[1], np.int32)
    wide = engine.draft(DraftBatch(1, [DraftItem(SequenceDelta(1, 0, prompt), 16, begin, 4, 4)]))
    assert (wide.seq_ids, len(wide.trees[0].token_ids)) == ([1], 0)
    chain = engine.draft(DraftBatch(2, [DraftItem(SequenceDelta(1, 9, no_tokens()), 3)]))
    assert len(chain.trees[0].token_ids) >= 1
    check_integrity(engine)


@settings(max_examples=200)
@given(st.integers(0, 20), st.integers(0, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_a_growing_tree_is_always_valid_and_has_the_most_probable_of_its_nodes(max_nodes, max_depth, branch, seed):
    rng = np.random.default_rng(seed)
    tree = GrowingTree(max_nodes, max_depth, branch)
    steps = 0
    computed: list[Path] = []
    while nodes := tree.expandable():
        computed += [tuple(tree.path(node)) for node in nodes if node != ROOT]
        assert all(len(path) == 1 or path[:-1] in computed for path in computed)
        tree.begin_step(nodes)
        steps += 1
        for node in nodes:
            shares = np.sort(rng.dirichlet(np.full(8, 0.3)))[::-1][:branch]
            for token, share in enumerate(shares.tolist()):
                tree.add(node, token, share)
    finished = tree.finished()
    assert steps <= max_depth
    assert len(set(computed)) == len(computed) <= most_computed(max_nodes, max_depth, branch)
    assert finished.is_valid(8)
    assert len(finished) == min(len(tree), max_nodes)
    assert (np.diff(finished.confidence) <= 0).all()
    assert not len(finished) or depths_of(finished.parents).max() <= max_depth
    if branch == 1:
        assert finished.parents.tolist() == list(range(-1, len(finished) - 1))

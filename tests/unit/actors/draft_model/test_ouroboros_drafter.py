"""Lookahead on a draft model: its drafts are the model's own draws, whatever the phrases and the window are."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.ouroboros_drafter import OuroborosDraft, _Learnt
from actors.draft_tree import DraftTree
from actors.draft_worth import no_worth
from actors.engine.options import EngineOptions
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from actors.options import LookaheadOptions
from actors.sampling import noise
from paceline_testing.drafting import count_forwards, paths_of
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model

VOCAB = 61
GAMMA = 4
GREEDY = SamplingParams(seed=1, temperature=0.0)
PROMPTS = [list(range(3, 3 + count)) for count in (1, 9, 30)]
REDUCED = torch.tensor([token for token in range(VOCAB) if token % 3])
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.3, "top_k": 6, "presence_penalty": 1.5},
]


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {
        kind: make_tiny_model(kind, seed=3, vocab_size=VOCAB, layers=2, sliding_window=6, max_positions=160)
        for kind in TINY_KINDS
    }


class Drawing:
    """A model's next token behind a whole text, by the formula."""

    def __init__(self, model: torch.nn.Module, params: SamplingParams, num_prompt: int, ids: torch.Tensor) -> None:
        self.model, self.params, self.num_prompt, self.ids = model, params, num_prompt, ids

    def next_token(self, text: list[int]) -> int:
        with torch.no_grad():
            scores = self.model(torch.tensor([text])).logits[0, -1, self.ids].double()
        for token in set(text[self.num_prompt :]):
            scores[self.ids == token] -= self.params.presence_penalty
        if self.params.is_greedy:
            return int(self.ids[scores.argmax()])
        scores /= self.params.temperature
        if self.params.top_k:
            scores[scores < scores.topk(self.params.top_k).values[-1]] = -torch.inf
        seed, position = torch.tensor([self.params.seed]), torch.tensor([len(text)])
        return int(self.ids[(scores + noise.gumbel(seed, position, self.ids)[0]).argmax()])

    def continuation(self, text: list[int], count: int) -> list[int]:
        longer = list(text)
        for _ in range(count):
            longer.append(self.next_token(longer))
        return longer[len(text) :]


def engine_of(
    models: dict[str, torch.nn.Module],
    options: LookaheadOptions | None = None,
    *,
    kind: str = "llama",
    num_slots: int = 256,
) -> DraftEngine:
    return DraftEngine(copy.deepcopy(models[kind]), EngineOptions(num_slots, 4), lookahead=options)


def item(seq_id: int, text: list[int], known: int, params: SamplingParams, num_prompt: int, **fields: Any) -> DraftItem:
    fields = {"max_nodes": 16, "max_depth": GAMMA} | fields
    namespace = fields.pop("namespace", "")
    begin = None if known else SequenceStart(params, num_prompt, namespace)
    delta = SequenceDelta(seq_id, known, np.array(text[known:], np.int32))
    return DraftItem(delta, begin=begin, method="lookahead", **fields)


def children_of(tree: DraftTree, node: int) -> dict[int, int]:
    return {int(tree.token_ids[child]): int(child) for child in np.flatnonzero(tree.parents == node)}


def chain_of(tree: DraftTree) -> list[int]:
    """Tokens from the root on, as long as there is one only."""
    chain: list[int] = []
    node = -1
    while len(below := children_of(tree, node)) == 1:
        ((token, node),) = below.items()
        chain.append(token)
    return chain


def leaf_paths(tree: DraftTree) -> list[list[int]]:
    return [list(path) for node, path in enumerate(paths_of(tree)) if node not in tree.parents]


def reduced_head(model: torch.nn.Module, ids: torch.Tensor) -> torch.nn.Module:
    model = copy.deepcopy(model)
    head = model.get_output_embeddings()
    reduced = torch.nn.Linear(head.in_features, len(ids), bias=False)
    reduced.weight = torch.nn.Parameter(head.weight[ids].clone(), requires_grad=False)
    model.set_output_embeddings(reduced)
    return model


@pytest.mark.parametrize(
    ("kind", "vocab_map", "sampling"),
    [
        pytest.param(
            kind, vocab_map, sampling, marks=() if kind == "llama" or sampling is SAMPLINGS[-1] else pytest.mark.slow
        )
        for kind, vocab_map in [*((kind, None) for kind in TINY_KINDS), ("llama", REDUCED)]
        for sampling in SAMPLINGS
    ],
)  # how tokens are drawn does not depend on the kind
def test_the_chain_is_what_the_model_draws_whatever_was_accepted(models, kind, sampling, vocab_map):
    model = copy.deepcopy(models[kind]) if vocab_map is None else reduced_head(models[kind], vocab_map)
    ids = torch.arange(VOCAB) if vocab_map is None else vocab_map
    engine = DraftEngine(model, EngineOptions(256, 4), vocab_map)
    rows = count_forwards(engine)
    rng = np.random.default_rng(1)
    texts = [list(prompt) for prompt in PROMPTS]
    params = [SamplingParams(seed=seed, **sampling) for seed in range(len(texts))]
    drawing = [Drawing(models[kind], one, len(p), ids) for one, p in zip(params, PROMPTS, strict=True)]
    known = [0] * len(texts)
    drafted = 0
    for round_id in range(8):
        items = [
            item(index, text, known[index], params[index], len(PROMPTS[index])) for index, text in enumerate(texts)
        ]
        result = engine.draft(DraftBatch(round_id, items))
        assert result.seq_ids == [0, 1, 2]
        check_integrity(engine)
        for index, tree in enumerate(result.trees):
            assert tree.is_valid(VOCAB)
            assert (np.diff(tree.confidence) <= 0).all()
            assert GAMMA <= len(tree.token_ids) <= 16
            wanted = drawing[index].continuation(texts[index], GAMMA)
            assert chain_of(tree)[:GAMMA] == wanted
            drafted += GAMMA
            known[index] = len(texts[index])
            paths = leaf_paths(tree)
            if round_id % 4 == 3:  # something else comes
                texts[index] += [*wanted[: int(rng.integers(GAMMA))], int(rng.integers(VOCAB))]
            elif round_id % 4 == 2:  # a phrase behind the chain is right
                texts[index] += [*paths[int(rng.integers(len(paths)))], 1]
            else:
                texts[index] += drawing[index].continuation(texts[index], GAMMA + 1)
    assert len(rows) <= drafted / len(texts)  # never more forwards than one for each token
    check_integrity(engine._ouroboros.pool)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_under_rejection_the_chain_is_greedy_for_every_seed_beside_drafts_that_are_drawn(models, sampling):
    """Noise that a chain knew could decide how late it is, and so which rule judges the tokens of that noise."""
    engine = engine_of(models)
    penalty = {"presence_penalty": sampling.get("presence_penalty", 0.0)}
    without = SamplingParams(seed=0, temperature=0.0, **penalty)
    params = [SamplingParams(seed=seed, **sampling, acceptance="rejection") for seed in range(3)]
    params.append(SamplingParams(seed=3, **sampling))
    drawing = [Drawing(models["llama"], one, 9, torch.arange(VOCAB)) for one in (*[without] * 3, params[3])]
    texts, known = [list(PROMPTS[1]) for _ in params], [0] * len(params)
    for round_id in range(4):
        items = [item(i, text, known[i], params[i], 9) for i, text in enumerate(texts)]
        for index, tree in enumerate(engine.draft(DraftBatch(round_id, items)).trees):
            assert tree.probs is None
            wanted = drawing[index].continuation(texts[index], GAMMA)
            assert chain_of(tree)[:GAMMA] == wanted
            known[index] = len(texts[index])
            texts[index] += [*wanted[:round_id], (7 * round_id + index) % VOCAB]
        check_integrity(engine)


@pytest.mark.parametrize("by", ["confidence", "worth"])
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
def test_no_forward_is_made_after_an_unlikely_chain_and_later_drafts_are_right(models, sampling, by):
    engine = engine_of(models)
    params = SamplingParams(seed=3, **sampling)
    drawing = Drawing(models["llama"], params, 9, torch.arange(VOCAB))
    text, known = list(PROMPTS[1]), 0
    rows = count_forwards(engine)
    forwards = []
    for round_id, least in enumerate((0.0, 1.0, 0.2, 1.0, 0.5, 0.0, 1.0, 0.0)):
        rows.clear()
        fields = {"min_confidence": least} if by == "confidence" else {}
        share = 0.0 if least == 1.0 else 1.0  # of a forward's price, that a sure node brings
        worth = np.array([0.0, 1.0, 0.0, share], np.float32) if by == "worth" and least else no_worth()
        result = engine.draft(DraftBatch(round_id, [item(1, text, known, params, 9, **fields)], worth=worth))
        (tree,) = result.trees
        assert result.num_forwards == len(rows)
        check_integrity(engine)
        wanted = drawing.continuation(text, GAMMA)
        chain = chain_of(tree)
        assert chain[0] == wanted[0]
        if least == 0.0:
            assert chain[:GAMMA] == wanted
        forwards.append((least, len(rows)))
        known = len(text)
        text += drawing.continuation(text, 2)
    assert all(count == 1 for least, count in forwards if least == 1.0)  # what it draws is less than sure
    assert max(count for least, count in forwards if least == 0.0) > 1


def test_a_text_that_repeats_itself_is_drafted_in_few_forwards(models):
    engine = engine_of(models)
    drawing = Drawing(models["llama"], GREEDY, 9, torch.arange(VOCAB))
    line = [*PROMPTS[1], *drawing.continuation(PROMPTS[1], 60)]
    engine.draft(DraftBatch(1, [item(1, line, 0, GREEDY, 9, max_nodes=0)]))  # the pool learns from what is committed
    rows = count_forwards(engine)
    (tree,) = engine.draft(DraftBatch(2, [item(2, line[:20], 0, GREEDY, 9)])).trees
    assert chain_of(tree)[:GAMMA] == line[20:24]
    assert len(rows) == 1
    assert tree.token_ids.tolist()[: len(chain_of(tree))] == line[20 : 20 + len(chain_of(tree))]
    assert any(line[20:28] == path[:8] for path in leaf_paths(tree))  # the suffix behind the chain is right, too


def test_what_turned_out_right_is_not_computed_again(models):
    engine = engine_of(models)
    drawing = Drawing(models["llama"], GREEDY, 9, torch.arange(VOCAB))
    text, known = list(PROMPTS[1]), 0
    rows = count_forwards(engine)
    for round_id in range(0, 16, 2):
        (tree,) = engine.draft(DraftBatch(round_id, [item(1, text, known, GREEDY, 9)])).trees
        known = len(text)
        text += drawing.continuation(text, GAMMA + 1)
        assert chain_of(tree)[:GAMMA] == text[known : known + GAMMA]
        rows.clear()
        engine.draft(DraftBatch(round_id + 1, [item(1, text, known, GREEDY, 9, max_nodes=0)]))
        assert sum(rows) <= 1  # of five tokens: the draft's last; the target's own waits for the next draft
        known = len(text)
        text.append(drawing.next_token(text))


def test_a_batch_of_several_is_each_alone(models):
    options = LookaheadOptions(keep_phrases=False)
    params = SamplingParams(seed=7, temperature=0.8)

    def trees(*indices: int) -> list[list[DraftTree]]:
        engine = engine_of(models, options, kind="qwen3")
        texts = {index: list(PROMPTS[index]) for index in indices}
        known = dict.fromkeys(indices, 0)
        found = []
        for round_id in range(8):
            items = [item(i, text, known[i], params, len(PROMPTS[i]), max_nodes=64) for i, text in texts.items()]
            result = engine.draft(DraftBatch(round_id, items))
            check_integrity(engine)
            found.append(result.trees)
            for index, tree in zip(indices, result.trees, strict=True):
                known[index] = len(texts[index])
                texts[index] += [*chain_of(tree)[: round_id % 4 + 1], round_id]
        return found

    together = trees(0, 1, 2)
    for index in range(3):
        alone = trees(index)
        for (one,), several in zip(alone, together, strict=True):
            assert sorted(leaf_paths(one)) == sorted(leaf_paths(several[index]))


def test_phrases_outlive_a_request_unless_that_is_turned_off_and_stay_in_their_namespace(models):
    line = [*PROMPTS[1], *Drawing(models["llama"], GREEDY, 9, torch.arange(VOCAB)).continuation(PROMPTS[1], 40)]

    def forwards(keep: bool, namespace: str) -> int:
        engine = engine_of(models, LookaheadOptions(keep_phrases=keep))
        engine.draft(DraftBatch(1, [item(1, line, 0, GREEDY, 9, max_nodes=0, namespace="a")]))
        engine.draft(DraftBatch(2, [], [1]))
        rows = count_forwards(engine)
        engine.draft(DraftBatch(3, [item(2, PROMPTS[1], 0, GREEDY, 9, namespace=namespace)]))
        return len(rows)

    assert forwards(True, "a") == 1
    assert forwards(False, "a") == forwards(True, "b") == forwards(False, "b") > 1


def test_what_the_target_had_in_mind_at_a_refused_draft_is_drafted_next(models):
    phrase = [60, 58, 60, 58]

    def tree(texts: np.ndarray, num_suffixes: int) -> DraftTree:
        engine = engine_of(models, LookaheadOptions(num_suffixes=num_suffixes))
        one = item(1, PROMPTS[1], 0, GREEDY, 9, max_nodes=40, corrections=texts)
        (found,) = engine.draft(DraftBatch(1, [one])).trees
        check_integrity(engine)
        return found

    nothing = np.array([], np.int32)
    chain = chain_of(tree(nothing, 0))
    text = np.array([1, 2, -1, chain[-1], *phrase, -1], np.int32)  # of which the first is too short for a phrase
    assert [*chain, *phrase] not in leaf_paths(tree(nothing, 3))
    assert [*chain, *phrase] in leaf_paths(tree(text, 3))
    assert chain_of(tree(text, 0)) == chain


def test_phrases_of_refused_drafts_are_kept_as_others_are(models):
    texts = np.array([50, 51, 52, 53, 54, 55, -1, 40, 41, 42, 43, 44], np.int32)

    def pool_after(**options: Any) -> tuple[DraftEngine, list[Any]]:
        engine = engine_of(models, LookaheadOptions(**options))
        first = item(1, PROMPTS[1], 0, GREEDY, 9, namespace="a")
        other = item(2, PROMPTS[1], 0, GREEDY, 9, namespace="a")
        engine.draft(DraftBatch(1, [first, other]))
        engine.draft(DraftBatch(2, [item(1, [*PROMPTS[1], 1], 9, GREEDY, 9, corrections=texts)]))
        states = engine._ouroboros._states
        return engine, [states[engine._table.get(seq_id)].scope for seq_id in (1, 2)]

    engine, scopes = pool_after()
    pool = engine._ouroboros.pool
    assert scopes == ["a", "a"]
    assert (51, 52, 53, 54) in pool.newest("a", 50, 5)
    assert (52, 53, 54, 55) in pool.newest("a", 51, 5)
    assert (41, 42, 43, 44) in pool.newest("a", 40, 5)
    assert not pool.newest("b", 50, 5)
    engine.draft(DraftBatch(3, [], dropped=["a"]))
    assert not pool.newest("a", 50, 5)
    engine, (mine, others) = pool_after(keep_phrases=False)
    assert (51, 52, 53, 54) in engine._ouroboros.pool.newest(mine, 50, 5)
    assert (51, 52, 53, 54) not in engine._ouroboros.pool.newest(others, 50, 5)


@pytest.mark.parametrize(
    "texts",
    [
        np.array([1, 2, 3, 4, VOCAB, 5, 6, 7, 8, -1], np.int32),
        np.array([2**31 - 1] * 9, np.int32),
        np.array([-1, -7, -(2**31), -1], np.int32),
        np.array([1, 2, 3, 4, -1, 5, 6, 7, 8, -1], np.int32),
        np.array([1.0, 2.0, 3.0, 4.0, 5.0, np.nan, -1.0], np.float32),
    ],
    ids=["beyond the vocabulary", "far beyond it", "negative", "too short", "no integers"],
)
def test_texts_of_refused_drafts_that_cannot_be_learnt_are_left_out(models, texts):
    trees, sizes = [], []
    for corrections in (np.array([], np.int32), texts):
        engine = engine_of(models)
        one = item(1, PROMPTS[1], 0, GREEDY, 9, corrections=corrections)
        trees.append(leaf_paths(engine.draft(DraftBatch(1, [one])).trees[0]))
        sizes.append(len(engine._ouroboros.pool))
        check_integrity(engine)
    assert trees[0] == trees[1]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_draft_ends_with_so_many_phrases_of_the_pool_the_newest(models, count):
    engine = engine_of(models, LookaheadOptions(num_suffixes=count))
    pool = engine._ouroboros.pool
    rng = np.random.default_rng(0)
    for token in range(VOCAB):
        for _ in range(5):
            pool.insert("", token, tuple(rng.integers(0, VOCAB, pool.length).tolist()))
    (tree,) = engine.draft(DraftBatch(1, [item(1, PROMPTS[1], 0, GREEDY, 9, max_nodes=40)])).trees
    paths = leaf_paths(tree)
    chain = paths[0][: len(paths[0]) - pool.length] if count else paths[0]
    assert len(chain) >= GAMMA
    assert chain == Drawing(models["llama"], GREEDY, 9, torch.arange(VOCAB)).continuation(PROMPTS[1], len(chain))
    newest = pool.newest("", chain[-1], count)
    assert len(newest) == count
    assert sorted(paths) == sorted([*chain, *phrase] for phrase in newest or [()])


def test_suffixes_come_with_the_confidence_that_they_have_earned(models):
    engine = engine_of(models)
    drawing = Drawing(models["llama"], GREEDY, 9, torch.arange(VOCAB))
    line = [*PROMPTS[1], *drawing.continuation(PROMPTS[1], 100)]
    engine.draft(DraftBatch(1, [item(1, line, 0, GREEDY, 9, max_nodes=0)]))
    before = list(engine._ouroboros._learnt.of("").suffix_shares)
    text, known = list(PROMPTS[1]), 0
    for round_id in range(6):
        engine.draft(DraftBatch(2 + round_id, [item(2, text, known, GREEDY, 9)]))
        known, text = len(text), line[: len(text) + 14]
    after = engine._ouroboros._learnt.of("").suffix_shares
    assert after[1] > before[1]  # the phrases come from this very text
    assert all(0.0 < share < 1.0 for share in after)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_chains_confidence_is_how_often_such_tokens_are_right(models, is_right):
    """The model's greedy tokens have small shares. Where they are right all the same, chains say so in the end."""
    engine = engine_of(models)
    drawing = Drawing(models["llama"], GREEDY, 9, torch.arange(VOCAB))
    text, known, said = list(PROMPTS[1]), 0, []
    for round_id in range(40):
        (tree,) = engine.draft(DraftBatch(round_id, [item(1, text, known, GREEDY, 9)])).trees
        said.append(float(tree.confidence[0]))
        known, right = len(text), drawing.continuation(text, 2)
        text += right if is_right else [(right[0] + 1) % VOCAB]
    assert np.median(said[-10:]) > 0.75 if is_right else np.median(said[-10:]) < 0.3


@pytest.mark.parametrize("power", [0.1, 1.0, 3.0])
def test_a_power_of_the_draft_models_probabilities_is_learnt(power):
    rng, learnt, powers = np.random.default_rng(0), _Learnt([]), []
    for share in rng.uniform(0.05, 1.0, 4000):
        learnt.judge(-np.log(share), rng.random() < share**power)
        powers.append(learnt.power)
    assert np.log(powers[1000:]).mean() == pytest.approx(np.log(power), abs=0.2)


def test_a_forward_is_taken_to_bring_what_forwards_have_brought_on_average():
    """Also part of a token."""
    draft = OuroborosDraft(None, 16, 16, chain=[1] * 10, confidence=0.25)
    draft.num_forwards = 10
    for usual_yield, weights in ((1.0, [1.0]), (1.7, [1.0, 0.2]), (4.5, [1.0, 1.0]), (5.2, [1.0, 1.0, 0.2])):
        confidences, found = draft.next_confidences(usual_yield)
        assert found == pytest.approx(weights)
        assert confidences == pytest.approx([0.25, 0.25**1.1, 0.25**1.2][: len(weights)])


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_drafts_go_on_to_the_models_last_position(models, kind):
    engine = engine_of(models, kind=kind)
    drawing = Drawing(models[kind], GREEDY, 9, torch.arange(VOCAB))
    text = [*PROMPTS[1], *drawing.continuation(PROMPTS[1], 140)]
    known = 0
    while len(text) < 160:
        left = 160 - len(text)
        (tree,) = engine.draft(DraftBatch(1, [item(1, text, known, GREEDY, 9, max_nodes=min(left, 16))])).trees
        count = min(GAMMA, left)
        assert chain_of(tree)[:count] == drawing.continuation(text, count)
        known = len(text)
        text += drawing.continuation(text, 3)[:left]
    check_integrity(engine)


def test_a_draft_without_room_is_empty_and_the_next_one_is_not(models):
    engine = engine_of(models, num_slots=16)
    full = engine.draft(DraftBatch(1, [item(1, PROMPTS[2], 0, GREEDY, 30)]))
    assert (full.seq_ids, len(full.trees[0].token_ids)) == ([1], 0)
    check_integrity(engine)
    result = engine.draft(DraftBatch(2, [item(2, PROMPTS[0], 0, GREEDY, 1)], [1]))
    assert len(result.trees[0].token_ids) >= GAMMA
    check_integrity(engine)
    gone = engine.draft(DraftBatch(3, [item(1, PROMPTS[2], 12, GREEDY, 30)], [2]))
    assert gone.stale_seq_ids == [1]
    assert engine.pool.num_free == engine.pool.num_blocks


def test_masked_tokens_are_no_guesses(models):
    engine = engine_of(models)
    only = SamplingParams(seed=1, temperature=1.0, top_k=1)
    (chain,) = engine.draft(DraftBatch(1, [item(1, PROMPTS[1], 0, only, 9)])).trees
    assert chain.confidence[:GAMMA].tolist() == [1.0] * GAMMA
    assert chain.probs is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"window_size": 0}, "window_size\n.*greater than or equal to 1"),
        ({"window_size": 65}, "window_size\n.*less than or equal to 64"),
        ({"lookahead_level": 1}, "lookahead_level\n.*greater than or equal to 2"),
        ({"guess_set_size": 0}, "guess_set_size is 0; it must be from 1 to 64, or -1"),
        ({"guess_set_size": -2}, "guess_set_size\n.*greater than or equal to -1"),
        ({"num_suffixes": 17}, "num_suffixes\n.*less than or equal to 16"),
        ({"pool_phrases": 0}, "pool_phrases\n.*greater than or equal to 1"),
    ],
)
def test_options_have_limits_that_the_error_names(options, problem):
    with pytest.raises(ValidationError, match=problem):
        LookaheadOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        LookaheadOptions(window_size=1, lookahead_level=2, guess_set_size=1, num_suffixes=0),
        LookaheadOptions(window_size=1, lookahead_level=6, guess_set_size=1, num_suffixes=1),
        LookaheadOptions(window_size=9, lookahead_level=2, guess_set_size=-1, num_suffixes=16),
        LookaheadOptions(window_size=20, lookahead_level=7, guess_set_size=20, pool_phrases=5),
    ],
    ids=str,
)
def test_any_shape_of_window_drafts_the_models_own_tokens(models, options):
    engine = engine_of(models, options, kind="qwen3")
    params = SamplingParams(seed=5, temperature=0.5)
    drawing = Drawing(models["qwen3"], params, 9, torch.arange(VOCAB))
    text, known = list(PROMPTS[1]), 0
    for round_id in range(6):
        (tree,) = engine.draft(DraftBatch(round_id, [item(1, text, known, params, 9)])).trees
        assert chain_of(tree)[:GAMMA] == drawing.continuation(text, GAMMA)
        assert len(tree.token_ids) <= 16
        check_integrity(engine)
        known = len(text)
        text += drawing.continuation(text, 3)

"""Drafts of parallel models: those of the unpatched model with mask tokens after the text, from one forward."""

import copy
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from actors.build import build_draft_engine
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_tree import DraftTree
from actors.engine.options import EngineOptions
from actors.errors import ModelError
from actors.messages import DraftBatch, DraftItem, DraftResult, SamplingParams, SequenceDelta, SequenceStart
from actors.models.catalog import resolve_model
from actors.options import DraftOptions
from actors.sampling import noise
from paceline_testing.drafting import Path, count_forwards, paths_of
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model, save_tiny_model

VOCAB, MASK = 61, 60
PROMPTS = [list(range(3, 3 + count)) for count in (1, 9, 30)]
GREEDY = SamplingParams(seed=1, temperature=0.0)
SHAPE = {"max_nodes": 10, "max_depth": 5, "branch": 3}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "presence_penalty": 1.5}]


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {kind: make_tiny_model(kind, seed=3, vocab_size=VOCAB, layers=2, sliding_window=6) for kind in TINY_KINDS}


def engine_of(model: torch.nn.Module, num_blocks: int = 256, ahead: int = 0) -> DraftEngine:
    return DraftEngine(copy.deepcopy(model), EngineOptions(num_blocks, 4), ahead=ahead, mask_token=MASK)


def item(seq_id: int, start: int, tokens: list[int], params: SamplingParams = GREEDY, **fields: Any) -> DraftItem:
    begin = None if start else SequenceStart(params, len(tokens))
    return DraftItem(SequenceDelta(seq_id, start, np.array(tokens, np.int32)), begin=begin, **(SHAPE | fields))


def ask(engine: DraftEngine, *items: DraftItem) -> DraftResult:
    result = engine.draft(DraftBatch(1, list(items)))
    check_integrity(engine)
    assert result.is_parallel
    return result


def mask_logits(model: torch.nn.Module, text: list[int], depth: int) -> torch.Tensor:
    """By the unpatched model: logits of the next `depth` tokens, float32 [depth, V]."""
    with torch.no_grad():
        logits = model(torch.tensor([[*text, *[MASK] * (depth - 1)]])).logits
    return logits[0, -depth:].float()


def plain_tree(
    model: torch.nn.Module,
    text: list[int],
    num_prompt: int,
    params: SamplingParams,
    *,
    max_nodes: int = 10,
    max_depth: int = 5,
    branch: int = 3,
    min_confidence: float = 0.0,
) -> dict[Path, float]:
    """The likeliest of all paths of one of the best tokens at each position."""
    levels = []
    for ahead, scores in enumerate(mask_logits(model, text, max_depth).double()):
        for token in {*text[num_prompt:]}:
            scores[token] -= params.presence_penalty
        if not params.is_greedy:
            seed, position = torch.tensor([params.seed]), torch.tensor([len(text) + ahead])
            scores += params.temperature * noise.gumbel(seed, position, torch.arange(VOCAB))[0]
        best, tokens = scores.softmax(0).topk(branch)
        levels.append(list(zip(tokens.tolist(), best.tolist(), strict=True)))
    found: dict[Path, float] = {}
    for depth in range(1, max_depth + 1):
        for pairs in itertools.product(*levels[:depth]):
            shares = np.cumprod([share for _, share in pairs])
            if depth == 1 or shares[-2] >= min_confidence:
                found[tuple(token for token, _ in pairs)] = shares[-1]
    return {path: found[path] for path in sorted(found, key=lambda path: -found[path])[:max_nodes]}


def assert_is(tree: DraftTree, wanted: dict[Path, float]) -> None:
    found = dict(zip(paths_of(tree), tree.confidence.tolist(), strict=True))
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, abs=1e-4)


def work_ahead(engine: DraftEngine) -> None:
    for _ in range(100):
        if not engine.work_ahead():
            return
        check_integrity(engine)
    raise AssertionError("no end")


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_logits_of_mask_tokens_are_those_of_the_unpatched_model(models, kind):
    engine = engine_of(models[kind])
    computed: list[torch.Tensor] = []
    forward = engine._runner.forward

    def kept(batch, logit_rows):
        computed.append(forward(batch, logit_rows))
        return computed[-1]

    engine._runner.forward = kept  # type: ignore[method-assign]
    text, known = list(PROMPTS[1]), 0
    for new in ([], [7], [8, 9, 10]):
        text += new
        ask(engine, item(1, known, text[known:]))
        known = len(text)
        torch.testing.assert_close(computed[-1], mask_logits(models[kind], text, 5), atol=2e-4, rtol=0)
    assert len(computed) == 3


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_trees_of_a_batch_are_the_likeliest_paths_and_take_one_forward(models, kind, sampling):
    engine = engine_of(models[kind])
    rows = count_forwards(engine)
    texts = [list(prompt) for prompt in PROMPTS]
    params = [SamplingParams(seed=seed, **sampling) for seed in range(len(texts))]
    known = [0] * len(texts)
    for min_confidence in (0.0, 0.1, 0.02):
        new = [text[start:] for text, start in zip(texts, known, strict=True)]
        result = ask(
            engine,
            *(item(i, known[i], new[i], params[i], min_confidence=min_confidence) for i in range(len(texts))),
        )
        assert rows == [sum(map(len, new)) + 4 * len(texts)]  # only new tokens and mask tokens
        rows.clear()
        known = [len(text) for text in texts]
        for i, (text, tree) in enumerate(zip(texts, result.trees, strict=True)):
            wanted = plain_tree(models[kind], text, len(PROMPTS[i]), params[i], min_confidence=min_confidence)
            assert_is(tree, wanted)
            text += [*paths_of(tree)[-1], 7]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_drafts_made_ahead_are_those_made_on_request(models, kind, temperature):
    engine = engine_of(models[kind], ahead=6)
    params = SamplingParams(seed=4, temperature=temperature)
    text, start, ready = list(PROMPTS[1]), 0, 0
    for turn in range(12):
        result = ask(engine, item(1, start, text[start:], params))
        ready += result.num_ready
        assert_is(result.trees[0], plain_tree(models[kind], text, len(PROMPTS[1]), params))
        work_ahead(engine)
        start = len(text)
        if turn % 3 == 2:  # a token that nothing was drafted for
            text.append(next(token for token in range(50) if (token,) not in paths_of(result.trees[0])))
            continue
        (ahead,) = engine._known.values()
        drafted = [path for path in ahead.guesses if path and path not in paths_of(result.trees[0])]
        text += drafted[turn % len(drafted)]
    assert ready == 8


def test_ahead_computes_only_new_tokens_and_forgets_mask_tokens(models):
    engine = engine_of(models["llama"], ahead=6)
    ask(engine, item(1, 0, PROMPTS[1]))
    work_ahead(engine)
    (known,) = engine._known.values()
    (sequence,) = engine._known
    assert MASK not in sequence.tree_tokens
    assert sequence.tree_tokens.tolist() == [path[-1] for path in known.nodes]
    # On the way to a drafted outcome, but not one itself: its KV is kept, and its next token is guessed anew.
    inner = next(path for path in known.nodes if path not in known.guesses)
    rows = count_forwards(engine)
    text = [*PROMPTS[1], *inner]
    tree = ask(engine, item(1, len(PROMPTS[1]), list(inner))).trees[0]
    assert rows == [1 + 4]
    assert_is(tree, plain_tree(models["llama"], text, len(PROMPTS[1]), GREEDY))


def test_rejection_sends_a_chain_with_the_distribution_of_each_position(models):
    params = SamplingParams(seed=5, temperature=1.0, acceptance="rejection")
    tree = ask(engine_of(models["llama"]), item(1, 0, PROMPTS[1], params)).trees[0]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    assert tree.probs is not None
    found = np.zeros((5, VOCAB))
    for depth in range(5):
        part = slice(depth * tree.probs.k, (depth + 1) * tree.probs.k)
        found[depth, tree.probs.token_ids[part]] = tree.probs.probs[part]
    wanted = mask_logits(models["llama"], PROMPTS[1], 5).softmax(-1).numpy()
    kept = np.where(found > 0, wanted, 0.0)
    np.testing.assert_allclose(found, kept / kept.sum(1, keepdims=True), atol=1e-4)


def test_drafts_end_with_the_positions():
    model = make_tiny_model("gpt2", seed=3, vocab_size=VOCAB, max_positions=24)
    engine = engine_of(model, ahead=6)
    text, start = list(PROMPTS[1]), 0
    while len(text) <= 24:
        tree = ask(engine, item(1, start, text[start:])).trees[0]
        depth = min(5, 24 - len(text) + 1)
        assert_is(tree, plain_tree(model, text, len(PROMPTS[1]), GREEDY, max_depth=depth))
        work_ahead(engine)
        start = len(text)
        text += paths_of(tree)[0]


def test_a_tree_without_room_is_empty_and_one_forward_later_there_is_room(models):
    engine = engine_of(models["llama"], num_blocks=3)
    assert len(ask(engine, item(1, 0, PROMPTS[1])).trees[0]) == 0
    tree = ask(engine, item(1, 9, [], max_depth=3)).trees[0]
    assert_is(tree, plain_tree(models["llama"], PROMPTS[1], 9, GREEDY, max_depth=3))


def saved(directory: Any, kind: Any = "llama", **config: Any) -> Any:
    """The source of a tiny model whose config.json has these entries."""
    path = save_tiny_model(directory / "model", kind, seed=3)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return resolve_model(str(path), directory)


@pytest.mark.parametrize(
    "config", [{"pard_token": 5}, {"ptd_token_id": 5, "spd_type": "pard"}, {"pard_token": 5, "spd_type": "pard2"}]
)
def test_a_published_model_is_told_by_its_mask_token_which_is_never_guessed(tmp_path, config):
    engine = build_draft_engine(saved(tmp_path, **config), DraftOptions(kv_cache_tokens=512))
    assert isinstance(engine, DraftEngine)
    tree = ask(engine, item(1, 0, PROMPTS[1], max_nodes=250, branch=250, max_depth=1)).trees[0]
    assert len(tree) == 250
    assert 5 not in tree.token_ids
    model = make_tiny_model("llama", seed=3, vocab_size=259)
    chain = ask(engine, item(2, 0, PROMPTS[1], max_nodes=4, branch=1)).trees[0]
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[1], 5, 5, 5]])).logits[0, -4:]
    logits[:, 5] = -torch.inf
    assert chain.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("llama", {"pard_token": 259}, "pard_token is 259; it must be an id below 259"),
        ("llama", {"pard_token": "5"}, "pard_token is '5'"),
        ("llama", {"pard_token": 5, "ptd_token_id": 6}, "pard_token and ptd_token_id differ"),
        ("llama", {"spd_type": "pard"}, "pard_token is missing"),
        ("llama", {"pard_token": 5, "spd_type": "tree"}, "spd_type is 'tree'"),
        ("bart", {"pard_token": 5}, "pard_token is set; bart has an encoder"),
    ],
)
def test_what_cannot_draft_in_parallel_is_refused_by_name(tmp_path, kind, config, message):
    with pytest.raises(ModelError, match=message):
        build_draft_engine(saved(tmp_path, kind, **config), DraftOptions(kv_cache_tokens=512))

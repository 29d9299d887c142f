"""One-pass heads in their published layouts, P-EAGLE and DFlash, against the published forwards in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.draft_model.growing_tree import GrowingTree
from actors.draft_tree import DraftTree
from actors.eagle.head_loading import load_head
from actors.eagle.likeliest_paths import likeliest_paths
from actors.eagle.one_pass_drafter import OnePassDrafter
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.options import AttentionBackend, EagleOptions
from paceline_testing.drafting import paths_of, tree_to_verify
from paceline_testing.plain_dflash import dflash_config, dflash_tensors, plain_guesses, save_dflash
from paceline_testing.published_heads import (
    LAYERS,
    TARGET_SIZE,
    VOCAB,
    Paper,
    Published,
    eagle3,
    eagle31,
    norm_before_fc,
    p_eagle,
    speculators,
    whole_vocabulary,
)
from paceline_testing.tiny_models import make_tiny_model

MASK = 3
DFLASH_LAYERS = [1, 4]
PROMPTS = ([5, 9, 13, 2, 40, 7, 7, 23, 51, 8, 30], [11, 12], list(range(20, 49)))

# Log-probabilities [count, VOCAB] of the tokens after a text, from one forward.
Reference = Callable[[list[int], int], torch.Tensor]


def make_target() -> Any:
    return make_tiny_model("llama", 3, VOCAB, LAYERS, TARGET_SIZE, 4, 2)


@pytest.fixture(scope="module")
def target():
    return make_target()


def mask_beyond_the_target() -> Published:
    """The head has more tokens than the target, and its mask token is one of them."""
    return p_eagle(whole_vocabulary(VOCAB + 3), token=VOCAB + 1)


def of_speculators() -> Published:
    """As the `speculators` library writes it."""
    flags = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "embed_requires_grad": True}
    return p_eagle(speculators(), "mask_token_id", **flags)


P_EAGLE: dict[str, tuple[Callable[[], Published], tuple[int, ...]]] = {
    "P-EAGLE": (lambda: p_eagle(eagle3(layers=2), parallel_drafting=True), (2, 3, 3)),
    "P-EAGLE in speculators": (of_speculators, (2, 3, 3)),
    "P-EAGLE, norms of EAGLE-3.1": (lambda: p_eagle(eagle31(), "pard_token"), (2, 3, 3)),
    "P-EAGLE, a norm over all features": (lambda: p_eagle(norm_before_fc(), "pard_token"), (2, 3, 3)),
    "P-EAGLE, mask token of the head alone": (mask_beyond_the_target, (2, 3, 3)),
}
NAMES = [*P_EAGLE, "DFlash"]


def head_of(name: str, directory: Path, target: Any) -> tuple[Path, Reference]:
    """A random checkpoint, and what it guesses."""
    if name == "DFlash":
        tensors = dflash_tensors(TARGET_SIZE, len(DFLASH_LAYERS))
        path = save_dflash(directory, dflash_config(TARGET_SIZE, VOCAB, MASK, DFLASH_LAYERS), tensors)
        # The block's rows see one another, so that it is always guessed whole.
        return path, lambda tokens, count: plain_guesses(tensors, target, tokens, DFLASH_LAYERS, MASK, 4)[:count]
    make, states = P_EAGLE[name]
    published = make()
    paper = Paper(published, target, states)
    mask = next(
        published.config[key] for key in ("ptd_token_id", "pard_token", "mask_token_id") if key in published.config
    )
    return published.save(directory), lambda tokens, count: paper.guesses(tokens, count, mask)


def engine_with(
    path: Path, depth: int, top_k: int, attention: AttentionBackend = "padded", device: str = "cpu", **options: Any
) -> TargetEngine:
    model = make_target().to(device)
    # Compiling would take longer than the test.
    engine_options = EngineOptions(64, 4, is_eager=device != "cpu", **options)
    engine = TargetEngine(model, engine_options)
    head = load_head(path, model.config, device=device)
    shape = EagleOptions(depth=depth, top_k=top_k)
    engine.attach_head(OnePassDrafter(model, head, engine_options.num_slots, shape, attention))
    return engine


def likeliest(scores: torch.Tensor, top_k: int, max_nodes: int) -> dict[tuple[int, ...], float]:
    """The likeliest paths of the best tokens at each position, by trying all."""
    top = scores.topk(top_k, dim=-1)
    found = {}
    for depth in range(1, len(scores) + 1):
        for ranks in itertools.product(range(top_k), repeat=depth):
            path = tuple(int(top.indices[place, rank]) for place, rank in enumerate(ranks))
            found[path] = float(sum(top.values[place, rank] for place, rank in enumerate(ranks)))
    best = sorted(found, key=lambda path: -found[path])[:max_nodes]
    return {path: float(np.exp(found[path])) for path in best}


def assert_drafted(tree: DraftTree, wanted: dict[tuple[int, ...], float]) -> None:
    got = dict(zip(paths_of(tree), tree.confidence.tolist(), strict=True))
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, rel=1e-3)
    assert sorted(got.values(), reverse=True) == list(got.values())


def rounds(
    engine: TargetEngine,
    reference: Reference,
    target: Any,
    top_k: int,
    most: int,
    max_nodes: int = 9,
    num_rounds: int = 4,
) -> None:
    """Rounds of all prompts, the longest in parts. The second and third verify texts that are right for two tokens, so
    that a round has several new features."""
    texts, known = [list(prompt) for prompt in PROMPTS], [0] * len(PROMPTS)
    num_drafts = 0
    for number in range(num_rounds):
        items = []
        for index, text in enumerate(texts):
            begin = SequenceStart(SamplingParams(1, temperature=0.0), len(text)) if known[index] == 0 else None
            delta = SequenceDelta(index + 1, known[index], np.array(text[known[index] :], np.int32))
            right = greedy(target, text, 2) if number in (1, 2) else []
            tree = tree_to_verify([*right, 0][:3], [-1, 0, 1][: len(right) + 1]) if right else None
            items.append(VerifyItem(delta, 16, tree, begin, max_nodes))
            known[index] = len(text)
        result = engine.verify(VerifyBatch(number, items))
        assert result.head_is_parallel
        assert result.head_forwards == (len(result.drafts) > 0)
        for verdict in result.verdicts:
            if verdict.next_token >= 0:
                own, path = items[verdict.seq_id - 1].tree, verdict.path
                texts[verdict.seq_id - 1] += [*own.token_ids[path].tolist(), verdict.next_token]
        for seq_id, tree in zip(result.drafted_seq_ids, result.drafts, strict=True):
            guesses = reference(texts[seq_id - 1], most)
            assert_drafted(tree, likeliest(guesses, top_k, max_nodes))
            num_drafts += 1
    assert num_drafts == num_rounds * len(PROMPTS) - 1
    assert all(len(text) > len(prompt) + num_rounds for text, prompt in zip(texts, PROMPTS, strict=True))


def greedy(target: Any, text: list[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
    return text[-count:]


@pytest.mark.parametrize(("name", "top_k"), [("P-EAGLE", 1), *((name, 3) for name in NAMES)])
@torch.no_grad()
def test_drafts_are_the_likeliest_paths_of_the_published_forward(tmp_path, target, name, top_k):
    path, reference = head_of(name, tmp_path / "head", target)
    # A chain has as many tokens as positions. DFlash guesses four tokens, whatever the depth.
    depth, most = (2, 3) if name != "DFlash" else (7, 4)
    nodes = 9 if top_k > 1 else most
    rounds(engine_with(path, depth, top_k), reference, target, top_k, most, nodes)


@pytest.mark.parametrize("name", ["P-EAGLE", "DFlash"])
@torch.no_grad()
def test_launches_for_a_device_draft_the_same(tmp_path, target, triton_device, monkeypatch, name):
    # A tile of the kernel has 8 rows, so that a block's are in two: a causal row would see none of the second.
    monkeypatch.setattr("actors.engine.attention.triton_tree._MAX_LANES", 16)
    path, reference = head_of(name, tmp_path / "head", target)
    engine = engine_with(path, 3, 2, "triton_tree", str(triton_device))
    rounds(engine, reference, target, 2, 4, num_rounds=2)


def test_many_sequences_draft_in_several_forwards(tmp_path, target, monkeypatch):
    monkeypatch.setattr("actors.eagle.head_drafter.SCRATCH_SLOTS", 4)
    path, reference = head_of("P-EAGLE", tmp_path / "head", target)
    with torch.no_grad():
        engine = engine_with(path, 2, 3)
        assert engine.eagle_head._trees_at_a_time == 2
        rounds(engine, reference, target, 3, 3)


def test_paths_are_those_of_a_parallel_draft_model():
    random = np.random.default_rng(3)
    for _ in range(30):
        positions, width, max_nodes = random.integers(1, 6), random.integers(1, 5), int(random.integers(1, 30))
        shares = -np.sort(-random.dirichlet(np.ones(width + 1), positions)[:, :width])
        least = float(random.choice([0.0, 0.05, 0.3]))
        places, parents, sums = likeliest_paths(np.log(shares), max_nodes, np.log(least) if least else -np.inf)
        tree = GrowingTree(max_nodes, int(positions), int(width), least, max_expanded=max_nodes)
        while nodes := tree.expandable():
            tree.begin_step(nodes)
            for node in nodes:
                depth = 0 if node < 0 else len(tree.path(node))
                for rank in range(width):
                    tree.add(node, rank, float(shares[depth, rank]))
        wanted = tree.finished()
        got = DraftTree(places[:, 1].astype(np.int32), parents, np.exp(sums).astype(np.float32))
        assert set(paths_of(got)) == set(paths_of(wanted))
        np.testing.assert_allclose(got.confidence, wanted.confidence, rtol=1e-5)


def refused_p_eagle(change: Callable[[Published], Any]) -> Published:
    head = p_eagle(eagle3())
    change(head)
    return head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: head.config.pop("ptd_token_id"), r"has the key 'mask_hidden', so one of ptd_token_id"),
        (lambda head: head.config.update(ptd_token_id=VOCAB), r"ptd_token_id is 61; it must be an id below 61"),
        (lambda head: head.config.update(pard_token=4), r"ptd_token_id and pard_token differ"),
        (lambda head: head.shapes.update(mask_hidden=(1, 32)), r"key 'mask_hidden' has shape \[32\]; expected \[96\]"),
        (lambda head: head.shapes.pop("mask_hidden"), r"ptd_token_id is 3, which is not implemented for EAGLE-3 heads"),
        (lambda head: head.config.update(speculators_model_type="dflash"), r"speculators_model_type is 'dflash'"),
        (lambda head: head.config.update(architectures=["DFlash2DraftModel"]), r"DFlash2DraftModel'\], which is not"),
        (lambda head: head.config.update(architectures=["Qwen3DSparkModel"]), r"Qwen3DSparkModel'\], which is not"),
    ],
)  # fmt: skip
def test_other_heads_are_refused_by_name(tmp_path, target, change, message):
    with pytest.raises(ModelError, match=message):
        load_head(refused_p_eagle(change).save(tmp_path / "head"), target.config)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hidden_size": 48}, r"hidden_size is 48; the target's hidden_size is 32"),
        ({"block_size": 1}, r"block_size is 1; it must be an integer of 2 or more"),
        ({"num_target_layers": 36}, r"num_target_layers is 36; the target has 6"),
        ({"vocab_size": 151936}, r"vocab_size is 151936; the target's is 61"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, r"layer_types is \['sliding_attention', 'full_att"),
        ({"use_sliding_window": True}, r"use_sliding_window is True, which is not implemented"),
        ({"dflash_config": 3}, r"dflash_config is 3; it must be an object"),
        ({"markov_rank": 256}, r"markov_rank is 256, which is not implemented for DFlash heads"),
        ({"use_rope": False}, r"use_rope is False, which is not implemented for DFlash heads"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"rope_parameters.partial_rotary_factor is 0.25"),
        ({"rope_scaling": "linear"}, r"config.json: cannot be used"),
        ({"layer_types": 5}, r"config.json: cannot be used"),
        ({"dflash_config": {"causal": True}}, r"dflash_config.causal is True, which is not implemented"),
        ({"dflash_config": {"projector_type": "domino"}}, r"dflash_config.projector_type is 'domino'"),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, r"dflash_config.mask_token_id is None; it must be an id"),
        ({"dflash_config": {"mask_token_id": 3}}, r"dflash_config.target_layer_ids is None; the target has 6 layers"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 5]}}, r"target_layer_ids is \[1, 5\]"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": 4}}, r"target_layer_ids is 4; the target has"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"key 'layers.2.self_attn.q_proj.weight' of shape"),
    ],
)  # fmt: skip
def test_other_dflash_heads_are_refused_by_name(tmp_path, target, more, message):
    config = dflash_config(TARGET_SIZE, VOCAB, MASK, DFLASH_LAYERS) | more
    with pytest.raises(ModelError, match=message):
        load_head(save_dflash(tmp_path / "head", config, dflash_tensors(TARGET_SIZE, 2)), target.config)


def test_dflash_heads_may_say_that_they_are_as_published(tmp_path, target):
    config = dflash_config(TARGET_SIZE, VOCAB, MASK, DFLASH_LAYERS)
    config["dflash_config"] |= {"causal": False, "projector_type": "dflash", "shift_label": False, "use_swa": None}
    assert load_head(save_dflash(tmp_path / "head", config, dflash_tensors(TARGET_SIZE, 2)), target.config).masks

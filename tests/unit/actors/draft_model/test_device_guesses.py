"""A draft engine with inputs on a device drafts what it drafts without, by one copy up and one down a forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.draft_model.answer_grammars import AnswerGrammars
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.warm_up import warm_up
from actors.engine import model_runner
from actors.engine.options import EngineOptions
from actors.engine.recorded_launches import RecordedLaunches
from actors.grammar.grammars import Grammars
from actors.messages import (
    FREE_ROW,
    DraftBatch,
    DraftItem,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    TokenMasks,
)
from paceline_testing.integrity import check_integrity
from paceline_testing.op_graph import OpGraphs
from paceline_testing.tiny_models import make_tiny_model
from paceline_testing.toy_tokenizer import toy_tokenizer
from tests.gpu.launches import counted

VOCAB = 61
SAMPLINGS = [
    SamplingParams(1, temperature=0.0),
    SamplingParams(2, temperature=0.9),
    SamplingParams(3, temperature=1.2, top_p=0.9, top_k=30),
    SamplingParams(4, temperature=0.7, repetition_penalty=1.3, logit_bias=((7, 3.0),)),
]


def drafts(
    attention: str,
    device: torch.device,
    samplings: list[SamplingParams],
    vocab_map: torch.Tensor | None,
    mask_token: int | None = None,
    grammars: Grammars | None = None,
    num_rounds: int = 2,
    num_nodes: int = 5,
):
    """Trees of two rounds: after a prompt, and after tokens that the drafts foresaw or not."""
    columns = VOCAB if vocab_map is None else len(vocab_map)
    model = make_tiny_model("llama", vocab_size=VOCAB, hidden_size=32)
    if columns != VOCAB:
        model.lm_head = torch.nn.Linear(32, columns, bias=False)
        torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(0))
    model.requires_grad_(False)
    if vocab_map is not None:
        vocab_map = vocab_map.to(device)
    options = EngineOptions(256, 4, attention=attention)
    engine = DraftEngine(model.to(device), options, vocab_map, mask_token=mask_token, grammars=grammars)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).astype(np.int32) for length in (5, 17, 2, 9)]
    found = []
    items = [
        DraftItem(
            SequenceDelta(index + 1, 0, prompt),
            num_nodes,
            SequenceStart(samplings[index % len(samplings)], len(prompt)),
        )
        for index, prompt in enumerate(prompts)
    ]
    for number in range(num_rounds):
        trees = engine.draft(DraftBatch(number + 1, items)).trees
        check_integrity(engine)
        found += [(tree.token_ids.tolist(), tree.parents.tolist()) for tree in trees]
        items = []
        for index, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
            new = np.array([tree.token_ids[0] if index % 2 else 3, 5], np.int32)
            items.append(DraftItem(SequenceDelta(index + 1, len(prompt), new), num_nodes))
    return found


@pytest.mark.parametrize(
    "vocab_map",
    [pytest.param(None, marks=pytest.mark.slow), torch.arange(0, VOCAB, 2)],
    ids=["whole", "reduced"],
)
def test_trees_are_the_same_for_all_kinds_of_sampling(triton_device, vocab_map):
    wanted = drafts("padded", triton_device, SAMPLINGS, vocab_map, num_nodes=3)
    assert sum(len(tokens) for tokens, _ in wanted) > 20
    assert drafts("triton_tree", triton_device, SAMPLINGS, vocab_map, num_nodes=3) == wanted


def masks_by_depth(grammars: AnswerGrammars, sequence: object, paths: list[tuple[int, ...] | None]) -> TokenMasks:
    """Even tokens, one token, and any, in turns."""
    index = [FREE_ROW if path is None else (0, -1 - 8, FREE_ROW)[len(path) % 3] for path in paths]
    return TokenMasks(np.full(2, 0x55555555, np.int32), np.array(index, np.int32))


def test_trees_within_grammars_are_the_same(triton_device, monkeypatch):
    monkeypatch.setattr(AnswerGrammars, "masks", masks_by_depth)
    grammars = Grammars(toy_tokenizer, VOCAB, [0], "toy")
    options = {"vocab_map": torch.arange(2, VOCAB, 3), "grammars": grammars, "num_rounds": 1, "num_nodes": 3}
    wanted = drafts("padded", triton_device, SAMPLINGS, **options)
    assert sum(len(tokens) for tokens, _ in wanted) > 8
    for tokens, parents in wanted:
        assert all(token % 2 == 0 for token, parent in zip(tokens, parents, strict=True) if parent < 0)
        assert all(token == 8 for token, parent in zip(tokens, parents, strict=True) if parent == 0)
    assert drafts("triton_tree", triton_device, SAMPLINGS, **options) == wanted


def test_trees_of_a_parallel_model_are_the_same(triton_device):
    wanted = drafts("padded", triton_device, SAMPLINGS, None, mask_token=60)
    assert sum(len(tokens) for tokens, _ in wanted) > 20
    assert drafts("triton_tree", triton_device, SAMPLINGS, None, mask_token=60) == wanted


def test_sequences_under_the_rejection_rule_are_drafted_for_among_others(triton_device):
    samplings = [SamplingParams(1, temperature=1.0, acceptance="rejection"), SamplingParams(2, temperature=0.8)]
    wanted = drafts("padded", triton_device, samplings, None, num_nodes=5)
    assert drafts("triton_tree", triton_device, samplings, None, num_nodes=5) == wanted


def test_a_forward_takes_one_copy_up_and_one_down():
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    with torch.device("meta"):
        model = make_tiny_model("llama", vocab_size=VOCAB, hidden_size=32)
    engine = DraftEngine(model, EngineOptions(256, 4, attention="triton_tree"))
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(None))
    sampling = SamplingParams(1, temperature=0.8)
    with counted() as mode:
        for number in range(3):
            tokens = np.arange(9, dtype=np.int32)
            deltas = [SequenceDelta(seq_id, 9 * number, tokens) for seq_id in (1, 2, 3)]
            begin = SequenceStart(sampling, 9) if number == 0 else None
            engine.draft(DraftBatch(number + 1, [DraftItem(delta, 5, begin) for delta in deltas]))
    assert len(forwards) >= 3
    assert mode.counts["copies up"] == mode.counts["copies back"] == len(forwards)
    assert mode.counts["waits"] == 0


@pytest.mark.parametrize("mask_token", [pytest.param(None, marks=pytest.mark.slow), VOCAB - 1])
def test_drafts_tell_of_new_shapes_and_a_warm_up_leaves_none(triton_device, monkeypatch, mask_token):
    # The CPU's own kernels are no operations of torch, so they cannot be recorded; nor are a GPU's compiled layers.
    monkeypatch.setattr(model_runner, "replace_linears", lambda model: False)
    monkeypatch.setattr(model_runner, "replace_norms", lambda model: None)
    monkeypatch.setattr("actors.draft_model.warm_up._SEQUENCES", (2, 1))
    model = make_tiny_model("llama", vocab_size=VOCAB, hidden_size=32).requires_grad_(False).to(triton_device)
    engine = DraftEngine(model, EngineOptions(256, 4, attention="triton_tree", is_eager=True), mask_token=mask_token)
    engine._runner._launches = RecordedLaunches(OpGraphs())

    def are_new(seq_id):
        greedy = SequenceStart(SAMPLINGS[0], 2)
        items = [DraftItem(SequenceDelta(seq_id, 0, np.array([5, 6], np.int32)), 2, greedy, max_depth=2)]
        items += [DraftItem(SequenceDelta(seq_id, 2 + n, np.array([7], np.int32)), 2, max_depth=2) for n in range(3)]
        told = [engine.draft(DraftBatch(0, [item])).is_new_shape for item in items]
        engine.draft(DraftBatch(0, [], [seq_id]))
        return told

    assert are_new(1)[0]
    engine._runner._launches = RecordedLaunches(OpGraphs())
    warm_up(engine, gamma=2, branch=1)
    assert are_new(2) == [False] * 4
    check_integrity(engine)
    assert engine.pool.num_free == engine.pool.num_blocks

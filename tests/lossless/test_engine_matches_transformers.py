"""The engine's logits and tokens against the unpatched `transformers` model, for every architecture we name.

Covers `actors.engine.attention` and `actors.engine.attention.exact`, too.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from actors.engine.batch import SequenceRows, pack
from actors.engine.block_pool import BlockPool
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.sequence import Sequence
from actors.engine.target_engine import TargetEngine
from actors.messages import (
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyBatch,
    VerifyItem,
    no_tokens,
)
from paceline_testing.drafting import tree_to_verify
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model

VOCAB = 61
GREEDY = SamplingParams(seed=1, temperature=0.0)


def reference_greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without any cache: the whole text goes through the model for each token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {kind: make_tiny_model(kind, seed=3, vocab_size=VOCAB, layers=3, sliding_window=6) for kind in TINY_KINDS}


@pytest.mark.parametrize("exact", ["default", "bitwise"])
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_every_row_of_a_ragged_batch_has_the_logits_of_the_unpatched_model(models, kind, exact):
    reference = models[kind]
    runner = ModelRunner(copy.deepcopy(reference), 64 * 4, exact)
    pool = BlockPool(64, 4)
    rng = np.random.default_rng(0)
    sequences = []
    for length in (5, 11, 23):
        sequence = Sequence(length, SequenceStart(GREEDY, length), pool)
        sequence.extend(rng.integers(0, VOCAB, length).astype(np.int32))
        sequences.append(sequence)
    for room in (4, 8, 30):  # blocks taken in turn, so that no sequence is contiguous
        for sequence in sequences:
            sequence.reserve(min(room, sequence.length + 5))
    tree_tokens = np.array([3, 4, 5, 6, 7], np.int32)
    tree_parents = np.array([-1, -1, 0, 1, 3], np.int32)
    paths = [[], [3], [4], [3, 5], [4, 6], [4, 6, 7]]
    batch = pack([SequenceRows(sequence, sequence.length, tree_tokens, tree_parents) for sequence in sequences])
    logits = runner.forward(batch, np.arange(batch.num_rows))

    wanted = []
    for sequence in sequences:
        text = sequence.tokens.tolist()
        with torch.inference_mode():
            wanted += [*reference(torch.tensor([text])).logits[0, :-1]]
            wanted += [reference(torch.tensor([text + path])).logits[0, -1] for path in paths]
    torch.testing.assert_close(logits, torch.stack(wanted), atol=1e-4, rtol=0)


def test_the_demo_model_has_the_logits_of_the_unpatched_model_in_chunks_and_trees(smollm2_dir):
    reference = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    text = np.random.default_rng(0).integers(0, 49152, 24).astype(np.int32)
    tree_tokens, tree_parents = np.array([11, 12, 13, 14], np.int32), np.array([-1, -1, 0, 1], np.int32)
    contexts = [text.tolist() + path for path in ([], [11], [12], [11, 13], [12, 14])]
    longest = max(map(len, contexts))
    padded = torch.tensor([context + [0] * (longest - len(context)) for context in contexts])  # at the ends, unseen
    with torch.inference_mode():
        logits = reference(padded).logits
    wanted = torch.stack([rows[len(context) - 1] for rows, context in zip(logits, contexts, strict=True)])
    runner = ModelRunner(reference, 64)  # patched from here on
    sequence = Sequence(1, SequenceStart(GREEDY, len(text)), BlockPool(4, 16))
    sequence.extend(text)
    sequence.reserve(len(text) + 4)
    runner.forward(pack([SequenceRows(sequence, 17, no_tokens(), no_tokens())]), np.array([16]))
    sequence.computed(17, no_tokens(), no_tokens())
    logits = runner.forward(pack([SequenceRows(sequence, 7, tree_tokens, tree_parents)]), np.arange(6, 11))
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-5)


class Stream:
    """The router's side of one sequence, as small as it can be: drafts at will, believes the verdicts."""

    def __init__(self, engine: TargetEngine, seq_id: int, prompt: list[int], max_rows: int = 10_000) -> None:
        self.engine = engine
        self.seq_id = seq_id
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.known = 0
        self.max_rows = max_rows
        self.num_cached = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def item(self, tree_tokens: list[int] | None = None, tree_parents: list[int] | None = None) -> VerifyItem:
        begin = SequenceStart(GREEDY, self.num_prompt) if self.known == 0 else None
        delta = SequenceDelta(self.seq_id, self.known, np.array(self.tokens[self.known :], np.int32))
        self.known = len(self.tokens)
        tree = tree_to_verify(tree_tokens or [], tree_parents or [])
        return VerifyItem(delta, self.max_rows, tree, begin)

    def take(self, verdict, tree_tokens: list[int] | None = None) -> None:
        self.num_cached = verdict.num_cached
        if verdict.next_token >= 0:
            self.tokens += [tree_tokens[node] for node in verdict.path] + [verdict.next_token]


def run_round(engine: TargetEngine, streams: list[Stream], trees: list[tuple[list[int], list[int]]], finished=()):
    batch = VerifyBatch(1, [s.item(*tree) for s, tree in zip(streams, trees, strict=True)], list(finished))
    result = engine.verify(batch)
    check_integrity(engine)
    verdicts = {verdict.seq_id: verdict for verdict in result.verdicts}
    for stream, (tokens, _) in zip(streams, trees, strict=True):
        if stream.seq_id in verdicts:
            stream.take(verdicts[stream.seq_id], tokens)
    return result


@st.composite
def draft_trees(draw):
    """Trees with distinct siblings; tokens from few values, so that some are right by chance."""
    size = draw(st.integers(0, 9))
    tokens: list[int] = []
    parents: list[int] = []
    edges = set()
    for index in range(size):
        parent = draw(st.integers(-1, index - 1))
        token = draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in edges:
            edges.add((parent, token))
            parents.append(parent if parent < len(tokens) else -1)
            tokens.append(token)
    unique = dict.fromkeys(zip(parents, tokens, strict=True))
    return (
        ([token for _, token in unique], [parent for parent, _ in unique]) if len(unique) == len(tokens) else ([], [])
    )


def with_truth(tree: tuple[list[int], list[int]], truth: list[int], depth: int) -> tuple[list[int], list[int]]:
    """The tree with the right continuation grafted in behind it, `depth` tokens deep."""
    tokens, parents = list(tree[0]), list(tree[1])
    parent = -1
    for token in truth[:depth]:
        found = [i for i, (t, p) in enumerate(zip(tokens, parents, strict=True)) if t == token and p == parent]
        if found:
            parent = found[0]
            continue
        tokens.append(token)
        parents.append(parent)
        parent = len(tokens) - 1
    return tokens, parents


PROMPTS = [[7, 3, 9, 7, 3], [1], list(range(20, 37))]


@pytest.fixture(scope="module")
def greedy_outputs(models) -> dict[str, list[list[int]]]:
    return {kind: [reference_greedy(model, prompt, 14) for prompt in PROMPTS] for kind, model in models.items()}


@pytest.mark.parametrize("kind", TINY_KINDS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree_in_any_round_leaves_the_output_as_it_is_without_drafts(models, greedy_outputs, kind, data):
    engine = TargetEngine(copy.deepcopy(models[kind]), EngineOptions(num_blocks=40, block_size=4))
    wanted = greedy_outputs[kind]
    max_rows = data.draw(st.sampled_from([3, 8, 1000]))
    streams = [Stream(engine, index + 1, prompt, max_rows) for index, prompt in enumerate(PROMPTS)]
    for _ in range(40):
        active = [s for s in streams if len(s.output) < 14]
        if not active:
            break
        trees = []
        for stream in active:
            truth = wanted[stream.seq_id - 1][len(stream.output) :]
            trees.append(with_truth(data.draw(draft_trees()), truth, data.draw(st.integers(0, 4))))
        run_round(engine, active, trees)
    for stream, truth in zip(streams, wanted, strict=True):
        assert stream.output[:14] == truth
    engine.verify(VerifyBatch(2, [], [1, 2, 3]))
    assert engine.num_sequences == 0
    assert engine.pool.num_free == 40


@pytest.mark.parametrize("exact", ["default", "bitwise"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_kv_after_tree_rounds_equals_a_fresh_prefill_of_the_accepted_text(models, kind, exact):
    reference = models[kind]
    prompt = [5, 9, 2, 14]
    truth = reference_greedy(reference, prompt, 12)
    engine = TargetEngine(copy.deepcopy(reference), EngineOptions(40, 4, prefix_cache=False, exact=exact))
    stream = Stream(engine, 1, prompt)
    while len(stream.output) < 10:
        rest = truth[len(stream.output) :]
        wrong = [(rest[0] + 1) % VOCAB, (rest[0] + 2) % VOCAB]
        # Wrong branches first, so that the accepted path has to be moved into place.
        run_round(engine, [stream], [with_truth((wrong, [-1, 0]), rest, 3)])
    text = stream.tokens[: engine._table._sequences[1].num_computed]
    run_round(engine, [stream], [([], [])])  # applies the last acceptance
    held = engine._table._sequences[1]

    fresh = TargetEngine(copy.deepcopy(reference), EngineOptions(40, 4, prefix_cache=False, exact=exact))
    run_round(fresh, [Stream(fresh, 1, text)], [([], [])])
    other = fresh._table._sequences[1]
    kept, wanted = (
        [(keys[slots], values[slots]) for keys, values in one._runner.kv._layers]
        for one, slots in ((engine, held.slots(0, len(text))), (fresh, other.slots(0, len(text))))
    )
    tolerance = 0.0 if exact == "bitwise" else 1e-5
    torch.testing.assert_close(kept, wanted, atol=tolerance, rtol=0)


def test_bitwise_logits_do_not_depend_on_company_or_tree(models):
    """Zero tolerance: the same row alone, in a crowd, and as a node deep in a tree behind wrong branches."""
    for kind in TINY_KINDS:
        model = models[kind]
        prompt = [4, 8, 15, 16, 23, 42]
        rows = {}
        for company in ("alone", "crowd", "node"):
            runner = ModelRunner(copy.deepcopy(model), 80 * 4, "bitwise")
            pool = BlockPool(80, 4)
            length = 4 if company == "node" else 6
            sequence = Sequence(1, SequenceStart(GREEDY, 6), pool)
            sequence.extend(np.array(prompt[:length], np.int32))
            sequence.reserve(12)
            tree, parents = no_tokens(), no_tokens()
            if company == "node":
                tree, parents = np.array([9, 23, 1, 42], np.int32), np.array([-1, -1, 0, 1], np.int32)
            parts = [SequenceRows(sequence, length, tree, parents)]
            if company == "crowd":
                for seq_id in range(2, 9):
                    other = Sequence(seq_id, SequenceStart(GREEDY, 20), pool)
                    other.extend(np.arange(seq_id, seq_id + 20, dtype=np.int32))
                    other.reserve(20)
                    parts.insert(0, SequenceRows(other, 20, no_tokens(), no_tokens()))
            batch = pack(parts)
            rows[company] = runner.forward(batch, np.array([batch.num_rows - 1]))[0]
        assert torch.equal(rows["alone"], rows["crowd"]), kind
        assert torch.equal(rows["alone"], rows["node"]), kind


def test_a_second_request_reuses_the_blocks_of_an_equal_prefix(models):
    model = models["llama"]
    engine = TargetEngine(copy.deepcopy(model), EngineOptions(40, 4))
    prompt = list(range(30))
    first = Stream(engine, 1, prompt)
    run_round(engine, [first], [([], [])])
    engine.verify(VerifyBatch(2, [], [1]))
    again = Stream(engine, 2, [*prompt[:25], 60, 59])
    result = run_round(engine, [again], [([], [])])
    assert again.num_cached == 24
    assert result.rows == 27 - 24
    assert again.output == reference_greedy(model, again.tokens[:27], 1)


def test_another_namespace_never_sees_the_cached_prefix(models):
    engine = TargetEngine(copy.deepcopy(models["llama"]), EngineOptions(40, 4))
    prompt = np.arange(30, dtype=np.int32)
    for seq_id, namespace, cached in ((1, "a", 0), (2, "b", 0), (3, "a", 28)):
        begin = SequenceStart(GREEDY, 30, namespace)
        item = VerifyItem(SequenceDelta(seq_id, 0, prompt), 1000, begin=begin)
        verdict = engine.verify(VerifyBatch(1, [item])).verdicts[0]
        assert verdict.num_cached == cached


def test_a_starved_sequence_is_unchanged_and_goes_on_when_there_is_room(models):
    model = models["llama"]
    engine = TargetEngine(copy.deepcopy(model), EngineOptions(num_blocks=8, block_size=4, prefix_cache=False))
    big, small = Stream(engine, 1, list(range(20))), Stream(engine, 2, [1, 2, 3])
    run_round(engine, [big, small], [([], []), ([], [])])  # 5 and 1 blocks
    third = Stream(engine, 3, list(range(30, 42)))
    result = run_round(engine, [third], [([], [])])
    assert result.starved_seq_ids == [3]
    assert third.output == []
    third.known = 0
    run_round(engine, [third], [([], [])], finished=[1])
    assert third.output == reference_greedy(model, list(range(30, 42)), 1)


def test_unknown_and_shorter_sequences_are_answered_stale(models):
    engine = TargetEngine(copy.deepcopy(models["llama"]), EngineOptions(8, 4))
    item = VerifyItem(SequenceDelta(5, 3, np.array([1], np.int32)), 10)
    assert engine.verify(VerifyBatch(1, [item])).stale_seq_ids == [5]
    stream = Stream(engine, 6, [1, 2, 3])
    run_round(engine, [stream], [([], [])])
    wrong = VerifyItem(SequenceDelta(6, 7, np.array([1], np.int32)), 10)
    assert engine.verify(VerifyBatch(1, [wrong])).stale_seq_ids == [6]
    check_integrity(engine)
    assert engine.num_sequences == 0

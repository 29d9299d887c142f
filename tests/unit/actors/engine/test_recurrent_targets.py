"""Targets with a recurrent state: whatever chains are accepted, rows are those of the unpatched model.

That all families compute their tokens right is in tests/lossless/test_model_families.py.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_tree import DraftTree
from actors.engine.batch import SequenceRows
from actors.engine.block_pool import BlockPool
from actors.engine.options import EngineOptions
from actors.engine.recurrent.recurrent_runner import RecurrentRunner
from actors.engine.recurrent.state_bytes import recurrent_state_bytes
from actors.engine.recurrent.states import RecurrentSequence
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.loader import check_recurrent_state
from actors.models.random_model import random_model
from actors.models.source import ModelSource
from actors.models.tiny_config import VOCAB_SIZE, config_of_type, tiny_config
from actors.options import TargetOptions

KINDS = ["lfm2", "qwen3_next", "nemotron_h", "jamba"]  # one of each way to compute several rows
NO_TOKENS = np.empty(0, np.int32)
BEGIN = SequenceStart(SamplingParams(seed=1, temperature=0.0), 1)


def model_of(kind: str):
    return random_model(tiny_config(config_of_type(kind)))


@cache
def unpatched(kind: str):
    return model_of(kind)


@cache
def runner_of(kind: str) -> RecurrentRunner:
    return RecurrentRunner(model_of(kind), 512)


@cache
def engine_of(kind: str) -> TargetEngine:
    return TargetEngine(model_of(kind), EngineOptions(256, 4))


def tokens(min_size: int, max_size: int):
    return st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=min_size, max_size=max_size)


# One round of a sequence: tokens that become known after the accepted draft tokens, how many rows may be computed, a
# chain behind them, and how many of its tokens are accepted.
ROUND = st.tuples(tokens(1, 12), st.sampled_from([1, 3, 16]), tokens(0, 10), st.integers(0, 10))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.lists(ROUND, min_size=6, max_size=6), min_size=1, max_size=3))
def test_all_rows_are_those_of_the_unpatched_model(kind, texts):
    runner, pool = runner_of(kind), BlockPool(128, 4, prefix_cache=False)
    sequences = [RecurrentSequence(index, BEGIN, pool) for index in range(len(texts))]
    for rounds in zip(*texts, strict=True):
        parts, expected = [], []
        for sequence, (known, most, draft, _) in zip(sequences, rounds, strict=True):
            sequence.extend(np.array(known, np.int32))
            count = min(sequence.num_pending, most)
            chain = np.array(draft if count == sequence.num_pending else [], np.int32)
            assert sequence.reserve(sequence.length + len(chain))
            parts.append(SequenceRows(sequence, count, chain, np.arange(-1, len(chain) - 1, dtype=np.int32)))
            text = [*sequence.tokens[: sequence.num_computed + count].tolist(), *chain.tolist()]
            with torch.inference_mode():
                logits = unpatched(kind)(input_ids=torch.tensor([text]), use_cache=False).logits[0]
            expected.append(logits[sequence.num_computed :])
        logits = runner.run(parts, [part.num_rows for part in parts])
        torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=2e-3)  # their spread is 4
        for part, (*_, accepted) in zip(parts, rounds, strict=True):
            part.sequence.computed(part.count, part.tree_tokens, part.tree_parents)
            path = list(range(min(accepted, len(part.tree_tokens))))
            if path:
                part.sequence.follow(part.tree_tokens[path], path, [], runner.kv)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_one_by_one_are_those_of_the_whole_text(kind):
    text = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40).astype(np.int32)
    sequence = RecurrentSequence(1, BEGIN, BlockPool(16, 4, prefix_cache=False))
    sequence.extend(text)
    assert sequence.reserve(len(text))
    rows = []
    for _ in text:
        rows.append(runner_of(kind).run([SequenceRows(sequence, 1, NO_TOKENS, NO_TOKENS)], [1]))
        sequence.computed(1, NO_TOKENS, NO_TOKENS)
    with torch.inference_mode():
        expected = unpatched(kind)(input_ids=torch.from_numpy(text.astype(np.int64))[None], use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(rows), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("kind", ["bamba", "falcon_h1", "granitemoehybrid"])
def test_in_16_bits_rows_one_by_one_are_rounded_as_those_of_several_are(kind):
    """Else drafts would change tokens that are no near-ties: transformers has another way for one row."""
    exact, rounded = model_of(kind), model_of(kind).bfloat16()
    text = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40).astype(np.int32)
    ids = torch.from_numpy(text.astype(np.int64))[None]
    with torch.inference_mode():
        right, at_once = (model(input_ids=ids, use_cache=False).logits[0].float() for model in (exact, rounded))
    runner, sequence = RecurrentRunner(rounded, 64), RecurrentSequence(1, BEGIN, BlockPool(16, 4, prefix_cache=False))
    sequence.extend(text)
    assert sequence.reserve(len(text))
    rows = []
    for _ in text:
        rows.append(runner.run([SequenceRows(sequence, 1, NO_TOKENS, NO_TOKENS)], [1]).float())
        sequence.computed(1, NO_TOKENS, NO_TOKENS)
    assert (torch.cat(rows) - at_once).norm() < 0.4 * (at_once - right).norm()


def say(
    engine: TargetEngine, prompts, sampling: SamplingParams, draft, rows: int = 5, count: int = 10
) -> list[list[int]]:
    """Answers, all in one batch. draft: the chain behind a text."""
    texts, sent = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for round_id in range(200):
        items = []
        for seq_id, text in enumerate(texts):
            if len(text) < len(prompts[seq_id]) + count:
                begin = None if sent[seq_id] else SequenceStart(sampling, len(prompts[seq_id]))
                delta = SequenceDelta(seq_id, sent[seq_id], np.array(text[sent[seq_id] :], np.int32))
                chain = np.array(draft(text), np.int32)
                items.append(VerifyItem(delta, rows, DraftTree.chain(chain, np.ones(len(chain), np.float32)), begin))
                sent[seq_id] = len(text)
        if not items:
            break
        result = engine.verify(VerifyBatch(round_id, items))
        for item, verdict in zip(items, result.verdicts, strict=True):
            if verdict.next_token >= 0:
                texts[verdict.seq_id] += [*item.tree.token_ids[verdict.path].tolist(), verdict.next_token]
    engine.verify(VerifyBatch(0, [], list(range(len(prompts)))))
    return [text[len(prompt) :][:count] for text, prompt in zip(texts, prompts, strict=True)]


PROMPTS = [[5, 9, 11, 40, 3, 8, 7], [61, 2], [33] * 17]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_token(kind, temperature):
    engine, sampling = engine_of(kind), SamplingParams(seed=3, temperature=temperature, top_p=0.95)
    plain = say(engine, PROMPTS, sampling, lambda text: [])
    oracle = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain, strict=True)}

    def half_right(text: list[int]) -> list[int]:
        prompt = next(prompt for prompt in PROMPTS if text[: len(prompt)] == prompt)
        rest = oracle[tuple(prompt)][len(text) - len(prompt) :]
        return [*rest[: len(text) % 4], 1, 2]

    assert say(engine, PROMPTS, sampling, half_right) == plain
    if temperature == 0.0:
        assert plain[0] == [int(token) for token in _greedy(kind, PROMPTS[0], 10)]


def _greedy(kind: str, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(unpatched(kind)(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def test_an_answer_goes_on_after_its_tokens_are_sent_from_the_beginning():
    """As after a failover, or when the target has lost it."""
    engine, sampling = engine_of(KINDS[0]), SamplingParams(seed=3, temperature=0.8)
    whole = say(engine, PROMPTS, sampling, lambda text: [])
    texts = [prompt + answer[:6] for prompt, answer in zip(PROMPTS, whole, strict=True)]
    assert say(engine, texts, sampling, lambda text: [4, 4], count=4) == [answer[6:] for answer in whole]


def test_a_tree_that_is_no_chain_is_not_verified():
    engine = engine_of(KINDS[0])
    tree = DraftTree(np.array([4, 5], np.int32), np.array([-1, -1], np.int32), np.ones(2, np.float32))
    result = engine.verify(
        VerifyBatch(0, [VerifyItem(SequenceDelta(1, 0, np.array([7, 8], np.int32)), 9, tree, BEGIN)])
    )
    assert [(verdict.rows, verdict.num_nodes) for verdict in result.verdicts] == [(2, 0)]
    engine.verify(VerifyBatch(1, [], [1]))


def test_it_says_so():
    engine = engine_of(KINDS[0])
    assert engine.chain_only
    assert not engine.overlaps


def test_a_freed_sequence_has_no_state():
    sequence = RecurrentSequence(1, BEGIN, BlockPool(16, 4, prefix_cache=False))
    sequence.extend(np.array([4, 5, 6], np.int32))
    assert sequence.reserve(3)
    runner_of(KINDS[0]).run([SequenceRows(sequence, 3, NO_TOKENS, NO_TOKENS)], [1])
    assert sequence.states.mixers
    sequence.free()
    assert not sequence.states.mixers


def test_the_size_of_a_state_is_that_of_its_tensors():
    model = model_of("lfm2")
    mixers = [module for module in model.modules() if type(module).__name__ == "Lfm2ShortConv"]
    assert recurrent_state_bytes(model) == 4 * model.config.hidden_size * model.config.conv_L_cache * len(mixers)
    assert recurrent_state_bytes(model_of("llama")) == 0


def test_what_needs_attention_alone_is_refused():
    model, options = model_of(KINDS[0]), EngineOptions(16, 4)
    with pytest.raises(ModelError, match="exact is 'bitwise'"):
        TargetEngine(model, EngineOptions(16, 4, exact="bitwise"))
    with pytest.raises(ModelError, match="attention is 'triton_tree'"):
        TargetEngine(model, EngineOptions(16, 4, attention="triton_tree"))
    with pytest.raises(ModelError, match="a draft model, which drafts trees"):
        DraftEngine(model, options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exact": "bitwise"}, "exact 'bitwise'"),
        ({"attention": "flashinfer"}, "attention 'flashinfer'"),
    ],
)
def test_options_are_refused_before_weights_are_read(tmp_path, options, named):
    tiny_config(config_of_type("lfm2")).save_pretrained(tmp_path)
    source = ModelSource("m", "m", tmp_path)
    check_recurrent_state(source, TargetOptions())
    with pytest.raises(ModelError, match=f"lfm2 has a recurrent state; {named}"):
        check_recurrent_state(source, TargetOptions(**options))

"""What engines make of batches that are repeated, doubled or malformed, and of models they cannot compute.

Covers `actors.engine.runner` and `actors.engine.sequence_table`, too.
"""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_tree import DraftTree, TopProbs
from actors.engine.batch import SequenceRows, pack
from actors.engine.block_pool import BlockPool
from actors.engine.cpu_kernels.threads import has_openmp
from actors.engine.feature_tap import FeatureTap
from actors.engine.kv_cache import KvCache, LayerShape
from actors.engine.model_runner import ROW_TILE, ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.sequence import Sequence
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.messages import (
    DraftBatch,
    DraftItem,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyBatch,
    VerifyItem,
    no_tokens,
)
from actors.workers.worker_loop import IdleSequences
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import make_tiny_model

GREEDY = SamplingParams(seed=1, temperature=0.0)
PROMPT = np.arange(20, dtype=np.int32)


def target(**options) -> TargetEngine:
    return TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4, **options))


def item(seq_id: int, start: int, tokens, max_rows: int = 1000, sampling: SamplingParams = GREEDY, tree=None):
    begin = SequenceStart(sampling, len(PROMPT)) if start == 0 else None
    delta = SequenceDelta(seq_id, start, np.array(tokens, np.int32))
    return VerifyItem(delta, max_rows, tree, begin)


def verify(engine: TargetEngine, *items: VerifyItem):
    result = engine.verify(VerifyBatch(1, list(items)))
    check_integrity(engine)
    return result


@pytest.fixture(scope="module")
def next_token() -> int:
    """What the target says after PROMPT."""
    return verify(target(), item(1, 0, PROMPT)).verdicts[0].next_token


def test_a_last_chunk_whose_answer_was_lost_is_stale_when_it_comes_again_and_right_from_the_start(next_token):
    engine = target()
    verify(engine, item(1, 0, PROMPT[::-1].copy()), item(2, 0, PROMPT, max_rows=8))
    assert verify(engine, item(2, 20, [])).verdicts[0].next_token == next_token
    again = verify(engine, item(1, 20, [5]), item(2, 20, []))  # the same delta: its answer never arrived
    assert again.stale_seq_ids == [2]
    assert [verdict.seq_id for verdict in again.verdicts] == [1]
    restarted = verify(engine, item(2, 0, PROMPT)).verdicts[0]
    assert (restarted.next_token, restarted.num_cached) == (next_token, 16)


def test_a_draft_engine_asked_again_without_news_says_stale_and_guesses_the_same_from_the_start():
    engine = DraftEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4))
    whole = DraftItem(SequenceDelta(1, 0, PROMPT), 4, SequenceStart(GREEDY, len(PROMPT)))
    first = engine.draft(DraftBatch(1, [whole]))
    again = engine.draft(DraftBatch(2, [DraftItem(SequenceDelta(1, len(PROMPT), no_tokens()), 4)]))
    assert (again.stale_seq_ids, again.trees) == ([1], [])
    restarted = engine.draft(DraftBatch(3, [whole]))
    assert restarted.trees[0].token_ids.tolist() == first.trees[0].token_ids.tolist()
    check_integrity(engine)


@pytest.mark.parametrize("length", [1, 20, 600])
def test_a_prompt_sent_ahead_of_its_first_guess_is_computed_ahead(length):
    model = make_tiny_model("llama", vocab_size=61)
    engine = DraftEngine(model, EngineOptions(400, 4, prefix_cache=False))
    rows: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, given, out: rows.append(given[0].numel()))
    prompt = np.resize(PROMPT, length)
    begin = SequenceStart(GREEDY, length)
    ahead = engine.draft(DraftBatch(1, [DraftItem(SequenceDelta(1, 0, prompt), 0, begin)]))
    assert (ahead.seq_ids, len(ahead.trees[0].token_ids)) == ([1], 0)
    rows.clear()
    guess = engine.draft(DraftBatch(2, [DraftItem(SequenceDelta(1, length, no_tokens()), 1)]))
    assert rows == [1]
    whole = engine.draft(DraftBatch(3, [DraftItem(SequenceDelta(2, 0, prompt), 1, begin)]))
    assert guess.trees[0].token_ids.tolist() == whole.trees[0].token_ids.tolist()
    check_integrity(engine)


def test_the_row_steps_are_those_that_forwards_are_filled_up_to():
    model = make_tiny_model()
    model.lm_head.register_forward_hook(lambda *_: None)  # so it stays the library's, whose forwards are padded
    runner = ModelRunner(model, 64)
    for rows in range(1, 257):
        assert runner.padded(rows) == next(step for step in runner.row_steps if step >= rows)
    assert runner.row_steps[:4] == [1, 2, 4, 8]
    assert ModelRunner(model, 64, "bitwise").row_steps[:3] == [ROW_TILE, 2 * ROW_TILE, 3 * ROW_TILE]


@pytest.mark.skipif(not has_openmp(), reason="torch has no OpenMP runtime that exports GOMP_parallel here")
def test_forwards_of_a_model_in_panels_are_not_padded():
    runner = ModelRunner(make_tiny_model(), 64)
    assert runner.row_steps == []
    assert [runner.padded(rows) for rows in (1, 3, 77)] == [1, 3, 77]


def test_inputs_on_a_device_are_padded_whatever_the_kernels_of_the_model():
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    runner = ModelRunner(make_tiny_model(), 64, attention="triton_tree")
    assert runner.row_steps[:4] == [1, 2, 4, 8]


def test_a_sequence_that_a_batch_names_twice_is_computed_once(next_token):
    engine = target()
    result = verify(engine, item(1, 0, PROMPT), item(1, 0, PROMPT[::-1].copy()), item(2, 0, PROMPT))
    assert [(verdict.seq_id, verdict.next_token) for verdict in result.verdicts] == [(1, next_token), (2, next_token)]
    draft = DraftEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4))
    twice = DraftItem(SequenceDelta(1, 0, PROMPT), 2, SequenceStart(GREEDY, len(PROMPT)))
    assert draft.draft(DraftBatch(1, [twice, twice])).seq_ids == [1]
    check_integrity(draft)


def test_a_batch_of_nothing_is_answered_with_nothing():
    result = verify(target())
    assert (result.verdicts, result.rows, result.free_blocks) == ([], 0, 40)
    draft = DraftEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4))
    assert draft.draft(DraftBatch(1, [])).trees == []


HALF = np.array([0.5, 0.5], np.float32)
CHAIN = DraftTree.chain(np.array([3, 4]), HALF)


@pytest.mark.parametrize(
    "tree",
    [
        replace(CHAIN, probs=TopProbs(np.array([3, 4], np.int32), HALF, 2)),  # of one node only
        replace(CHAIN, probs=TopProbs(np.array([3, 4], np.int32), HALF[:1], 1)),
        replace(CHAIN, probs=TopProbs(no_tokens(), HALF[:0], 0)),
        replace(CHAIN, probs=TopProbs(no_tokens(), HALF[:0], -1)),
        DraftTree(CHAIN.token_ids, np.array([-1, -1], np.int32), HALF, TopProbs(CHAIN.token_ids, HALF, 1)),
        replace(CHAIN, parents=np.array([-1, 0], np.float32)),
        replace(CHAIN, token_ids=np.array([3, np.nan], np.float32)),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_cannot_be_judged_is_an_empty_one(tree, temperature):
    sampling = SamplingParams(seed=1, temperature=temperature, acceptance="rejection")
    plain = verify(target(), item(1, 0, PROMPT, sampling=sampling)).verdicts[0]
    drafted = verify(target(), item(1, 0, PROMPT, sampling=sampling, tree=tree)).verdicts[0]
    assert (drafted.rows, drafted.path.tolist(), drafted.next_token) == (20, [], plain.next_token)


@pytest.mark.parametrize(("tokens", "parents"), [([61], [-1]), ([-1], [-1]), ([1], [5]), ([2, 2], [-1, -1])])
def test_a_malformed_tree_is_left_out(tokens, parents, next_token):
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(len(tokens), np.float32))
    verdict = verify(target(), item(1, 0, PROMPT, tree=tree)).verdicts[0]
    assert (verdict.rows, verdict.path.tolist(), verdict.next_token) == (20, [], next_token)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("sure", [True, False])
def test_of_a_chain_without_room_its_first_nodes_are_verified_whatever_they_are(acceptance, sure):
    sampling = SamplingParams(seed=1, temperature=0.0, acceptance=acceptance)
    right = verify(target(), item(1, 0, PROMPT)).verdicts[0].next_token
    chain = np.array([right if sure else (right + 1) % 61, *range(5)], np.int32)
    probs = TopProbs(chain, np.ones(6, np.float32), 1) if acceptance == "rejection" else None
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(6, 4))  # room for 4 nodes
    tree = DraftTree.chain(chain, np.zeros(6), probs)
    verdict = verify(engine, item(1, 0, PROMPT, sampling=sampling, tree=tree)).verdicts[0]
    assert (verdict.rows, verdict.num_nodes) == (24, 4)
    assert verdict.path.tolist()[:1] == ([0] if sure else [])


def test_arrays_from_the_wire_may_be_read_only_and_unaligned():
    def of_wire(values, dtype):
        data = b"\0" + np.array(values, dtype).tobytes()
        return np.frombuffer(memoryview(data)[1:], dtype)

    sampling = SamplingParams(seed=1, temperature=1.0, acceptance="rejection", presence_penalty=0.5)
    probs = TopProbs(of_wire([3, 5, 4, 6], np.int32), of_wire([0.5, 0.5, 0.5, 0.5], np.float32), 2)
    delta = SequenceDelta(1, 0, of_wire(PROMPT, np.int32))
    begin = SequenceStart(sampling, len(PROMPT))
    arrays = of_wire([3, 4], np.int32), of_wire([-1, 0], np.int32), of_wire([0.5, 0.5], np.float32)
    tree = DraftTree(*arrays, probs)
    engine = target()
    one = VerifyItem(delta, 99, tree, begin)
    assert len(verify(engine, one).verdicts) == 1
    draft = DraftEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4))
    assert len(draft.draft(DraftBatch(1, [DraftItem(delta, 3, begin)])).trees[0].token_ids) >= 1


def test_a_sequence_is_idle_only_when_long_unmentioned():
    idle = IdleSequences(idle_s=60.0)
    idle.note([1, 2], [], 0.0)
    assert idle.due(0.0) == []
    idle.note([2], [], 55.0)
    assert (idle.due(61.0), idle.due(200.0)) == ([1], [2])
    idle.note([3], [], 201.0)
    idle.note([], [3], 202.0)
    assert idle.due(400.0) == []


def tiny_llama(**changes):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**{"vocab_size": 61, "intermediate_size": 64, "max_position_embeddings": 128, **sizes})
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_layers_of_another_kind_are_refused_by_name():
    with pytest.raises(ModelError, match="indexed_attention"):
        ModelRunner(tiny_llama(layer_types=["indexed_attention"]), 64)


def test_experts_are_refused_in_bitwise_mode_only():
    with pytest.raises(ModelError, match="experts"):
        ModelRunner(tiny_llama(num_local_experts=4), 64, "bitwise")
    ModelRunner(tiny_llama(num_local_experts=4), 64)


@pytest.mark.parametrize("argument", ["alibi", "position_bias"])
def test_attention_with_an_argument_that_is_not_computed_is_an_error_not_another_text(argument):
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: plain(*args, **kwargs, **{argument: torch.zeros(2)})
    with pytest.raises(ModelError, match=argument):
        TargetEngine(model, EngineOptions(8, 4))


def test_a_layer_that_attends_by_itself_is_an_error_not_another_text():
    model = tiny_llama(num_hidden_layers=2)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ModelError, match="1 of 2 layers"):
        TargetEngine(model, EngineOptions(8, 4))


@pytest.mark.parametrize("threads", [1, 3])
def test_in_bitwise_mode_a_row_has_the_same_bits_at_every_place_of_a_tile_with_any_number_of_threads(threads):
    model = tiny_llama(intermediate_size=14336)  # wide enough to be split among threads
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(20.0)  # away from zero, where all exponentials agree
    # Looked at before the next product, whose sum drowns most single bits.
    activations = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, inputs, output: activations.append(output[0]))
    runner = ModelRunner(model, 64, "bitwise")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for token in range(12):
            pool = BlockPool(ROW_TILE, 4)
            parts = []
            for seq_id in range(ROW_TILE):
                sequence = Sequence(seq_id, SequenceStart(GREEDY, 1), pool)
                sequence.extend(np.array([token], np.int32))
                sequence.reserve(1)
                parts.append(SequenceRows(sequence, 1, no_tokens(), no_tokens()))
            logits = runner.forward(pack(parts), np.arange(ROW_TILE))
            assert all(torch.equal(logits[0], row) for row in logits)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(rows[0], row) for rows in activations for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_zero_and_takes_memory_only_as_it_is_written(dtype):
    before = psutil.Process().memory_info().rss
    cache = KvCache(1 << 18, torch.device("cpu"), [LayerShape(4, 64, 32, dtype)] * 2)
    key, value = cache.layer(1)
    assert (key.shape, value.shape, key.dtype) == (((1 << 18) + 1, 4, 64), ((1 << 18) + 1, 4, 32), dtype)
    assert psutil.Process().memory_info().rss - before < (key.nbytes + value.nbytes) // 4
    assert not key[12345].any()
    key[7] = 1.0
    assert cache.layer(1)[0][7].all()
    assert not cache.layer(0)[0][7].any()


def test_a_cleared_engine_finds_no_prefix_and_keeps_neither_moves_nor_features():
    engine = target()
    verify(engine, item(1, 0, PROMPT))
    head = SimpleNamespace(
        tap=FeatureTap(engine.model, None), launches=None, computed=lambda slots: None, is_parallel=False
    )
    engine.attach_head(head)
    head.tap.open()
    verify(engine, item(2, 0, PROMPT))
    assert head.tap.kept
    engine._runner.kv.move(np.array([[1], [2]]))
    engine.clear()
    assert not engine._runner.kv.waiting_moves.size
    assert (head.tap.is_open, head.tap.kept) == (False, {})
    engine.eagle_head = None
    (verdict,) = verify(engine, item(1, 0, PROMPT)).verdicts
    assert verdict.num_cached == 0

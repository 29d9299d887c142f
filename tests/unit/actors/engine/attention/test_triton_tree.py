"""The Triton kernels against padded attention in float32, which is the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig

from actors.draft_model.draft_engine import DraftEngine
from actors.engine.attention.interface import AttentionPlan, Scoring
from actors.engine.attention.tree_rows import TreeRows
from actors.engine.kv_cache import KvCache
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from paceline_testing.attention_cases import TOLERANCES, Case
from paceline_testing.drafting import tree_to_verify
from paceline_testing.forests import forest_of
from paceline_testing.integrity import check_integrity
from paceline_testing.random_forests import forests
from paceline_testing.tiny_models import make_tiny_model

GREEDY = SamplingParams(seed=1, temperature=0.0)


class TreeCase(Case):
    """A case for the tree kernel. launch: arguments of `TreePlan`."""

    def rows(self) -> TreeRows:
        return self.inputs().rows

    def got_by_tree(self, rows: TreeRows | None = None, **launch: int) -> torch.Tensor:
        return self.got(self._plan(rows, launch))[0]

    def check_tree(self, **launch: int) -> None:
        self.check(self._plan(None, launch))

    def _plan(self, rows: TreeRows | None, launch: dict[str, int]) -> Callable[[KvCache], AttentionPlan]:
        from actors.engine.attention.triton_tree import TreePlan

        launch = {"max_context": 1 << int(self.forest.batch.contexts.max()).bit_length()} | launch
        return lambda kv: TreePlan(rows or self.rows(), kv, self.forest.block_size, **launch)


# Not shrunk: the interpreter would take minutes.
@settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    forest=forests(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (7, 1)]),
    dims=st.sampled_from([(8, 8), (24, 16), (80, 96)]),
    dtype=st.sampled_from(list(TOLERANCES)),
    window=st.sampled_from([None, 1, 2, 9, 30, -3, -20]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    split_size=st.sampled_from([16, 40, 1024]),
    unsplit_rows=st.sampled_from([8, 256]),
)
def test_any_batch_attends_as_padded_attention_does(
    triton_device, forest, heads, dims, dtype, window, softcap, has_sinks, split_size, unsplit_rows
):
    sinks = torch.linspace(-2.0, 3.0, heads[0], device=triton_device) if has_sinks else None
    scoring = Scoring(dims[0] ** -0.5, window, softcap, sinks)
    case = TreeCase(forest, scoring, triton_device, heads, dims, dtype)
    case.check_tree(split_size=split_size, unsplit_rows=unsplit_rows)


PLAIN = Scoring(0.3, None, None)
BRANCHED = [-1, -1, 0, 1, 3, 3, 0]


@pytest.mark.parametrize("launch", [{}, {"split_size": 64}])
def test_trees_of_several_words_attend_to_their_ancestors_also_when_they_have_grown(triton_device, launch):
    rng = np.random.default_rng(0)
    parents = [int(rng.integers(-1, node)) for node in range(140)]
    forest = forest_of([(5, 4, parents, 0), (40, 40, parents, 100), (9, 8, BRANCHED, 0)])
    TreeCase(forest, Scoring(0.3, 12, None), triton_device, heads=(1, 1)).check_tree(**launch)


def test_a_prefill_chunk_and_decoding_share_a_launch(triton_device):
    forest = forest_of([(150, 30, [], 0), (70, 69, BRANCHED, 0), (33, 32, [], 0)], block_size=16)
    TreeCase(forest, PLAIN, triton_device, heads=(2, 1), dims=(16, 16)).check_tree(split_size=32, unsplit_rows=16)


def test_a_head_of_256(triton_device):
    TreeCase(forest_of([(20, 19, BRANCHED, 0)]), PLAIN, triton_device, (2, 1), (256, 256), torch.bfloat16).check_tree()


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        (32, (576, 512), torch.bfloat16),  # DeepSeek's: several tiles of heads
        (10, (576, 512), torch.float32),  # heads that are no power of two
        (40, (288, 256), torch.float16),  # MiniCPM3
        (34, (32, 24), torch.float32),  # neither part is a power of two
        (1, (9, 8), torch.float32),
    ],
)
@pytest.mark.parametrize("launch", [{}, pytest.param({"split_size": 16}, marks=pytest.mark.slow)])
def test_values_that_are_columns_of_the_keys(triton_device, heads, dims, dtype, launch):
    forest = forest_of([(20, 19, BRANCHED, 0), (9, 3, [], 0)], block_size=16)
    scoring = Scoring(dims[0] ** -0.5, None, None)
    TreeCase(forest, scoring, triton_device, (heads, 1), dims, dtype, shares_values=True).check_tree(**launch)


@pytest.mark.parametrize("shares_values", [False, True])
def test_numbers_that_are_not_finite_are_zeros_for_other_rows(triton_device, shares_values):
    forest = forest_of([(6, 1, BRANCHED, 0), (20, 19, [], 0)])
    outputs = []
    for number in (float("nan"), float("-inf"), 0.0):
        case = TreeCase(forest, PLAIN, triton_device, dims=(24, 16), shares_values=shares_values)
        case.keys[3], case.values[3], case.keys[7, :, -1] = number, number, number  # of a token and of a node
        output, kv = case.got(case._plan(None, {}))
        assert all(tensor[:-1].isfinite().all() for tensor in kv.layer(0))
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("known", [1 << 15, pytest.param(1 << 17, marks=pytest.mark.slow)])
def test_a_context_of_many_splits(triton_device, known):
    """With a tree behind it, a row in each of 33 or 129."""
    forest = forest_of([(known, known - 1, [-1], 0)], block_size=64)
    TreeCase(forest, Scoring(0.5, None, None), triton_device, (1, 1), (8, 8)).check_tree(max_context=forest.num_slots)


def test_contexts_that_end_at_borders_of_blocks_and_splits(triton_device):
    parts = [(known, known - 1, [], 0) for known in (15, 16, 17, 31, 32, 33)]
    TreeCase(forest_of(parts, block_size=16), PLAIN, triton_device, (1, 1)).check_tree(split_size=16)


def test_sequences_without_rows_and_room_in_the_block_tables_change_nothing(triton_device):
    case = TreeCase(forest_of([(20, 19, BRANCHED, 0), (9, 3, [], 0)]), PLAIN, triton_device)
    rows = case.rows()
    padded = rows._replace(
        first_rows=torch.cat([rows.first_rows, rows.first_rows[-1:].expand(3)]),
        begins=pad(rows.begins, (0, 3)),
        tree_starts=pad(rows.tree_starts, (0, 3)),
        block_tables=pad(rows.block_tables, (0, 5, 0, 3)),
        node_positions=pad(rows.node_positions, (0, 0, 0, 3)),
    )
    wanted, _ = case.wanted()
    for launch in ({}, {"split_size": 16}, {"max_context": 128, "split_size": 16}):
        torch.testing.assert_close(case.got_by_tree(padded, **launch), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "place", "bit"),
    [
        ("ancestors", 12, 1),  # a node sees a sibling of its parent
        ("visible_ends", 0, 0),  # a row does not see itself
        ("begins", 1, 0),  # own rows are taken for the ones before
        ("block_tables", 2, 0),
        ("row_positions", 5, 0),  # the window is one token wider
        ("node_positions", 1, 2),  # a node is taken to be outside of the window
    ],
)
def test_one_wrong_bit_is_seen(triton_device, name, place, bit):
    case = TreeCase(forest_of([(20, 10, BRANCHED, 0), (9, 9, BRANCHED, 3)]), Scoring(0.3, 6, None), triton_device)
    rows = case.rows()
    wrong = getattr(rows, name).clone()
    wrong.view(-1)[place] ^= 1 << bit
    wanted, _ = case.wanted()
    assert (case.got_by_tree(rows) - wanted).abs().max() < 1e-5
    assert (case.got_by_tree(rows._replace(**{name: wrong})) - wanted).abs().max() > 1e-3


def gemma2() -> torch.nn.Module:
    """Every other layer has a sliding window, and all have a soft cap."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16,
        initializer_range=0.3, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.randn(61, 32))  # untied, or it would repeat the last token
    return model


def gpt_oss() -> torch.nn.Module:
    """Sinks in every layer, sliding windows in every other one."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.5, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    return model


def tiny_llama() -> torch.nn.Module:
    return make_tiny_model("llama", vocab_size=61, hidden_size=32)


def greedy_rounds(model: torch.nn.Module, device: torch.device, attention: str, rounds: int = 4) -> list[list[int]]:
    """Greedy tokens of two sequences, prefilled in chunks, with a tree of drafts in every round."""
    engine = TargetEngine(model.to(device), EngineOptions(64, 4, attention=attention))
    texts = [[7, 3, 9, 7, 3], list(range(20, 43))]
    num_prompt = [len(text) for text in texts]
    known = [0, 0]
    rng = np.random.default_rng(0)
    for number in range(rounds):
        items, trees = [], []
        for index, text in enumerate(texts):
            tokens = rng.permutation(61)[:7].tolist() if number > 0 else []
            begin = SequenceStart(GREEDY, num_prompt[index]) if number == 0 else None
            delta = SequenceDelta(index + 1, known[index], np.array(text[known[index] :], np.int32))
            known[index] = len(text)
            items.append(VerifyItem(delta, 8, tree_to_verify(tokens, BRANCHED[: len(tokens)]), begin))
            trees.append(tokens)
        for verdict in engine.verify(VerifyBatch(number + 1, items)).verdicts:
            if verdict.next_token >= 0:
                index = verdict.seq_id - 1
                texts[index] += [trees[index][node] for node in verdict.path] + [verdict.next_token]
        check_integrity(engine)
    return texts


@pytest.mark.parametrize("model", [pytest.param(tiny_llama, marks=pytest.mark.slow), gemma2, gpt_oss])
def test_the_engine_says_the_same_tokens_with_either_attention(triton_device, model):
    padded = greedy_rounds(model(), triton_device, "padded")
    assert len(set(padded[0][5:])) > 1
    assert greedy_rounds(model(), triton_device, "triton_tree") == padded


def grown_trees(device: torch.device, attention: str) -> list[tuple[list[int], list[int]]]:
    """Draft trees of three sequences, each grown over several forwards."""
    engine = DraftEngine(tiny_llama().to(device), EngineOptions(64, 4, attention=attention))
    prompts = [np.arange(first, last, dtype=np.int32) for first, last in ((0, 5), (20, 43), (9, 26))]
    items = [
        DraftItem(SequenceDelta(index + 1, 0, prompt), 9, SequenceStart(GREEDY, len(prompt)))
        for index, prompt in enumerate(prompts)
    ]
    trees = engine.draft(DraftBatch(1, items)).trees
    return [(draft.token_ids.tolist(), draft.parents.tolist()) for draft in trees]


def test_a_draft_engine_grows_the_same_trees_with_either_attention(triton_device):
    padded = grown_trees(triton_device, "padded")
    assert any(len(tokens) > 3 for tokens, _ in padded)
    assert grown_trees(triton_device, "triton_tree") == padded


def test_the_operator_keeps_to_its_schema_and_can_be_traced(triton_device, monkeypatch):
    case = TreeCase(forest_of([(20, 19, BRANCHED, 0)]), PLAIN, triton_device)
    calls = []
    operator = torch.ops.paceline.tree_attend
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.paceline, "tree_attend", lambda *given: calls.append(given) or operator(*given))
        case.got_by_tree()
    torch.library.opcheck(operator.default, calls[0], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("attention", ["padded", "triton_tree"])
def test_a_model_with_sinks_has_the_logits_of_the_unpatched_one(triton_device, attention):
    reference = gpt_oss().to(triton_device)
    forest = forest_of([(20, 0, [-1, -1, 0], 0), (9, 0, [], 0)])
    tokens = forest.batch.token_ids
    contexts = [tokens[:end] for end in range(1, 21)]
    contexts += [np.append(tokens[:20], tokens[20:][path]) for path in ([0], [1], [0, 2])]
    contexts += [tokens[23 : 23 + end] for end in range(1, 10)]
    with torch.inference_mode():
        wanted = torch.stack(
            [reference(torch.tensor(text[None], device=triton_device)).logits[0, -1] for text in contexts]
        )
    runner = ModelRunner(reference, forest.num_slots, attention=attention)
    logits = runner.forward(forest.batch, np.arange(forest.batch.num_rows))
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("which", "number"), [("each kernel", 7), pytest.param("other shapes", 5, marks=pytest.mark.slow)]
)
def test_the_kernels_compile_for_ampere_and_hopper(triton_device, tmp_path, which, number):
    """The interpreter takes much that the compiler refuses."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, Path(__file__).with_name("compile_kernels.py"), which]
    lines = subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == number
    for line in map(json.loads, lines):
        assert line["shared"] <= line.get("limit", 99 << 10), line  # of a block, on the smallest of them
        assert line["spilled"] <= 128, line


def test_sinks_are_refused_in_bitwise_mode():
    from actors.engine.attention.exact import ExactPlan

    case = TreeCase(forest_of([(5, 4, [], 0)]), replace(PLAIN, sinks=torch.zeros(4)), torch.device("cpu"))
    plan = ExactPlan(case.forest.batch, case.cache(torch.float32), 0, case.num_rows)
    with pytest.raises(ModelError, match="sinks"):
        plan.attend(0, case.query, case.keys, case.values, case.scoring)


def test_splits_give_every_processor_work_and_get_no_smaller_than_pays(triton_device):
    from actors.engine.attention.triton_tree import split_size_for

    few, many = split_size_for(8192, programs=8, processors=132), split_size_for(8192, programs=256, processors=132)
    assert (few, many) == (128, 2048)
    assert split_size_for(8192, programs=64, processors=132) == 1024
    assert split_size_for(1, 1, 1) == 128
    assert split_size_for(1 << 20, 1024, 1) == 2048


@pytest.mark.parametrize(
    ("itemsize", "rows", "keys", "has_large_shared", "shape"),
    [
        (2, 8, 128, True, (32, 32)),
        (2, 8, 512, True, (32, 64)),
        (2, 8, 2048, True, (32, 128)),
        (2, 8, 2048, False, (32, 64)),  # the largest tile does not fit
        (2, 64, 2048, True, (64, 32)),  # nor do registers suffice
        (4, 8, 2048, True, (16, 16)),
    ],
)
def test_programs_of_many_keys_have_large_tiles_where_they_fit(
    triton_device, itemsize, rows, keys, has_large_shared, shape
):
    from actors.engine.attention.triton_tree import tile_shape

    assert tile_shape(128, itemsize, 4, rows, keys, has_large_shared) == shape

"""Fused layers against the layers they replace: any batch of prompts, chains and trees, in both dtypes."""

from __future__ import annotations

import copy
import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM, LlamaConfig, Ministral3Config, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from actors.engine.batch import SequenceRows
from actors.engine.block_pool import BlockPool
from actors.engine.cpu_kernels import layer_fusion, layer_steps
from actors.engine.cpu_kernels.fused_layer import FusedLayer
from actors.engine.cpu_kernels.panel_linear import PanelLinear
from actors.engine.cpu_kernels.threads import has_openmp
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.sequence import Sequence
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceStart
from actors.models.quantization import quantize_linears

pytestmark = pytest.mark.skipif(not has_openmp(), reason="torch has no OpenMP runtime that exports GOMP_parallel here")

VOCAB, BLOCK, BLOCKS = 97, 16, 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=False),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=70),
    "one key head": LlamaConfig(**SIZES | {"num_key_value_heads": 1, "num_attention_heads": 3}),
    "dynamic angles": LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "scaled angles": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "odd": LlamaConfig(**SIZES | {"hidden_size": 90, "intermediate_size": 122}),
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5) + (parameter.ndim == 1)
    return model.to(dtype)


class _ScaledLayer(LlamaDecoderLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 1.01


def is_fused(model: nn.Module) -> list[bool]:
    return [isinstance(layer, FusedLayer) for layer in model.model.layers]


def rounds_of(rng: np.random.Generator, num_sequences: int) -> list[list[tuple[int, list[int]]]]:
    """Several forwards: of each sequence, how many committed tokens it computes and the parents of its draft nodes."""
    rounds = []
    for number in range(3):
        parts = []
        for _ in range(num_sequences):
            count = int(rng.integers(1, 140 if number == 0 else 4))
            nodes = int(rng.integers(0, 10))
            is_chain = rng.random() < 0.4
            parts.append((count, [node - 1 if is_chain else int(rng.integers(-1, node)) for node in range(nodes)]))
        rounds.append(parts)
    return rounds


def logits_of(runner: ModelRunner, rounds: list[list[tuple[int, list[int]]]], seed: int) -> torch.Tensor:
    """Logits of all rows of all forwards. Drafts are never accepted: the next forward overwrites them."""
    rng, pool = np.random.default_rng(seed), BlockPool(BLOCKS, BLOCK, False)
    sequences = [
        Sequence(number, SequenceStart(SamplingParams(seed=0, temperature=0.0), 1), pool)
        for number in range(len(rounds[0]))
    ]
    found = []
    for round_ in rounds:
        parts, wanted = [], []
        for sequence, (count, parents) in zip(sequences, round_, strict=True):
            sequence.extend(rng.integers(VOCAB, size=count, dtype=np.int32))
            assert sequence.reserve(sequence.length + len(parents))
            nodes = rng.integers(VOCAB, size=len(parents), dtype=np.int32)
            parts.append(SequenceRows(sequence, count, nodes, np.array(parents, dtype=np.int32)))
            wanted.append(parts[-1].num_rows)
        found.append(runner.run(parts, wanted).float())
        for sequence, (count, _) in zip(sequences, round_, strict=True):
            sequence.computed(count, np.empty(0, np.int32), np.empty(0, np.int32))
    return torch.cat(found)


@pytest.fixture(scope="module")
def runners():
    made = {}

    def pair(name: str, dtype: torch.dtype) -> tuple[ModelRunner, ModelRunner]:
        if (name, dtype) not in made:
            model = make_model(name, dtype)
            plain = ModelRunner(copy.deepcopy(model), BLOCKS * BLOCK, is_eager=True)
            made[name, dtype] = ModelRunner(model, BLOCKS * BLOCK), plain
        return made[name, dtype]

    return pair


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_with_the_parts_of_llama_are_fused(runners, name, dtype):
    fused, plain = runners(name, dtype)
    assert is_fused(fused.model) == [True] * 3
    assert is_fused(plain.model) == [False] * 3


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_sequences=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batch_has_the_logits_of_plain_layers(runners, name, dtype, num_sequences, seed):
    fused, plain = runners(name, dtype)
    rounds = rounds_of(np.random.default_rng(seed), num_sequences)
    found, expected = logits_of(fused, rounds, seed), logits_of(plain, rounds, seed)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < (1e-5 if dtype == torch.float32 else 0.06)
    assert error.mean() < (2e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_committed_rows_and_chains_depend_neither_on_company_nor_on_threads(dtype):
    runner = ModelRunner(make_model("llama", dtype), BLOCKS * BLOCK)
    tokens = np.random.default_rng(1).integers(VOCAB, size=150, dtype=np.int32)

    def logits(lengths: list[int], chain: int, company: bool) -> torch.Tensor:
        """Of the last rows, after prompts in chunks that end at `lengths`; the last `chain` tokens are draft nodes."""
        pool = BlockPool(BLOCKS, BLOCK, False)
        begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), 1)
        sequence, other = Sequence(1, begin, pool), Sequence(2, begin, pool)
        other.extend(tokens[::-1][:40].copy())
        for length in lengths:
            count = length - sequence.length
            sequence.extend(tokens[sequence.length : length])
            is_last = length == lengths[-1]
            nodes = tokens[length : length + chain] if is_last else tokens[:0]
            sequence.reserve(length + len(nodes))
            rows = [SequenceRows(sequence, count, nodes, np.arange(-1, len(nodes) - 1, dtype=np.int32))]
            if company and is_last:
                other.reserve(40)
                rows.insert(0, SequenceRows(other, 40, tokens[:0], tokens[:0]))
            found = runner.run(rows, [0] * (len(rows) - 1) + [1 + len(nodes)])
            sequence.computed(count, tokens[:0], tokens[:0])
        return found

    drafted = logits([100, 120], chain=20, company=False)
    assert torch.equal(drafted, logits([31, 77, 120], chain=20, company=True))
    for index in (1, 7, 20):  # plain decoding
        assert torch.equal(drafted[index], logits([100, 120 + index - 1, 120 + index], chain=0, company=False)[0])
    for count in (2, 3):
        torch.set_num_threads(count)
        assert torch.equal(drafted, logits([100, 120], chain=20, company=False))


def test_a_layer_that_computes_something_else_is_not_fused():
    for change in ("activation", "residual", "hook", "norm"):
        model = make_model("llama")
        layer = model.model.layers[1]
        if change == "activation":
            layer.mlp.act_fn = nn.GELU()
        elif change == "residual":
            layer.__class__ = _ScaledLayer
        elif change == "hook":
            layer.mlp.register_forward_hook(lambda *_: None)
        else:
            layer.post_attention_layernorm = nn.LayerNorm(96).requires_grad_(False)
        runner = ModelRunner(model, BLOCKS * BLOCK)
        assert is_fused(runner.model) == [True, False, True], change


def test_a_layer_that_adds_nothing_in_the_trial_is_not_fused():
    model = make_model("llama")
    model.model.layers[1].self_attn.o_proj.weight.zero_()
    model.model.layers[1].mlp.down_proj.weight.zero_()
    assert is_fused(ModelRunner(model, BLOCKS * BLOCK).model) == [True, False, True]


def test_a_layer_that_scales_by_position_is_not_fused():
    """Its scale is 1 up to position 16,384, where a trial of few rows sees nothing."""
    model = AutoModelForCausalLM.from_config(Ministral3Config(**SIZES | {"max_position_embeddings": 65_536})).eval()
    assert is_fused(ModelRunner(model, BLOCKS * BLOCK).model) == [False] * 3


def test_without_openmp_layers_stay(monkeypatch):
    monkeypatch.setattr(layer_fusion, "has_openmp", lambda: False)
    assert is_fused(ModelRunner(make_model("llama"), BLOCKS * BLOCK).model) == [False] * 3


def test_engines_of_one_model_may_run_at_once():
    model = make_model("llama")
    runners = [ModelRunner(model, BLOCKS * BLOCK) for _ in range(2)]
    rounds = [rounds_of(np.random.default_rng(seed), 2) for seed in range(2)]

    def again(index: int) -> list[torch.Tensor]:
        return [logits_of(runners[index], rounds[index], 3) for _ in range(8)]

    expected = [logits_of(runner, round_, 3) for runner, round_ in zip(runners, rounds, strict=True)]
    with ThreadPoolExecutor(2) as threads:
        for index, found in enumerate(threads.map(again, range(2))):
            assert all(torch.equal(one, expected[index]) for one in found)


def test_heads_that_are_no_whole_panels_are_not_fused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"head_dim": 24})).eval()
    assert is_fused(ModelRunner(model, BLOCKS * BLOCK).model) == [False] * 3


@pytest.mark.parametrize("name", ["llama", "biases", "qwen3"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_other_forwards_of_the_model_run_its_layers_as_they_were(name, quantization):
    model = make_model(name)
    quantize_linears(model, quantization, torch.device("cpu"))
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        round_ = [[(9, [-1, 0, 0])]]
        plain = logits_of(ModelRunner(copy.deepcopy(model), BLOCKS * BLOCK, is_eager=True), round_, 1)
        first, second = ModelRunner(model, BLOCKS * BLOCK), ModelRunner(model, 2 * BLOCKS * BLOCK)
        for runner in (first, second, first, ModelRunner(model, BLOCKS * BLOCK, "bitwise")):
            assert torch.allclose(logits_of(runner, round_, 1), plain, atol=1e-3)
        model.set_attn_implementation("sdpa")
        assert torch.allclose(model(ids).logits, expected, atol=1e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "biases", "odd"])
def test_quantized_layers_are_fused_and_say_what_plain_ones_say(name, quantization):
    model = make_model(name)
    quantize_linears(model, quantization, torch.device("cpu"))
    plain = ModelRunner(copy.deepcopy(model), BLOCKS * BLOCK, is_eager=True)
    fused = ModelRunner(model, BLOCKS * BLOCK)
    assert is_fused(fused.model) == [True] * 3
    rounds = rounds_of(np.random.default_rng(2), 2)
    found, expected = logits_of(fused, rounds, 2), logits_of(plain, rounds, 2)
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-3


def calls_of(monkeypatch) -> list[int]:
    """How many steps each call from now on runs."""
    steps: list[int] = []
    run, address = layer_steps.runner()

    def counted(runner, program, *rest):
        steps.append(int(ctypes.c_int64.from_address(program).value))
        run(runner, program, *rest)

    monkeypatch.setattr(layer_steps, "runner", lambda: (counted, address))
    return steps


def with_panels(model: nn.Module) -> nn.Module:
    """With the kernel of the output layer that whole forwards have."""
    model.lm_head = PanelLinear(model.lm_head)
    return model


def test_all_layers_run_in_one_call_unless_somebody_looks_between_them(monkeypatch):
    runner = ModelRunner(with_panels(make_model("llama")), BLOCKS * BLOCK)
    rounds = rounds_of(np.random.default_rng(4), 2)
    layers = runner.model.model.layers
    steps = calls_of(monkeypatch)
    expected = logits_of(runner, rounds, 3)
    assert steps == [33] * len(rounds)  # embeddings, the last norm and the output layer, too
    seen: list[torch.Tensor] = []
    hook = layers[1].register_forward_hook(lambda module, args, outputs: seen.append(outputs.clone()))
    assert torch.equal(logits_of(runner, rounds, 3), expected)
    assert steps[len(rounds) :] == [10] * 3 * len(rounds)
    hook.remove()
    assert torch.equal(logits_of(runner, rounds, 3), expected)
    assert steps[-1] == 33
    everywhere = register_module_forward_hook(lambda module, args, outputs: None)
    assert torch.equal(logits_of(runner, rounds, 3), expected)
    assert steps[-1] == 10
    everywhere.remove()
    rows = [sum(count + len(parents) for count, parents in round_) for round_ in rounds]
    assert [outputs.shape[1] >= count for outputs, count in zip(seen, rows, strict=True)] == [True] * len(rounds)
    assert not torch.equal(seen[0], seen[1][:, : seen[0].shape[1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "biases", "mistral", "qwen2", "qwen3", "dynamic angles", "scaled angles"])
def test_a_whole_forward_gives_the_bits_of_the_modules_between(name, dtype, monkeypatch):
    model = with_panels(make_model(name, dtype))
    runner, rounds = ModelRunner(model, BLOCKS * BLOCK), rounds_of(np.random.default_rng(6), 3)
    steps = calls_of(monkeypatch)
    found = logits_of(runner, rounds, 3)
    for module in (
        model,
        model.model,
        model.model.embed_tokens,
        model.model.rotary_emb,
        model.model.norm,
        model.lm_head,
    ):
        hook = module.register_forward_hook(lambda *_: None)
        assert torch.equal(logits_of(runner, rounds, 3), found)
        hook.remove()
    assert steps == [33] * len(rounds) + [30] * 6 * len(rounds)


def test_a_forward_of_one_layer_runs_in_one_call(monkeypatch):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"num_hidden_layers": 1})).eval()
    runner, rounds = ModelRunner(with_panels(model), BLOCKS * BLOCK), rounds_of(np.random.default_rng(7), 2)
    steps = calls_of(monkeypatch)
    found = logits_of(runner, rounds, 3)
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert torch.equal(logits_of(runner, rounds, 3), found)
    hook.remove()
    assert steps == [13] * len(rounds) + [10] * len(rounds)


def test_a_whole_forward_goes_beyond_the_angles_it_has_and_refuses_tokens_without_embeddings():
    model = with_panels(make_model("llama"))
    runner, pool = ModelRunner(model, 150 * BLOCK), BlockPool(150, BLOCK, False)
    sequence = Sequence(1, SequenceStart(SamplingParams(seed=0, temperature=0.0), 1), pool)
    found = []
    for length in (900, 1_100, 300):  # of 1,024 positions, of more, and again of few
        sequence.extend(np.arange(length, dtype=np.int32) % VOCAB)
        assert sequence.reserve(sequence.length)
        none = np.empty(0, np.int32)
        rows = [SequenceRows(sequence, length, none, none)]
        found.append(runner.run(rows, [1]))
        hook = model.register_forward_hook(lambda *_: None)
        assert torch.equal(runner.run(rows, [1]), found[-1])
        hook.remove()
        sequence.computed(length, none, none)
    for token in (VOCAB, -1):
        nodes = np.array([token], np.int32)
        assert sequence.reserve(sequence.length + 1)
        with pytest.raises(IndexError, match="97, the number of embeddings"):
            runner.run([SequenceRows(sequence, 0, nodes, np.array([-1], np.int32))], [1])


@pytest.mark.parametrize("part", ["head", "embedding", "code", "norm"])
def test_a_model_with_another_part_runs_its_own_modules(part, monkeypatch):
    model = make_model("llama")
    if part != "head":
        with_panels(model)
    if part == "embedding":
        model.model.embed_tokens.max_norm = 1.0
    elif part == "code":
        model.__class__ = type(
            "Other", (LlamaForCausalLM,), {"forward": lambda self, **given: super(type(self), self).forward(**given)}
        )
    elif part == "norm":
        model.model.norm = nn.LayerNorm(96).requires_grad_(False)
    else:
        model.lm_head.register_forward_hook(lambda *_: None)
    runner, steps = ModelRunner(model, BLOCKS * BLOCK), calls_of(monkeypatch)
    logits_of(runner, [[(9, [])]], 3)
    assert steps == [30]


def test_a_layer_that_is_not_fused_parts_the_chain(monkeypatch):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"num_hidden_layers": 6})).eval()
    model.model.layers[2].mlp.act_fn = nn.GELU()
    fused = ModelRunner(model, BLOCKS * BLOCK)
    assert is_fused(fused.model) == [True, True, False, True, True, True]
    steps, rounds = calls_of(monkeypatch), rounds_of(np.random.default_rng(4), 2)
    logits_of(fused, rounds, 3)
    assert steps == [20, 30] * len(rounds)


@pytest.mark.parametrize("in_place", [False, True])
def test_layers_between_which_a_model_does_something_run_one_by_one(in_place, monkeypatch):
    class Between(LlamaModel):
        def forward(self, input_ids, position_ids, **kwargs):
            hidden = self.embed_tokens(input_ids)
            angles = self.rotary_emb(hidden, position_ids=position_ids)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=angles, **kwargs)
                if in_place:
                    hidden += 0.25
                else:
                    hidden = hidden + 0.25
            return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    model = make_model("llama")
    model.model.__class__ = Between
    plain = ModelRunner(copy.deepcopy(model), BLOCKS * BLOCK, is_eager=True)
    fused = ModelRunner(model, BLOCKS * BLOCK)
    assert is_fused(fused.model) == [True] * 3
    steps, rounds = calls_of(monkeypatch), rounds_of(np.random.default_rng(4), 2)
    found, expected = logits_of(fused, rounds, 3), logits_of(plain, rounds, 3)
    assert steps == [10] * 3 * len(rounds)
    assert torch.allclose(found, expected, atol=1e-3)


def test_an_engine_takes_the_option():
    assert is_fused(TargetEngine(make_model("llama"), EngineOptions(8)).model) == [True] * 3
    assert is_fused(TargetEngine(make_model("llama"), EngineOptions(8, is_eager=True)).model) == [False] * 3

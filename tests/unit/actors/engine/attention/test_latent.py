"""Latent attention with cached latents against the unpatched model, which expands keys and values."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from actors.engine import model_runner
from actors.engine.attention import exact
from actors.engine.attention.latent import cache_latents, latent_projection
from actors.engine.batch import SequenceRows, pack
from actors.engine.block_pool import BlockPool
from actors.engine.compiled.layers import compile_model
from actors.engine.kv_bytes import kv_bytes_per_token
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.sequence import Sequence
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.quantization import quantize_linear
from paceline_testing.drafting import tree_to_verify
from paceline_testing.forests import forest_of
from paceline_testing.integrity import check_integrity

VOCAB = 61
GREEDY = SamplingParams(seed=1, temperature=0.0)
LATENT, ROTATED = 24, 8
# DeepSeek's have experts; MiniCPM3, which has none, may be bitwise.
KINDS = ("deepseek_v2", "deepseek_v3", "minicpm3")
EXPERTS = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


def make(kind: str, **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": LATENT, "q_lora_rank": 16,
        "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": 16, "v_head_dim": 12, "max_position_embeddings": 256,
        "initializer_range": 0.3, "tie_word_embeddings": False,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **shape, **({} if kind == "minicpm3" else EXPERTS))
    config.update(more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, 32))
    return model.requires_grad_(False)


def logits_of(model: PreTrainedModel, contexts: list[np.ndarray]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack([model(torch.tensor(text[None])).logits[0, -1] for text in contexts])


@pytest.mark.parametrize("attention", ["padded", "triton_tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_prompts_and_trees_have_the_logits_of_the_unpatched_model(triton_device, kind, attention):
    reference = make(kind)
    forest = forest_of([(20, 0, [-1, -1, 0], 0), (9, 0, [], 0)])
    tokens = forest.batch.token_ids.astype(np.int64)
    contexts = [tokens[:end] for end in range(1, 21)]
    contexts += [np.append(tokens[:20], tokens[20:][path]) for path in ([0], [1], [0, 2])]
    contexts += [tokens[23 : 23 + end] for end in range(1, 10)]
    wanted = logits_of(reference, contexts)
    runner = ModelRunner(reference.to(triton_device), forest.num_slots, attention=attention)
    logits = runner.forward(forest.batch, np.arange(forest.batch.num_rows))
    torch.testing.assert_close(logits.cpu(), wanted, atol=1e-4, rtol=5e-6)  # some logits are above 50


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_holds_one_latent_a_token_and_layer(kind):
    model = make(kind)
    kv = ModelRunner(model, 40).kv
    assert kv_bytes_per_token(make(kind)) == 2 * (LATENT + ROTATED) * 4
    assert kv.num_bytes == 41 * 2 * (LATENT + ROTATED) * 4
    keys, values = kv.layer(1)
    assert values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


class Stream:
    """The router's side of a sequence: drafts are the next tokens of the truth behind wrong branches."""

    def __init__(self, seq_id: int, prompt: list[int], truth: list[int]) -> None:
        self.seq_id, self.num_prompt, self.truth = seq_id, len(prompt), truth
        self.tokens = list(prompt)
        self.known = self.accepted = self.num_cached = 0

    def item(self) -> VerifyItem:
        begin = SequenceStart(GREEDY, self.num_prompt) if self.known == 0 else None
        delta = SequenceDelta(self.seq_id, self.known, np.array(self.tokens[self.known :], np.int32))
        self.known = len(self.tokens)
        right = self.truth[len(self.tokens) - self.num_prompt :][:3]
        wrong = [(right[0] + step) % VOCAB for step in (1, 2)] if right else []
        self.drafts = wrong + right
        parents = [-1, 0, *([-1, *range(2, 1 + len(right))] if right else [])][: len(self.drafts)]
        return VerifyItem(delta, 7, tree_to_verify(self.drafts, parents), begin)

    def take(self, verdict) -> None:
        self.num_cached = max(self.num_cached, verdict.num_cached)
        if verdict.next_token >= 0:
            self.tokens += [self.drafts[node] for node in verdict.path] + [verdict.next_token]
            self.accepted += len(verdict.path)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, "padded") for kind in KINDS),
        ("deepseek_v3", "triton_tree"),
        *(pytest.param(kind, "triton_tree", marks=pytest.mark.slow) for kind in ("deepseek_v2", "minicpm3")),
    ],
)
def test_the_engine_says_what_the_unpatched_model_says(triton_device, kind, attention):
    """Prompts in chunks, a reused prefix, and accepted paths that are moved into their places."""
    reference = make(kind)
    shared = np.random.default_rng(0).integers(0, VOCAB, 21).tolist()
    prompts = [shared, [7, 3, 9], [*shared[:17], 5, 9, 2]]
    truths = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(14):
            tokens.append(int(logits_of(reference, [np.array(tokens)])[0].argmax()))
        truths.append(tokens[len(prompt) :])
    engine = TargetEngine(copy.deepcopy(reference).to(triton_device), EngineOptions(64, 4, attention=attention))
    streams = [Stream(index + 1, *pair) for index, pair in enumerate(zip(prompts, truths, strict=True))]
    for number in range(12):
        started = streams[: 2 if number < 4 else 3]
        running = [stream for stream in started if len(stream.tokens) < stream.num_prompt + 10]
        for verdict in engine.verify(VerifyBatch(number + 1, [stream.item() for stream in running])).verdicts:
            streams[verdict.seq_id - 1].take(verdict)
        check_integrity(engine)
    for stream in streams:
        said = stream.tokens[stream.num_prompt :]
        assert len(said) >= 10
        assert said == stream.truth[: len(said)]
        assert len(set(said)) > 2
        assert stream.accepted >= 6
    assert streams[2].num_cached >= 16


@pytest.mark.parametrize("place", ["host", "device"])
def test_bitwise_logits_do_not_depend_on_company_or_tree(place, triton_device, monkeypatch):
    device = torch.device("cpu")
    if place == "device":
        from actors.engine.attention.exact_kernel import attend_rows  # Triton is not installed everywhere

        device = triton_device
        monkeypatch.setattr(exact, "_attend_on_cpu", attend_rows)
    rows = []
    prompt = [4, 8, 15, 16, 23, 42]
    crowd = 7 if place == "host" else 2  # interpreted kernels take long
    for company, length, nodes in ((0, 6, []), (crowd, 6, []), (0, 4, [9, 23, 1, 42])):
        runner = ModelRunner(make("minicpm3").to(device), 320, "bitwise")
        pool = BlockPool(80, 4)
        parts = []
        for seq_id in range(1, 2 + company):
            tokens = prompt[:length] if seq_id == 1 else list(range(seq_id, seq_id + 20))
            sequence = Sequence(seq_id, SequenceStart(GREEDY, 6), pool)
            sequence.extend(np.array(tokens, np.int32))
            sequence.reserve(24)
            tree = np.array(nodes, np.int32), np.array([-1, -1, 0, 1][: len(nodes)], np.int32)
            parts.insert(0, SequenceRows(sequence, len(tokens), *tree))
        batch = pack(parts)
        rows.append(runner.forward(batch, np.array([batch.num_rows - 1]))[0])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_the_layers_are_one_compiled_graph(monkeypatch, caplog):
    """As on a GPU: all layers of a kind share it, also where the weights of each are absorbed."""
    monkeypatch.setattr(model_runner, "replace_linears", lambda model: False)
    monkeypatch.setattr(model_runner, "replace_norms", lambda model: None)
    model = make("minicpm3")
    wanted = logits_of(model, [np.arange(9)])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    forest = forest_of([(9, 0, [], 0)])
    runner = ModelRunner(model, forest.num_slots)
    compile_model(model, backend)
    with caplog.at_level(logging.WARNING):
        logits = runner.forward(forest.batch, np.array([8]))
    torch._dynamo.reset()  # what was found to vary here would vary in other tests' graphs
    assert not caplog.records
    attends = [sum(node.target is torch.ops.paceline.attend for node in graph.graph.nodes) for graph in graphs]
    assert sorted(attends)[-2:] == [0, 1]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 1e-5), ("int4", 2.0**-7), ("fp8", 0.1)])
def test_quantized_weights_are_absorbed_too(quantization, tolerance):
    model = make("minicpm3", kv_lora_rank=32)
    for layer in model.model.layers:
        linear = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = quantize_linear(linear, torch.device("cpu"), quantization)
    attention = model.model.layers[0].self_attn
    latents, queries = torch.randn(1, 1, 9, 32).bfloat16().float(), torch.randn(9, 4, 24)
    rotated = torch.randn(1, 1, 9, ROTATED)
    keys, values = (tensor[0] for tensor in attention.expand_kv(latents, rotated))
    assert cache_latents(model)
    (one_head, _), projection = attention.expand_kv(latents, rotated), latent_projection(attention)
    for got, wanted in (
        (projection.absorb_query(queries) @ one_head[0, 0].T, queries.transpose(0, 1) @ keys.transpose(1, 2)),
        (projection.expand_values(latents[0, 0][:, None].expand(-1, 4, -1)), values),
    ):
        assert (got.transpose(0, 1) - wanted).abs().max() < tolerance * wanted.abs().max()


class Biased(nn.Linear):
    """Whose values are no product of latents alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + 1.0


def test_keys_that_are_no_product_of_latents_are_cached_expanded_and_said_so(caplog):
    model = make("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Biased
    wanted = logits_of(model, [np.arange(9)])
    forest = forest_of([(9, 0, [], 0)])
    with caplog.at_level(logging.WARNING):
        assert not cache_latents(model)
        runner = ModelRunner(model, forest.num_slots)
    assert len(caplog.records) == 2
    assert "DeepseekV3ForCausalLM caches expanded keys and values" in caplog.text
    torch.testing.assert_close(runner.forward(forest.batch, np.array([8])), wanted, atol=1e-4, rtol=0)
    assert runner.kv.num_bytes == (forest.num_slots + 1) * kv_bytes_per_token(model)
    assert kv_bytes_per_token(model) > 2 * kv_bytes_per_token(make("deepseek_v3"))


def test_attention_to_chosen_keys_is_refused():
    """DeepSeek V3.2 hands the keys that its indexer chose to the attention function."""
    from actors.engine.attention.interface import paged_attention

    tensor = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ModelError, match="indices"):
        paged_attention(nn.Identity(), tensor, tensor, tensor, None, paged_plan=None, indices=torch.zeros(1))

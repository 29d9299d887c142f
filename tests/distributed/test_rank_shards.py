"""Two ranks without wrappers against the unpatched model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engine.attention.latent import latent_projection
from actors.engine.cpu_kernels.panel_linear import PanelLinear
from actors.engine.model_runner import ModelRunner
from actors.models.collectives import all_reduce, use_symmetric_memory
from actors.models.loader import load_model
from actors.models.shards import SummedRows, VocabularyShard
from actors.models.source import ModelSource
from paceline_testing.forests import forest_of
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work

VOCAB = 197  # ranks have 99 and 98
_EXPERTS = {"num_experts_per_tok": 2}
# Plans of every style that models with attention have.
KINDS = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},  # biases
    "gemma3_text": {"sliding_window": 16},  # embeddings are scaled, heads normed
    "mixtral": _EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
    "deepseek_v3": _EXPERTS | {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": None,
    },
    "deepseek_v2": _EXPERTS | {  # whose attention is divided, too
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": None,
    },
    "phi3": {},  # inputs and outputs of all ranks
    "olmo2": {},
    "cohere2": {"logit_scale": 0.25},
}  # fmt: skip


def quantizations(kind: str) -> tuple[str, ...]:
    """fp8 rounds each rank's activations by a scale of their own, which changes the choice of experts."""
    return ("none", "int8", *(["fp8"] if kind in ("llama", "phi3") else []))


def save(kind: str, directory: Path) -> None:
    config = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
    } | KINDS[kind]  # fmt: skip
    config = {name: value for name, value in config.items() if value is not None or name.endswith("_id")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.split()[0], **config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(directory)


def run_rank(rank: int, ring, said, directory: Path) -> None:
    use_symmetric_memory(torch.device("cpu"), torch.float32)  # which has none
    assert all_reduce(torch.tensor([1.0, rank])).tolist() == [2.0, 1.0]
    ids = torch.arange(3, 40)[None]
    for kind in KINDS:
        source = ModelSource(kind, kind, directory / kind)
        for quantization in quantizations(kind):
            model = load_model(source, tensor_parallel=2, quantization=quantization)
            head = model.get_output_embeddings()
            assert isinstance(head, VocabularyShard)
            assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
            with torch.inference_mode():
                share = model(input_ids=ids).logits
                assert share.shape[-1] == (99, 98)[rank]
                logits = head.gather(share)
                if rank == 0:
                    alone = (
                        AutoModelForCausalLM.from_pretrained(source.path)
                        if quantization == "none"
                        else load_model(source, quantization=quantization)
                    )
                    expected = alone.eval()(input_ids=ids).logits
                    said.put((kind, quantization, float((logits - expected).abs().max() / expected.abs().max())))
        if kind in ("llama", "phi3"):  # the plain layers of a rank get this machine's kernels
            model = load_model(source, tensor_parallel=2)
            ModelRunner(model, 16)
            assert {type(module) for name, module in model.named_modules() if name.endswith("o_proj")} == {SummedRows}
            assert all(isinstance(module.linear, PanelLinear) for module in rows_of(model))
        if kind.startswith("deepseek"):  # a rank caches whole latents, and absorbs the weights of its heads
            batch = forest_of([(37, 0, [], 0)]).batch
            wanted = AutoModelForCausalLM.from_pretrained(source.path)(torch.tensor(batch.token_ids[None])).logits[0]
            runner = ModelRunner(load_model(source, tensor_parallel=2), 40)
            assert runner.kv.num_bytes == 41 * 2 * (16 + 8) * 4
            assert latent_projection(runner.model.model.layers[0].self_attn).key_factors.shape[0] == (
                2 if kind == "deepseek_v2" else 4
            )
            torch.testing.assert_close(runner.forward(batch, np.arange(37)), wanted, atol=1e-4, rtol=0)


def rows_of(model: nn.Module) -> list[SummedRows]:
    return [module for module in model.modules() if isinstance(module, SummedRows)]


def test_two_ranks_without_wrappers_compute_what_the_unpatched_model_does(tmp_path):
    for kind in KINDS:
        save(kind, tmp_path / kind)
    with ranks_at_work(2, run_rank, tmp_path) as said:
        found = [said.get(timeout=ANSWER_WITHIN_S) for kind in KINDS for _ in quantizations(kind)]
    assert {(kind, quantization) for kind, quantization, _ in found} == {
        (kind, quantization) for kind in KINDS for quantization in quantizations(kind)
    }
    assert max(difference for _, quantization, difference in found if quantization != "fp8") < 3e-6, found
    assert max(difference for _, quantization, difference in found if quantization == "fp8") < 0.2, found

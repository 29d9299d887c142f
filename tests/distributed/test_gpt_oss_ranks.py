"""gpt-oss (attention sinks, sliding windows, experts) on two ranks: what the unpatched model says, with drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from actors.build import build_target_engine
from actors.engine.rank_group import LeadingRank, follow
from actors.errors import ModelError
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.loader import check_tensor_parallel
from actors.models.mxfp4_shares import blocks_of, widened_share
from actors.models.source import ModelSource
from actors.options import TargetGroupOptions
from paceline_testing.drafting import tree_to_verify
from paceline_testing.integrity import check_integrity
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work

VOCAB = 97
PROMPTS = ([5, 9, 33, 2], list(range(40, 63)), [7])
NEW_TOKENS = 8
GREEDY = SamplingParams(1, temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    torch.manual_seed(3)
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.3, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):  # which a new model has at zero
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    path = tmp_path_factory.mktemp("gpt_oss")
    model.save_pretrained(path)
    return path


def save_as_published(model_dir: Path, path: Path) -> None:
    """The model with random experts in MXFP4: blocks of 32 inputs for each output, two codes a byte, and exponents."""
    config = GptOssConfig.from_pretrained(model_dir)
    config.hidden_size, config.intermediate_size = 64, 96  # three blocks of inputs: the second is on both ranks
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(123, 126, shape, generator=generator, dtype=torch.uint8)
    config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def texts_of(model_dir: Path) -> list[list[int]]:
    """What the unpatched model says after each prompt, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    texts = [list(prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        for text in texts:
            for _ in range(NEW_TOKENS):
                text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    return texts


@pytest.fixture(scope="module")
def wanted(model_dir) -> list[list[int]]:
    return texts_of(model_dir)


def options_of(ranks: int) -> TargetGroupOptions:
    return TargetGroupOptions(device="cpu", dtype="float32", kv_cache_tokens=512, block_size=4, tensor_parallel=ranks)


def decode(engine, wanted: list[list[int]], num_right: int | None) -> tuple[list[list[int]], int]:
    """Texts and accepted draft tokens. num_right: tokens of a path that are right in each draft, which branches off
    wrong ones; None: no drafts."""
    texts, known, accepted = [list(prompt) for prompt in PROMPTS], [0] * len(PROMPTS), 0
    while any(len(text) < len(whole) for text, whole in zip(texts, wanted, strict=True)):
        items = []
        for index, text in enumerate(texts):
            begin = SequenceStart(GREEDY, len(PROMPTS[index])) if known[index] == 0 else None
            delta = SequenceDelta(index + 1, known[index], np.array(text[known[index] :], np.int32))
            known[index] = len(text)
            tokens: list[int] = []
            parents: list[int] = []
            if num_right is not None:
                right = wanted[index][len(text) : len(text) + num_right]
                for depth, token in enumerate(right):
                    parent = 2 * (depth - 1) if depth else -1
                    tokens += [token, (token + 1) % VOCAB]
                    parents += [parent, parent]
            items.append(VerifyItem(delta, 9, tree_to_verify(tokens, parents), begin))
        for verdict in engine.answer(VerifyBatch(1, items)).verdicts:
            if verdict.next_token >= 0:
                index = verdict.seq_id - 1
                texts[index] += [int(items[index].tree.token_ids[node]) for node in verdict.path]
                texts[index].append(verdict.next_token)
                accepted += len(verdict.path)
    return [text[: len(whole)] for text, whole in zip(texts, wanted, strict=True)], accepted


def run_rank(rank: int, ring, answers, path: Path, wanted) -> None:
    engine = build_target_engine(ModelSource("tiny", "tiny", path), options_of(2), rank=rank)
    if rank == 0:
        leading = LeadingRank(engine, ring)
        answers.put(decode(leading, wanted, 3))
        leading.stop()
    else:
        attention = engine.model.model.layers[0].self_attn
        answers.put([tuple(attention.sinks.shape), tuple(engine.model.model.layers[0].mlp.experts.down_proj.shape)])
        follow(engine, ring)
    check_integrity(engine)


def test_experts_as_published_are_shared_out_within_blocks(model_dir, tmp_path):
    save_as_published(model_dir, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts"
    for weight, dim in (("gate_up_proj", 2), ("down_proj", 1)):
        blocks, scales = (tensors[f"{name}.{weight}_{kind}"] for kind in ("blocks", "scales"))
        whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        for ranks in (2, 4):
            shares = []
            for rank in range(ranks):
                shape, first = list(whole.shape), [0, 0, 0]
                shape[dim] //= ranks
                first[dim] = rank * shape[dim]
                own = blocks_of(tuple(shape), tuple(first))
                shares.append(widened_share(blocks[own], scales[own], tuple(shape), tuple(first), torch.float32))
            assert torch.equal(torch.cat(shares, dim), whole)


@pytest.mark.slow
def test_two_ranks_say_what_the_unpatched_model_says_with_weights_as_published(model_dir, tmp_path):
    save_as_published(model_dir, tmp_path)
    wanted = texts_of(tmp_path)
    assert all(len(set(text)) > 5 for text in wanted)
    with ranks_at_work(2, run_rank, tmp_path, wanted) as answers:
        found = [answers.get(timeout=ANSWER_WITHIN_S) for _ in range(2)]
    texts, accepted = next(answer for answer in found if isinstance(answer, tuple))
    assert texts == wanted
    assert accepted > NEW_TOKENS * len(PROMPTS) // 2
    assert [(2,), (4, 48, 64)] in found


def test_two_ranks_say_what_one_and_the_unpatched_model_say(model_dir, wanted):
    assert all(len(set(text)) > 5 for text in wanted)
    alone = build_target_engine(ModelSource("tiny", "tiny", model_dir), options_of(1))
    assert decode(alone, wanted, None) == (wanted, 0)

    with ranks_at_work(2, run_rank, model_dir, wanted) as answers:
        found = [answers.get(timeout=ANSWER_WITHIN_S) for _ in range(2)]
    shapes = next(answer for answer in found if isinstance(answer, list))
    texts, accepted = next(answer for answer in found if isinstance(answer, tuple))
    assert texts == wanted
    assert accepted > NEW_TOKENS * len(PROMPTS) // 2
    assert shapes == [(2,), (4, 12, 64)]


def test_what_the_plan_cannot_share_out_is_refused(model_dir, tmp_path):
    config = GptOssConfig.from_pretrained(model_dir)
    config.num_attention_heads = config.num_key_value_heads = 6
    config.intermediate_size = 33
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="tensor_parallel is 2; it must divide the width 33 of the experts"):
        check_tensor_parallel(ModelSource("tiny", "tiny", tmp_path), 2)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="weights of gpt_oss in fp8 are not shared out; tensor_parallel must be 1"):
        check_tensor_parallel(ModelSource("tiny", "tiny", tmp_path), 2)

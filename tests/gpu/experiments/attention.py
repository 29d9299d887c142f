"""One layer's attention. Decoding rows with trees: the tree kernel against torch's own on gathered keys. Prompt chunks:
the tree kernel against torch's for ragged batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from actors.engine.arena import Arena
from actors.engine.attention import prompt_chunks, varlen
from actors.engine.attention.interface import Scoring
from actors.engine.attention.padded import PaddedPlan
from actors.engine.attention.prompt_chunks import pack_chunks
from actors.engine.attention.triton_tree import TreePlan
from actors.engine.attention.varlen import VarlenPlan
from actors.engine.device_inputs import send_inputs
from actors.engine.kv_cache import KvCache, LayerShape
from actors.engine.row_tiers import row_tier
from paceline_testing.forests import forest_of
from paceline_testing.varlen_contract import varlen_attn
from tests.gpu.experiments.setting import BLOCK, Setting

_KINDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    for heads, kv_heads in setting.of(((32, 8), (8, 1)), ((4, 2),)):
        for context in setting.of((1024, 8192, 32768), (40,)):
            for sequences in setting.of((1, 8, 32), (1, 2)):
                if context * sequences > 8192 * 32:
                    continue
                for nodes in setting.of((0, 15), (3,)):
                    yield {
                        "heads": f"{heads}/{kv_heads}", "context": context, "sequences": sequences, "nodes": nodes,
                        **_times(setting, heads, kv_heads, context, sequences, nodes),
                    }  # fmt: skip
                    setting.release()


def prompts(setting: Setting) -> Iterator[dict[str, Any]]:
    """Microseconds of a prompt chunk beside eight sequences that decode: they tell which `CHUNK_ROWS` is best. In a dry
    run, what torch documents of its kernel stands in for it."""
    stand_in = patch.object(varlen, "varlen_attn", varlen_attn) if setting.is_dry else nullcontext()
    with stand_in:
        for heads, kv_heads in setting.of(((32, 8), (8, 1)), ((2, 1),)):
            for before in setting.of((0, 8192, 32768), (0, 24)):
                for rows in setting.of((64, 256, 320, 512, 1024, 4096), (16,)):
                    with patch.object(prompt_chunks, "CHUNK_ROWS", rows):
                        yield {
                            "heads": f"{heads}/{kv_heads}", "before": before, "rows": rows,
                            **_prompt_times(setting, heads, kv_heads, before, rows),
                        }  # fmt: skip
                    setting.release()


def _prompt_times(setting: Setting, heads: int, kv_heads: int, before: int, rows: int) -> dict[str, float]:
    dim, dtype = setting.of(128, 16), setting.of(torch.bfloat16, torch.float16)
    decoding = setting.of(1024, 20)
    forest = forest_of([(before + rows, before, [], 0), *[(decoding, decoding - 1, [], 0)] * 8], BLOCK)
    kv = KvCache(forest.num_slots, setting.device, [LayerShape(kv_heads, dim, dim, dtype)])
    for pool in kv.layer(0):
        pool.normal_()
    tier = row_tier(forest.batch.num_rows)
    query = torch.randn(tier, heads, dim, device=setting.device, dtype=dtype)
    keys, values = (torch.randn(tier, kv_heads, dim, device=setting.device, dtype=dtype) for _ in range(2))
    inputs = send_inputs(
        Arena(setting.device), forest.batch, forest.batch.slots[:1], 1, kv.waiting_moves, kv.padding_slot,
        chunks=pack_chunks(forest.batch),
    )  # fmt: skip
    assert inputs.chunks is not None
    scoring = Scoring(dim**-0.5, None, None)
    plans = {
        "tree": TreePlan(inputs.rows, kv, BLOCK, inputs.max_context),
        "varlen": VarlenPlan(inputs.rows, kv, BLOCK, inputs.max_context, inputs.chunks),
    }
    outputs = {name: plan.attend(0, query, keys, values, scoring).float() for name, plan in plans.items()}
    times = {"error": float((outputs["varlen"] - outputs["tree"]).norm() / outputs["tree"].norm())}
    for name, plan in plans.items():
        times[name] = setting.time(lambda plan=plan: plan.attend(0, query, keys, values, scoring)).median * 1e3
    return times


def _times(
    setting: Setting, heads: int, kv_heads: int, context: int, sequences: int, nodes: int
) -> dict[str, float | bool]:
    """Microseconds, and those of reading keys and values at the rate of a large copy."""
    dim = setting.of(128, 16)
    parents = [(node - 1) // 2 if node else -1 for node in range(nodes)]
    forest = forest_of([(context, context - 1, parents, 0)] * sequences, BLOCK)
    kv = KvCache(forest.num_slots, setting.device, [LayerShape(kv_heads, dim, dim, setting.dtype)])
    for pool in kv.layer(0):
        pool.normal_()
    batch = forest.batch
    tier = row_tier(batch.num_rows)
    query = torch.randn(tier, heads, dim, device=setting.device, dtype=setting.dtype)
    keys, values = (torch.randn(tier, kv_heads, dim, device=setting.device, dtype=setting.dtype) for _ in range(2))
    scoring = Scoring(dim**-0.5, None, None)
    inputs = send_inputs(Arena(setting.device), batch, batch.slots[:1], 1, kv.waiting_moves, kv.padding_slot)
    tree = TreePlan(inputs.rows, kv, BLOCK, inputs.max_context)
    padded = PaddedPlan(batch, kv, setting.device, tier)
    plans = {"tree": tree, "padded": padded}
    rows = batch.num_rows
    outputs = {name: plan.attend(0, query, keys, values, scoring)[:rows].float() for name, plan in plans.items()}
    error = (outputs["tree"] - outputs["padded"]).norm() / outputs["padded"].norm()
    times: dict[str, float | bool] = {"error": float(error)}
    for name, plan in plans.items():
        launch = setting.time(lambda plan=plan: plan.attend(0, query, keys, values, scoring))
        times[name] = launch.median * 1e3
    # What a library does at best: keys and values of every sequence lie side by side, and nothing is masked.
    dense_q = query[:rows].view(sequences, rows // sequences, heads, dim).transpose(1, 2)
    dense = torch.randn(2, sequences, kv_heads, context, dim, device=setting.device, dtype=setting.dtype)
    times["dense"] = (
        setting.time(lambda: scaled_dot_product_attention(dense_q, dense[0], dense[1], enable_gqa=True)).median * 1e3
    )
    for kind in _KINDS:
        with sdpa_kernel(kind), suppress(RuntimeError):  # of shapes that it does not take
            launch = setting.time(lambda: scaled_dot_product_attention(dense_q, dense[0], dense[1], enable_gqa=True))
            times[f"dense {kind.name}"] = launch.median * 1e3
    times["floor at 4 TB/s"] = dense.nbytes / 4e12 * 1e6
    return times

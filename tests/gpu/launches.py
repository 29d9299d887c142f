"""Counts what a round of the engine asks of a device, without one: kernels, copies and waits, on `meta` tensors.

`python -m tests.gpu.launches [--json] [--attention triton_tree] [--compiled]`.

A dispatch mode sees every operation that reaches a backend. One that makes a tensor on `meta` and is no view counts as
a kernel; a copy between `meta` and the CPU as a copy, which the host waits for. The mode knows nothing of the engine.
Two numbers of layers tell what a layer costs and what the rest does. A compiled part counts what torch's compiler
launches for it on Hopper (`triton_codegen`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.engine.compiled import opaque_attention
from actors.engine.compiled.layers import compile_model
from actors.engine.compiled.merged_linears import share_products
from actors.engine.options import AttentionBackend, EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.shards import EmbeddingShard, SummedRows, VocabularyShard
from paceline_testing.drafting import tree_to_verify
from tests.gpu.triton_codegen import launches_of

RANKS = {"70B/8": 8}
BLOCK = 16
LAYERS = (2, 4)
# Llama 8B, and the shard of a 70B that one of eight ranks has.
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "70B/8": {"hidden_size": 8192, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 1,
              "head_dim": 128},
}  # fmt: skip
_NOTHING = ("empty", "empty_strided", "new_empty", "_unsafe_view", "_reshape_alias")  # no kernel, though no view either


class Counting(TorchDispatchMode):
    """Kernels, copies to the device and back, and other waits."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.in_compiled_part = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # so that models are compiled meanwhile

    def launched(self, names: list[str]) -> None:
        self.counts["kernels"] += len(names)
        self.kernels.update(names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.in_compiled_part:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_on_meta = any(tensor.is_meta for tensor in given)
        if name == "_local_scalar_dense" and is_on_meta:
            self.counts["waits"] += 1
            return 0
        if name in ("_to_copy", "copy_", "to", "cpu"):
            source = given[-1] if name == "copy_" else given[0]
            devices = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
            target = args[0].device if name == "copy_" else devices[0] if devices else source.device
            if source.is_meta and target.type == "cpu":
                self.counts["copies back"] += 1
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            if not source.is_meta and target.type == "meta":
                self.counts["copies up"] += 1
                return func(*args, **kwargs)
        if name == "equal" or (name in ("nonzero", "masked_select", "unique") and is_on_meta):
            self.counts["waits"] += 1
        if name != "scaled_dot_product_attention":  # one kernel on every device that has one
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        on_meta = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        if on_meta and not func.is_view and name not in _NOTHING:
            self.launched([name])
        return made


_counting: list[Counting] = []


@contextmanager
def counted() -> Iterator[Counting]:
    with Counting() as mode:
        _counting.append(mode)
        try:
            yield mode
        finally:
            _counting.pop()


class _CompiledPart(torch.fx.Interpreter):
    """Computes a traced graph. Attention, which the compiler does not look into, counts as it launches itself."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not torch.ops.paceline.attend:
            return super().call_function(target, args, kwargs)
        for mode in _counting:
            mode.in_compiled_part = False
        try:
            return opaque_attention.attend(*args, **kwargs)
        finally:
            for mode in _counting:
                mode.in_compiled_part = True


def as_compiled(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A compiler for `compile_model` whose graphs count what torch's compiler would launch."""
    share_products(graph.graph)
    names = [name for name in launches_of(graph, inputs) if not name.startswith("torch.ops.paceline.attend")]

    def run(*args: Any) -> Any:
        for mode in _counting:
            mode.launched(names)
            mode.in_compiled_part = True
        try:
            return _CompiledPart(graph).run(*args)
        finally:
            for mode in _counting:
                mode.in_compiled_part = False

    return run


def engine_of(
    shape: str, layers: int, num_blocks: int, attention: AttentionBackend = "padded", compiled: bool = False
) -> TargetEngine:
    config = LlamaConfig(
        vocab_size=128_256, num_hidden_layers=layers, max_position_embeddings=131_072, rope_theta=500_000.0,
        dtype="bfloat16", **SHAPES[shape],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if shape in RANKS:
            as_rank(model, RANKS[shape])
    engine = TargetEngine(model.eval(), EngineOptions(num_blocks, BLOCK, attention=attention))
    if compiled:
        with torch.inference_mode():
            compile_model(engine.model, as_compiled)
    return engine


def as_rank(model: Any, ranks: int) -> None:
    """Exchange layers of a model with the shapes of one rank for those that such a rank has."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    for layer in model.model.layers:
        layer.self_attn.o_proj = SummedRows(layer.self_attn.o_proj, None, splits_input=False)
        layer.mlp.down_proj = SummedRows(layer.mlp.down_proj, None, splits_input=False)
    vocab_size, hidden_size, dtype = model.config.vocab_size, model.config.hidden_size, model.dtype
    head = torch.nn.Linear(hidden_size, vocab_size // ranks, bias=False, dtype=dtype)
    model.lm_head = VocabularyShard(head, vocab_size)
    model.model.embed_tokens = EmbeddingShard(
        torch.nn.Embedding(vocab_size // ranks, hidden_size, dtype=dtype), vocab_size
    )


def round_of(
    shape: str, layers: int, *, sequences: int, nodes: int, sampled: bool, context: int = 64,
    attention: AttentionBackend = "padded", compiled: bool = False,
) -> Counting:  # fmt: skip
    """What one decoding round costs, after a prefill and a round like it."""
    engine = engine_of(shape, layers, sequences * (context // BLOCK + 4 + nodes // BLOCK), attention, compiled)
    params = [SamplingParams(seed, temperature=0.8, top_p=0.9) if sampled else SamplingParams(seed, temperature=0.0)
              for seed in range(sequences)]  # fmt: skip
    prompt = np.arange(context, dtype=np.int32)
    for index in range(sequences):
        delta = SequenceDelta(index + 1, 0, prompt)
        begin = SequenceStart(params[index], context)
        with counted():
            engine.verify(VerifyBatch(1, [VerifyItem(delta, context, tree_to_verify([], []), begin)]))
    tokens, parents = list(range(1, nodes + 1)), [(node - 1) // 2 if node else -1 for node in range(nodes)]
    length = context
    for number in range(2):
        items = []
        for index in range(sequences):
            delta = SequenceDelta(index + 1, length, np.zeros(1, np.int32))
            items.append(VerifyItem(delta, 1, tree_to_verify(tokens, parents), None))
        length += 1
        with counted() as mode:
            result = engine.verify(VerifyBatch(number + 2, items))
        assert len(result.verdicts) == sequences, result
    return mode


def table(attention: AttentionBackend, context: int, compiled: bool = False) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        for sequences in (1, 8, 32):
            for sampled in (False, True):
                for nodes in (7, 31):
                    few, many = (round_of(shape, layers, sequences=sequences, nodes=nodes, sampled=sampled,
                                          context=context, attention=attention, compiled=compiled).counts
                                 for layers in LAYERS)  # fmt: skip
                    a_layer = (many["kernels"] - few["kernels"]) / (LAYERS[1] - LAYERS[0])
                    rows.append({
                        "shape": shape, "sequences": sequences, "sampled": sampled, "nodes": nodes,
                        "kernels a layer": a_layer, "kernels outside": few["kernels"] - LAYERS[0] * a_layer,
                        "copies up": few["copies up"], "copies back": few["copies back"], "waits": few["waits"],
                        "copies a layer": (many["copies up"] - few["copies up"]) / (LAYERS[1] - LAYERS[0]),
                    })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attention", choices=get_args(AttentionBackend), default="padded")
    parser.add_argument("--context", type=int, default=64, help="tokens of each sequence")
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    rows = table(given.attention, given.context, given.compiled)
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print(
            "| " + " | ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in row.values()) + " |"
        )


if __name__ == "__main__":
    main()

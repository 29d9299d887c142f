"""Counts what a round of the engine asks of a device, without one: kernels, copies and waits, on `meta` tensors.

`python -m tests.gpu.launches [--json] [--attention triton_tree] [--compiled]`.

A dispatch mode sees every operation that reaches a backend. One that makes or fills a tensor on `meta` and is no view
counts as a kernel; a copy between `meta` and the CPU as a copy, which the host waits for. The mode knows nothing of the
engine. Two numbers of layers tell what a layer costs and what the rest does. A compiled part counts what torch's
compiler launches for it on Hopper (`triton_codegen`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from actors.eagle.eagle_drafter import EagleDrafter
from actors.eagle.eagle_head import EagleHead
from actors.eagle.head_layout import HeadLayout
from actors.engine.compiled import opaque_attention
from actors.engine.compiled.layers import compile_model
from actors.engine.compiled.merged_linears import share_products
from actors.engine.hidden_state_drafter import HeadRows
from actors.engine.options import EngineOptions
from actors.engine.row_tiers import row_tier
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.shards import EmbeddingShard, SummedRows, VocabularyShard
from actors.options import AttentionBackend, EagleOptions
from paceline_testing.drafting import tree_to_verify

RANKS = {"70B/8": 8}
BLOCK = 16
SUCCESSORS = 8  # as `auto` asks for
_BLOCKS = 8192
LAYERS = (2, 4)
# Llama 8B, and the shard of a 70B that one of eight ranks has.
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "70B/8": {"hidden_size": 8192, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 1,
              "head_dim": 128},
}  # fmt: skip
_NOTHING = (
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "_unsafe_view",
    "_reshape_alias",
)  # no kernel, though no view either


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
        writes = is_on_meta and func._schema.is_mutable and not func._schema.returns
        if (on_meta or writes) and not func.is_view and name not in _NOTHING:
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
    from tests.gpu.triton_codegen import launches_of  # torch's compiler loads slowly

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


def model_of(shape: str, layers: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=128_256, num_hidden_layers=layers, max_position_embeddings=131_072, rope_theta=500_000.0,
        dtype="bfloat16", **SHAPES[shape],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if shape in RANKS:
        as_rank(model, RANKS[shape])
    return model


@lru_cache(maxsize=16)
def engine_of(shape: str, layers: int, attention: AttentionBackend = "padded", compiled: bool = False) -> TargetEngine:
    """An engine without sequences, which one that is given back is again."""
    with torch.device("meta"):
        model = model_of(shape, layers)
    options = EngineOptions(_BLOCKS, BLOCK, prefix_cache=False, attention=attention, is_eager=not compiled)
    engine = TargetEngine(model.eval(), options)
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


def unpatched(shape: str, layers: int, rows: int = 8, context: int = 64) -> Counting:
    """A forward of the model as transformers has it, with torch's attention and a cache."""
    with torch.device("meta"):
        model = model_of(shape, layers).eval()
        cache = DynamicCache(config=model.config)
        ids, positions = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)[None] + context
        past = torch.zeros(1, context, dtype=torch.int64)
    with torch.inference_mode():
        model(past, past_key_values=cache)
        with counted() as mode:
            model(ids, position_ids=positions, past_key_values=cache)
    return mode


def round_of(
    shape: str, layers: int, *, sequences: int, nodes: int, sampled: bool, context: int = 64,
    attention: AttentionBackend = "padded", compiled: bool = False, successors: int = SUCCESSORS, accepts: bool = True,
) -> Counting:  # fmt: skip
    """What one decoding round costs, after a prefill and a round like it. accepts: whether nodes of the round before
    are accepted, which are not next to each other in the cache."""
    engine = engine_of(shape, layers, attention, compiled)
    params = [SamplingParams(seed, temperature=0.8, top_p=0.9) if sampled else SamplingParams(seed, temperature=0.0)
              for seed in range(sequences)]  # fmt: skip
    prompt = np.arange(context, dtype=np.int32)
    prompts = [
        VerifyItem(SequenceDelta(index + 1, 0, prompt), context, tree_to_verify([], []), SequenceStart(own, context))
        for index, own in enumerate(params)
    ]
    with counted():
        engine.verify(VerifyBatch(1, prompts))
    tokens, parents = list(range(1, nodes + 1)), [(node - 1) // 2 if node else -1 for node in range(nodes)]
    path = _rightmost(parents) if accepts else []
    known, length = context, context + 1
    for number in range(3):
        items = []
        for index in range(sequences):
            delta = SequenceDelta(index + 1, known, np.zeros(length - known, np.int32))
            if number:
                delta.token_ids[:-1] = [tokens[node] for node in path]
            items.append(VerifyItem(delta, 1, tree_to_verify(tokens, parents), None))
        known, length = length, length + len(path) + 1
        with counted() as mode:
            result = engine.verify(VerifyBatch(number + 2, items, num_successors=successors))
        assert [verdict.rows for verdict in result.verdicts] == [1 + nodes] * sequences, result
    engine.verify(VerifyBatch(0, [], [index + 1 for index in range(sequences)]))
    return mode


def prompt_round_of(
    shape: str, layers: int, *, prompts: int, chunk: int, context: int = 1024, compiled: bool = False
) -> Counting:
    """What a round costs in which a sequence decodes with a tree, and prompts are computed by chunks of `chunk` rows:
    half of them after an earlier chunk, the others from their first token on."""
    engine = engine_of(shape, layers, "triton_tree", compiled)
    text = np.arange(context + 2 * chunk, dtype=np.int32)
    params = SamplingParams(1, temperature=0.0)
    begin = SequenceStart(params, context)
    first = [VerifyItem(SequenceDelta(1, 0, text[:context]), context, tree_to_verify([], []), begin)]
    second = [VerifyItem(SequenceDelta(1, context, text[:1]), 1, tree_to_verify([5, 6, 7], [-1, -1, 0]), None)]
    for index in range(prompts):
        begin = SequenceStart(params, 2 * chunk + 1)
        whole = VerifyItem(SequenceDelta(index + 2, 0, text[: 2 * chunk + 1]), chunk, tree_to_verify([], []), begin)
        if index % 2:
            second.append(whole)
        else:
            first.append(whole)
            more = SequenceDelta(index + 2, 2 * chunk + 1, text[:0])
            second.append(VerifyItem(more, chunk, tree_to_verify([], []), None))
    with counted():
        engine.verify(VerifyBatch(1, first))
    with counted() as mode:
        result = engine.verify(VerifyBatch(2, second))
    assert result.rows == 4 + prompts * chunk, result
    engine.verify(VerifyBatch(0, [], [index + 1 for index in range(prompts + 1)]))
    return mode


def head_round_of(shape: str, *, sequences: int, depth: int, top_k: int = 10, context: int = 64) -> Counting:
    """What the drafts of an EAGLE head cost, whose output layer is the target's, after one committed token each."""
    with torch.device("meta"):
        model = model_of(shape, 2).eval()
        size = model.config.hidden_size
        config = LlamaConfig(
            hidden_size=size, intermediate_size=size, num_attention_heads=32, head_dim=128, num_hidden_layers=1
        )
        head = EagleHead(HeadLayout("eagle", config, size, None)).to(torch.bfloat16)
    head.rotary_emb.to("meta")
    drafter = EagleDrafter(
        model, head, sequences * context, EagleOptions(depth=depth, top_k=top_k), attention="triton_tree"
    )
    asked = []
    for sequence in range(sequences):
        slots = np.arange(context) + sequence * context
        asked.append(HeadRows(context - 1, np.array([1]), np.array([sequence]), slots, 59))
    for _ in range(2):  # the first time constants go up, too
        drafter.tap.open()
        with torch.inference_mode():
            model.base_model(torch.zeros((1, row_tier(sequences)), dtype=torch.int64, device="meta"))
        with counted() as mode, torch.inference_mode():
            drafter.propose(asked)
    return mode


def _rightmost(parents: list[int]) -> list[int]:
    """The path to the last node."""
    path = [len(parents) - 1] if parents else []
    while path and parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


CASES = list(product(SHAPES, (1, 8, 32), (False, True), (7, 31)))  # shape, sequences, sampled, nodes


def row_of(shape: str, sequences: int, sampled: bool, nodes: int, **case: Any) -> dict[str, Any]:
    """A row of the table. case: as for `round_of`."""
    few, many = (
        round_of(shape, layers, sequences=sequences, nodes=nodes, sampled=sampled, **case).counts for layers in LAYERS
    )
    added = LAYERS[1] - LAYERS[0]
    a_layer = (many["kernels"] - few["kernels"]) / added
    return {
        "shape": shape, "sequences": sequences, "sampled": sampled, "nodes": nodes,
        "kernels a layer": a_layer, "unpatched": unpatched_layer(shape),
        "kernels outside": few["kernels"] - LAYERS[0] * a_layer,
        "copies up": few["copies up"], "copies back": few["copies back"], "waits": few["waits"],
        "copies a layer": sum(many[name] - few[name] for name in ("copies up", "copies back", "waits")) / added,
    }  # fmt: skip


@lru_cache
def unpatched_layer(shape: str) -> float:
    """Kernels a layer of the model as transformers has it."""
    few, many = (unpatched(shape, layers).counts["kernels"] for layers in LAYERS)
    return (many - few) / (LAYERS[1] - LAYERS[0])


def table(attention: AttentionBackend, context: int, compiled: bool = False) -> list[dict[str, Any]]:
    return [row_of(*case, context=context, attention=attention, compiled=compiled) for case in CASES]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attention", choices=get_args(AttentionBackend), default="padded")
    parser.add_argument("--context", type=int, default=64, help="tokens of each sequence")
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args(arguments)
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

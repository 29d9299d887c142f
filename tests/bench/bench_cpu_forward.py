"""Time of a forward on CPU by its rows, against the floor of reading the weights and a step of `transformers`.

    python tests/bench/bench_cpu_forward.py [--dtype bfloat16] [--model DIR] [--rows 1,4,8]

CPU time of one thread: the smallest of several turns, which take turns with each other. The floor is the time to add up
as many bytes as the weights have.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors.draft_tree import DraftTree
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.home import paceline_home
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.quantization import quantize_linears

CONTEXT = 200
GREEDY = SamplingParams(seed=0, temperature=0.0)


def forward_s(engine: TargetEngine, rows: int) -> float:
    """One committed token and rows - 1 draft nodes below it, after a prompt of CONTEXT tokens."""
    prompt = np.arange(1, CONTEXT + 1, dtype=np.int32)
    engine.verify(
        VerifyBatch(0, [VerifyItem(SequenceDelta(1, 0, prompt), CONTEXT, begin=SequenceStart(GREEDY, CONTEXT))])
    )
    nodes = rows - 1
    tree = DraftTree(np.arange(nodes, dtype=np.int32), np.full(nodes, -1, np.int32), np.zeros(nodes, np.float32))
    batch = VerifyBatch(0, [VerifyItem(SequenceDelta(1, CONTEXT, np.ones(1, np.int32)), 1, tree)])
    started = time.thread_time()
    engine.verify(batch)
    elapsed = time.thread_time() - started
    engine.verify(VerifyBatch(0, [], [1]))
    return elapsed


def stored_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that a step reads; tied ones once, and of untied embeddings none."""
    head = model.get_output_embeddings()
    read = {
        id(tensor): tensor.nbytes
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding) or module.weight is getattr(head, "weight", None)
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    }
    return sum(read.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(paceline_home() / "models" / "smollm2"))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--rows", default="1,2,4,6,8,12,16,32,64")
    parser.add_argument("--turns", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, given.dtype)
    plain, own = (AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).eval() for _ in range(2))
    quantize_linears(own, given.quantization, torch.device("cpu"))
    weight_bytes = stored_bytes(own)
    buffer = torch.ones(weight_bytes // 4)
    engine = TargetEngine(own, EngineOptions(256, 16))
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    with torch.inference_mode():
        cache = plain(torch.ones(1, CONTEXT, dtype=torch.int64), use_cache=True).past_key_values
        for _ in range(given.turns):
            started = time.thread_time()
            buffer.sum()
            note("floor", time.thread_time() - started)
            started = time.thread_time()
            plain(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
            note("transformers", time.thread_time() - started)
            for rows in map(int, given.rows.split(",")):
                note(f"{rows} rows", forward_s(engine, rows))
    print(f"{given.dtype}, {given.quantization}: {weight_bytes / 1e6:.0f} MB of weights, torch {torch.__version__}")
    for name, seconds in best.items():
        print(f"{name:14}{seconds * 1e3:8.1f} ms{seconds / best['floor']:8.2f} x floor")


if __name__ == "__main__":
    main()

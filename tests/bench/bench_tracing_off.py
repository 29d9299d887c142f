"""What tracing costs a request while it is off: gateway and router as they are, against the same without its code.

    PYTHONPATH=tests/support python tests/bench/bench_tracing_off.py [--pairs 60] [--tokens 60]

The sources of both are read, every statement that asks for a trace is taken out, and what is left is compiled beside
them. Requests of both kinds take turns in one process, by a toy target. Prints processor time a request, the median of
the ratios of neighbours with the middle half of them, and the ratio of the least times, which a busy machine moves
least; a second line compares the code with itself, for the noise.
"""

import argparse
import ast
import asyncio
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from actors.messages import GenerationRequest, SamplingParams
from cluster.config import RouterConfig, SpeculationConfig
from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.served_model import ServedModel
from cluster.gateway_config import GatewayConfig
from cluster.generation import GenerationOptions
from cluster.router.run_round import run_local_round
from paceline_testing.rounds import toy_info
from paceline_testing.toy_target import ToyTarget
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
MODEL = ServedModel("toy", 512, len(TOKENIZER), (0,))
MODULES = ("cluster.gateway.service", "cluster.router.sequence", "cluster.router.core")  # each may import those before
TRACES = {"trace", "times", "_tracing"}  # None: no tracing


class Remover(ast.NodeTransformer):
    def __init__(self) -> None:
        self.removed = 0

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if asks_for_a_trace(node.test, ast.IsNot):
            self.removed += 1
            return node.orelse or None
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if asks_for_a_trace(node.test, ast.Is):
            self.removed += 1
            return node.body
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        left = [
            value
            for value in node.values
            if not (isinstance(value, ast.BoolOp) and asks_for_a_trace(value.values[0], ast.IsNot))
        ]
        if len(left) == len(node.values):
            return node
        self.removed += 1
        return left[0] if len(left) == 1 else ast.BoolOp(node.op, left)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        left = [word for word in node.keywords if word.arg not in ("times", "timed_rounds")]
        self.removed += len(node.keywords) - len(left)
        node.keywords = left
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Attribute) and node.targets[0].attr == "times":
            self.removed += 1
            node.value = ast.Constant(None)
        return node


def asks_for_a_trace(test: ast.expr, how: type[ast.cmpop]) -> bool:
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], how)):
        return False
    name = test.left.id if isinstance(test.left, ast.Name) else getattr(test.left, "attr", None)
    return name in TRACES


def without_tracing() -> dict[str, ModuleType]:
    """The modules compiled anew, importing each other."""
    originals = {name: importlib.import_module(name) for name in MODULES}
    made: dict[str, ModuleType] = {}
    for name, original in originals.items():
        remover = Remover()
        tree = remover.visit(ast.parse(Path(str(original.__file__)).read_text(encoding="utf-8")))
        module = ModuleType(name)
        module.__file__ = original.__file__
        sys.modules[name] = made[name] = module
        exec(compile(ast.fix_missing_locations(tree), str(original.__file__), "exec"), module.__dict__)
        print(f"{name}: {remover.removed} places removed")
        assert remover.removed
    sys.modules.update(originals)
    return made


class CoreClient:
    """A `RouterClient` over a router core of a kind, with a toy target."""

    def __init__(self, core_class: type) -> None:
        self._core_class = core_class

    async def generate(self, request: GenerationRequest) -> Any:
        core = self._core_class(toy_info(97, 512), RouterConfig(), SpeculationConfig(), {})
        target = ToyTarget(eos_token_id=3, seed=4)
        prompt = np.array(request.prompt_token_ids) % 90 + 5
        core.add(
            GenerationRequest(
                request_id=request.request_id,
                prompt_token_ids=prompt.astype(np.int32),
                sampling=SamplingParams(seed=1, temperature=0.0),
                max_new_tokens=request.max_new_tokens,
                timed_rounds=request.timed_rounds,
            ),
            time.monotonic(),
        )
        while core.has_work:
            events = run_local_round(core, target.verify).events
            for chunk in events:
                yield chunk


async def seconds(modules: dict[str, ModuleType], tokens: int) -> float:
    """Processor time of one request."""
    client = CoreClient(modules["cluster.router.core"].RouterCore)
    service = modules["cluster.gateway.service"].GenerationService(client, TOKENIZER, MODEL, GatewayConfig())
    begun = time.thread_time()
    prepared = await service.prepare(
        GenerationCall(prompts=("the quick fox",), options=GenerationOptions(max_new_tokens=tokens)), "caller"
    )
    count = 0
    async for _ in service.stream(prepared):
        count += 1
    assert count
    return time.thread_time() - begun


async def compare(one: dict[str, ModuleType], other: dict[str, ModuleType], pairs: int, tokens: int) -> np.ndarray:
    """Seconds of both, neighbours in a row; who is first alternates."""
    rows = np.empty((pairs, 2))
    for index in range(-3, pairs):
        order = ((0, one), (1, other)) if index % 2 else ((1, other), (0, one))
        for column, modules in order:
            rows[index, column] = await seconds(modules, tokens)
    return rows


def report(name: str, rows: np.ndarray) -> None:
    median, low, high = np.percentile(rows[:, 0] / rows[:, 1], (50, 25, 75))
    one, other = 1e6 * np.median(rows, axis=0)
    least = np.divide(*rows.min(axis=0))
    print(
        f"{name}: {one:.0f} us against {other:.0f} us a request, ratio {median:.4f} ({low:.3f} .. {high:.3f}), "
        f"of the least {least:.4f}"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=60)
    arguments = parser.parse_args()
    present = {name: importlib.import_module(name) for name in MODULES}
    removed = without_tracing()
    report("as it is / without tracing", await compare(present, removed, arguments.pairs, arguments.tokens))
    report("as it is / as it is", await compare(present, present, arguments.pairs, arguments.tokens))


if __name__ == "__main__":
    asyncio.run(main())

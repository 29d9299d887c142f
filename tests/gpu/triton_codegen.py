"""What torch's compiler launches for Hopper, found on a machine without a GPU: graphs are compiled to the source of
their Triton kernels, as if for one, and the launches in it are counted. Nothing is run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._guards import tracing
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from actors.engine.compiled.layers import inductor
from actors.engine.compiled.merged_linears import share_products

_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, max_threads_per_block=1024,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, L2_cache_size=50 << 20,
)  # fmt: skip
_DEVICE = torch.device("cuda", 0)
# Of the generated source: a Triton kernel, a library's product, an operator of our own.
_LAUNCH = re.compile(r"^ +(?:\w+ = )?(triton_\w+\.run\(|extern_kernels\.\w+\(|torch\.ops\.[\w.]+\()", re.MULTILINE)


class _Compiled(Exception):
    """The source is there; nothing is loaded or run."""


_known: dict[tuple[Any, ...], list[str]] = {}  # layers of deep and shallow models are the same


def launches_of(graph: torch.fx.GraphModule, inputs: list[Any]) -> list[str]:
    """Of a traced graph with these inputs, tensors of any device and numbers, in order of the generated source."""
    share_products(graph.graph)
    graph.recompile()
    if any(node.op in ("get_attr", "call_module") for node in graph.graph.nodes):  # more than its code tells
        return _compiled_launches(graph, inputs)
    with tracing(None):
        key = (str(graph.graph), *map(_described, inputs))
    if key not in _known:
        _known[key] = _compiled_launches(graph, inputs)
    return _known[key]


def _described(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return tuple(map(int, given.shape)), tuple(map(int, given.stride())), given.dtype
    return int(given) if isinstance(given, torch.SymInt) else given


def _compiled_launches(graph: torch.fx.GraphModule, inputs: list[Any]) -> list[str]:
    sources: list[str] = []

    def stop(self: GraphLowering) -> None:
        sources.append(self.codegen()[0].value)
        raise _Compiled

    with tracing(None), FakeTensorMode(allow_non_fake_inputs=True):
        # In terms of operators: indexing in Python wants a real device.
        operators = make_fx(graph.forward)(*[_like(given, torch.device("meta")) for given in inputs])
        _move(operators)
        with _hopper(), mock.patch.object(GraphLowering, "compile_to_module", stop):
            try:
                inductor(operators, [_like(given, _DEVICE) for given in inputs])
            except Exception as error:
                if not sources:
                    raise error
    return _LAUNCH.findall(sources[0])


def _like(given: Any, device: torch.device) -> Any:
    if isinstance(given, torch.Tensor):
        shape, stride = [int(size) for size in given.shape], [int(step) for step in given.stride()]
        return torch.empty_strided(shape, stride, dtype=given.dtype, device=device)
    return int(given) if isinstance(given, torch.SymInt) else given


def _move(graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        node.meta.clear()  # tensors of the other device
        node.args, node.kwargs = tree_map_only(torch.device, lambda device: _DEVICE, (node.args, node.kwargs))
    graph.recompile()


@contextmanager
def _hopper() -> Iterator[None]:
    """A machine that seems to have one GPU, to torch's compiler."""
    replaced = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_compute_capability": lambda device=None: 90,
        "get_device_properties": lambda device=None: _H200,
    }
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA_HOME not set")
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(value)))
        for name in ("current_device", "get_device_properties"):
            value = {"current_device": lambda: 0}.get(name, replaced.get(name))
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(value)))
        for name, value in (
            ("torch.version.cuda", "13.0"),
            ("torch.cuda.get_device_properties", lambda device=None: _H200),
            ("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
            ("torch.cuda.current_device", lambda: 0),
            ("torch.utils._triton.triton_hash_with_backend", lambda: "none"),
            ("torch._inductor.async_compile.AsyncCompile.triton", lambda *args, **kwargs: None),
            ("torch._inductor.scheduler.has_triton", lambda: True),
            ("torch._inductor.fx_passes.joint_graph.lazy_init", lambda device=None: None),
        ):
            stack.enter_context(mock.patch(name, value))
        yield

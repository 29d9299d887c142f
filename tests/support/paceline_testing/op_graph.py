"""What a CUDA graph does, on any device: operations are recorded, and replayed on the same tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")


class OpGraphs:
    """A recorder for `RecordedLaunches`. `replays` counts."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, launch: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        with _Operations() as recorded:
            result = launch()

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, made in recorded.operations:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    is_tensor = isinstance(old, torch.Tensor)
                    if is_tensor and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        old.copy_(new)

        for tensor in tree_leaves(result):  # a graph that is recorded has not run
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        return replay, result


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal"):
            raise RuntimeError(f"{func} waits for the device: it cannot be recorded")
        made = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, made))
        return made

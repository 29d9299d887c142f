"""Runs compiled functions on the threads of torch's own OpenMP runtime, so that no two pools compete for the cores."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import llvmlite.binding as llvm
import torch
from numba import types

# For compiled functions: which thread of how many runs them. `openmp` makes the names known.
thread_num = types.ExternalFunction("omp_get_thread_num", types.intc())
num_threads = types.ExternalFunction("omp_get_num_threads", types.intc())
barrier = types.ExternalFunction("GOMP_barrier", types.void())

Parallel = Callable[..., None]
"""run(address, work, threads, 0): calls a compiled function of one pointer, on each thread."""


@lru_cache
def openmp() -> Parallel:
    """Raises OSError or AttributeError if torch has no OpenMP runtime that programs can call (GNU's has)."""
    library = ctypes.CDLL(str(next(iter(Path(torch.__file__).parent.glob("lib/libgomp*.so*")), "libgomp.so.1")))
    for name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    run: Parallel = library.GOMP_parallel
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]  # type: ignore[attr-defined]
    run.restype = None  # type: ignore[attr-defined]
    return run


def has_openmp() -> bool:
    try:
        openmp()
    except (OSError, AttributeError):
        return False
    return True

"""Compiled functions that threads and other compiled functions call by their address."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, types

from actors.sampling import exponential

_FILES = [*sorted(Path(__file__).parent.glob("*.py")), Path(exponential.__file__)]
# numba keeps compiled code by the file and the closure of a function alone. Functions with this number in their closure
# are recompiled when any file of this folder or one of its imports from elsewhere has changed.
SOURCES = int.from_bytes(hashlib.sha256(b"".join(path.read_bytes() for path in _FILES)).digest()[:7], "big")

_SIGNATURE = types.void(types.CPointer(types.int64))
_kept: list[Any] = []  # never freed: layers keep addresses


def entry_point(function: Callable[[Any], None]) -> int:
    """Compile a function of the address of int64 numbers, or load it from numba's cache; its address. The closure must
    hold numbers only, one of them `SOURCES`."""
    compiled = cfunc(_SIGNATURE, cache=True)(function)
    _kept.append(compiled)
    return int(compiled.address)

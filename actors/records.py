"""Numpy records that compiled functions read and write where they lie, however many objects own them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic


@intrinsic
def pointer(context, address):  # type: ignore[no-untyped-def]
    """For `numba.carray`: what lies at an address, int64. Whoever has the address keeps the memory alive."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def address_of(array: np.ndarray) -> int:
    """The address of the first element."""
    # `__array_interface__` would describe all fields first, which takes ten times as long.
    address: int = array.ctypes.data
    return address


def addresses_of(owners: Any) -> np.ndarray:
    """int64 [n]: the `address` of each owner of a record."""
    return np.array([owner.address for owner in owners], np.int64)

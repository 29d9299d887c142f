"""Triton's interpreter without work that it repeats: a quarter of the time of tests that run kernels on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any


def quicken_interpreter() -> None:
    """For each call of a function in a kernel it goes through all members of Triton's language to patch those that are
    built in, which the first call has done, and for each value it makes its table of dtypes anew."""
    from triton import language
    from triton.runtime import interpreter

    @cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in vars(package).items() if language.core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names_of_builtins(package):
            member = getattr(package, name)
            if not language.core.is_builtin(member):
                return  # all are patched
            interpreter._patch_attr(package, name, member, builder, scope)

    of_number = cache(interpreter._get_np_dtype)
    of_pointer = interpreter._get_np_dtype(language.pointer_type(language.int8))

    def dtype_of(kind: Any) -> Any:
        return of_pointer if isinstance(kind.scalar, language.pointer_type) else of_number(kind.scalar)

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = dtype_of

"""Triton's interpreter without work that it repeats: a small part of the time of tests that run kernels on the CPU."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from typing import Any


def quicken_interpreter() -> None:
    """What kernels compute, and what is refused, stays as it was. Call it before the first kernel runs."""
    from triton.runtime import interpreter

    _patch_language_once_a_launch(interpreter)
    _remember_dtypes(interpreter)
    _remember_types()
    # Overflow is computed for each addition and product, and looked at with the option `debug` alone, which is off.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _patch_language_once_a_launch(interpreter: Any) -> None:
    """For each call of a function in a kernel it goes through all members of Triton's language to patch those that are
    built in, which the launch has done."""
    from triton import language

    patch_language, scope_of_patches = interpreter._patch_lang, interpreter._LangPatchScope
    patched: set[Any] = set()

    @cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in vars(package).items() if language.core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names_of_builtins(package):
            member = getattr(package, name)
            if not language.core.is_builtin(member):
                return  # all are patched
            interpreter._patch_attr(package, name, member, builder, scope)

    @cache
    def languages_of(function: Any) -> frozenset[Any]:
        seen = (value for value in function.__globals__.values() if inspect.ismodule(value))
        return frozenset(value for value in seen if value in (language, language.core))

    class Scope(scope_of_patches):  # type: ignore[misc]  # a class that is found at run time
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch(function: Any) -> Any:
        languages = languages_of(function)
        if languages and languages <= patched:
            return scope_of_patches()
        scope = patch_language(function)
        patched.update(languages)
        return scope

    interpreter._patch_builtin = patch_builtin
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch


def _remember_dtypes(interpreter: Any) -> None:
    """For each value it makes its table of numpy's dtypes anew."""
    from triton import language

    of_number = cache(interpreter._get_np_dtype)
    of_pointer = interpreter._get_np_dtype(language.pointer_type(language.int8))

    def dtype_of(kind: Any) -> Any:
        return of_pointer if isinstance(kind.scalar, language.pointer_type) else of_number(kind.scalar)

    interpreter._get_np_dtype = dtype_of


def _remember_types() -> None:
    """For each value it checks its shape, wraps every part of it, and writes out the name of its type. A type is known
    by its name, a shape by its numbers."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_block, equal = core.block_type.__init__, core.dtype.__eq__
    compute_type, broadcast = TritonSemantic.computation_type_impl, TritonSemantic.broadcast_impl_value
    shapes: dict[tuple[int, ...], Any] = {}
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    computed: dict[tuple[str, bool, str, bool, bool], Any] = {}
    no_shape, one = core.tuple([]), core.constexpr(1)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([getattr(size, "value", size) for size in shape])
        known = blocks.get(key)
        if known is None:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)
            self.shape_of_tensors = core.tuple([core.constexpr(size) for size in self.shape])
            self.numel_of_tensors = core.constexpr(self.numel)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(known)

    def equal_blocks(self: Any, other: Any) -> bool:
        if not isinstance(other, core.block_type) or self.element_ty != other.element_ty:
            return False
        return self.shape is other.shape or bool(self.shape == other.shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.shape_of_tensors, type.numel_of_tensors
        else:
            self.shape, self.numel = no_shape, one

    def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in computed:
            computed[key] = compute_type(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return computed[key]

    def broadcast_to_common_shape(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        of_one, of_other = (type.shape if type.is_block() else None for type in (one.type, other.type))
        return (one, other) if of_one is of_other else broadcast(self, one, other)

    core.block_type.__init__ = init_block
    core.block_type.__eq__ = equal_blocks
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.tensor.__init__ = init_tensor
    TritonSemantic.computation_type_impl = computation_type
    TritonSemantic.broadcast_impl_value = broadcast_to_common_shape

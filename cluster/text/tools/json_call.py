"""Reads calls that are JSON: {"name": "f", "arguments": {...}}."""

from __future__ import annotations

import string
from collections.abc import Callable

from cluster.text.tools.names import read_name
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Reader, Steps

_ARGUMENTS = ("arguments", "parameters")
_KEY_CHARS = frozenset(string.ascii_letters + "_")
_MAX_KEY_CHARS = 32


class JsonCall:
    """One call. It begins as soon as its name is known and its arguments begin; until then all of it may turn out to be
    content. Members may come in any order: arguments before the name are held until the name has come. Members of other
    names are left out."""

    def __init__(self, reader: Reader, output: Output, is_name: Callable[[str], bool]) -> None:
        self._reader = reader
        self._output = output
        self._is_name = is_name
        self._name = ""
        self._held: list[str] = []  # arguments
        self._has_arguments = False
        self._is_whole = False

    def read(self) -> Steps[bool]:
        """Whether it was a whole call. The end of the answer may cut it off behind its arguments. If it was none, what
        was read and is not used is content."""
        reader = self._reader
        if not (yield from self._read_members()):
            return self._is_whole and reader.is_exhausted
        if not self._name:
            return False
        if not self._has_arguments:
            self._output.begin_call(self._name)
            self._output.arguments("{}")
        reader.commit()
        return True

    def _read_members(self) -> Steps[bool]:
        reader = self._reader
        if not (yield from reader.word("{")):
            return False
        separator: str | None = ","
        while separator == ",":
            yield from reader.spaces()
            if not (yield from self._member()):
                return False
            yield from reader.spaces()
            separator = yield from reader.one_of((",", "}"))
        return separator is not None

    def _member(self) -> Steps[bool]:
        reader = self._reader
        if not (yield from reader.word('"')):
            return False
        key = yield from reader.characters(_KEY_CHARS, _MAX_KEY_CHARS)
        if not key or not (yield from reader.word('"')):
            return False
        yield from reader.spaces()
        if not (yield from reader.word(":")):
            return False
        yield from reader.spaces()
        if key == "name":
            return (yield from self._read_name())
        if key in _ARGUMENTS:
            return (yield from self._read_arguments())
        return (yield from reader.json(lambda text: None))

    def _read_name(self) -> Steps[bool]:
        reader = self._reader
        if self._name or not (yield from reader.word('"')):
            return False
        name = yield from read_name(reader)
        if not name or not (yield from reader.word('"')) or not self._is_name(name):
            return False
        self._name = name
        if self._has_arguments:
            self._begin()
            for text in self._held:
                self._output.arguments(text)
            self._is_whole = True
        return True

    def _read_arguments(self) -> Steps[bool]:
        reader = self._reader
        if self._has_arguments or (yield from reader.peek()) != "{":
            return False
        self._has_arguments = True
        if not self._name:
            return (yield from reader.json(self._held.append))
        self._begin()
        self._is_whole = yield from read_arguments(reader, self._output)
        return self._is_whole

    def _begin(self) -> None:
        self._output.begin_call(self._name)
        self._reader.commit()


def read_arguments(reader: Reader, output: Output) -> Steps[bool]:
    """Arguments of the call that has begun, as they come; whether they are complete."""

    def emit(text: str) -> None:
        reader.commit()
        output.arguments(text)

    return (yield from reader.json(emit))


def read_end(reader: Reader, output: Output, mark: str) -> Steps[None]:
    """The mark after a whole call. Models leave it out."""
    yield from reader.spaces()
    if (yield from reader.word(mark)):
        reader.commit()
    else:
        show_unless_over(reader, output)


def show_unless_over(reader: Reader, output: Output) -> None:
    """What was read after a whole call is content, unless it is the beginning of a mark that the end of the answer has
    cut off."""
    if not reader.is_exhausted:
        output.content(reader.taken())
    reader.commit()

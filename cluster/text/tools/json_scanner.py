"""Follows one JSON value through text that comes in pieces, without recursion and without keeping it."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

MAX_DEPTH = 128  # nested objects and arrays; parsers of clients recurse

_END_OF_PLAIN = re.compile(r'["\\\x00-\x1f]')
_SPACES = " \t\n\r"
_DIGITS = "0123456789"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


class _State(Enum):
    VALUE = auto()
    ITEM_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()
    COMPLETE = auto()
    BAD = auto()


class _Number(Enum):
    MINUS = auto()
    ZERO = auto()
    WHOLE = auto()
    POINT = auto()
    FRACTION = auto()
    E = auto()
    E_SIGN = auto()
    EXPONENT = auto()


_MAY_END = frozenset((_Number.ZERO, _Number.WHOLE, _Number.FRACTION, _Number.EXPONENT))
_AFTER_DIGIT = {
    _Number.MINUS: _Number.WHOLE,
    _Number.WHOLE: _Number.WHOLE,
    _Number.POINT: _Number.FRACTION,
    _Number.FRACTION: _Number.FRACTION,
    _Number.E: _Number.EXPONENT,
    _Number.E_SIGN: _Number.EXPONENT,
    _Number.EXPONENT: _Number.EXPONENT,
}


class JsonScanner:
    """Passes a value through as it is written. Control characters in strings, which JSON forbids and models write, come
    out escaped."""

    __slots__ = ("_depth_kinds", "_hex_left", "_is_key", "_literal_left", "_number", "_state")

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._depth_kinds: list[str] = []  # "{" or "[", outermost first
        self._is_key = False
        self._hex_left = 0
        self._literal_left = ""
        self._number = _Number.MINUS

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE

    @property
    def is_bad(self) -> bool:
        """Whether the next character cannot continue the value."""
        return self._state is _State.BAD

    def end(self) -> None:
        """No more text comes: completes a number that stands alone."""
        if self._state is _State.NUMBER and not self._depth_kinds and self._number in _MAY_END:
            self._state = _State.COMPLETE

    def scan(self, text: str, at: int = 0) -> tuple[int, str]:
        """Reads from `at` to the end of the value or of the text, or to the first character that cannot continue it.
        Returns where that is, and what was read."""
        passed: list[str] = []
        start = at
        while at < len(text) and self._state not in (_State.COMPLETE, _State.BAD):
            if self._state is _State.STRING:
                stop = _END_OF_PLAIN.search(text, at)
                if stop is None:
                    at = len(text)
                    break
                at = stop.start()
                if text[at] < " ":
                    passed += text[start:at], json.dumps(text[at])[1:-1]
                    at += 1
                    start = at
                    continue
            if self._take(text[at]):
                at += 1
        passed.append(text[start:at])
        return at, "".join(passed)

    def _take(self, char: str) -> bool:
        """Whether the character is read; if not, the value has ended or is bad, or a number has ended before it."""
        state = self._state
        if state is _State.STRING:
            if char == "\\":
                self._state = _State.ESCAPE
            elif self._is_key:
                self._state = _State.COLON
            else:
                self._end_value()
        elif state is _State.ESCAPE:
            if char == "u":
                self._state, self._hex_left = _State.HEX, 4
            else:
                return self._go(char in '"\\/bfnrt', _State.STRING)
        elif state is _State.HEX:
            self._hex_left -= 1
            return self._go(char in "0123456789abcdefABCDEF", _State.HEX if self._hex_left else _State.STRING)
        elif state is _State.LITERAL:
            if char != self._literal_left[0]:
                return self._go(False)
            self._literal_left = self._literal_left[1:]
            if not self._literal_left:
                self._end_value()
        elif state is _State.NUMBER:
            return self._take_in_number(char)
        elif char not in _SPACES:
            return self._take_between(char)
        return True

    def _take_between(self, char: str) -> bool:
        state = self._state
        if state is _State.COLON:
            return self._go(char == ":", _State.VALUE)
        if state is _State.COMMA_OR_END:
            is_object = self._depth_kinds[-1] == "{"
            if char == ",":
                return self._go(True, _State.KEY if is_object else _State.VALUE)
            return self._close(char)
        if state in (_State.KEY, _State.KEY_OR_END):
            if char == '"':
                self._is_key = True
                return self._go(True, _State.STRING)
            return self._close(char) if state is _State.KEY_OR_END else self._go(False)
        if state is _State.ITEM_OR_END and char == "]":
            return self._close(char)
        return self._begin_value(char)

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self._depth_kinds.append(char)
            is_allowed = len(self._depth_kinds) <= MAX_DEPTH
            return self._go(is_allowed, _State.KEY_OR_END if char == "{" else _State.ITEM_OR_END)
        if char == '"':
            self._is_key = False
            return self._go(True, _State.STRING)
        if char in _LITERALS:
            self._literal_left = _LITERALS[char]
            return self._go(True, _State.LITERAL)
        if char == "-" or char in _DIGITS:
            self._number = {"-": _Number.MINUS, "0": _Number.ZERO}.get(char, _Number.WHOLE)
            return self._go(True, _State.NUMBER)
        return self._go(False)

    def _take_in_number(self, char: str) -> bool:
        number, follows = self._number, None
        if char in _DIGITS:
            follows = _Number.ZERO if number is _Number.MINUS and char == "0" else _AFTER_DIGIT.get(number)
        elif char == "." and number in (_Number.ZERO, _Number.WHOLE):
            follows = _Number.POINT
        elif char in "eE" and number in (_Number.ZERO, _Number.WHOLE, _Number.FRACTION):
            follows = _Number.E
        elif char in "+-" and number is _Number.E:
            follows = _Number.E_SIGN
        if follows is not None:
            self._number = follows
            return True
        if number in _MAY_END:
            self._end_value()  # the character is read again, as what follows the number
            return False
        return self._go(False)

    def _close(self, char: str) -> bool:
        if char != ("}" if self._depth_kinds[-1] == "{" else "]"):
            return self._go(False)
        self._depth_kinds.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._state = _State.COMMA_OR_END if self._depth_kinds else _State.COMPLETE

    def _go(self, is_right: bool, state: _State = _State.BAD) -> bool:
        self._state = state if is_right else _State.BAD
        return is_right

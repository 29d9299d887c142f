"""What the text of an answer says, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int  # 0 for the first call of the answer
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of JSON text. The pieces of a call join to one JSON object, unless the answer ends inside it or the
    model's JSON is bad: then they join to the beginning of one."""

    index: int
    text: str


Event = Content | Reasoning | CallBegin | CallArguments

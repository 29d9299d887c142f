"""What a conversation can change about its answers."""

from __future__ import annotations

import msgspec

from actors.errors import InvalidRequest
from cluster.request_limits import check_local_fields

# Name and arguments, in order.
PROCESSORS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "multinomial": ("temperature",),
    "topk": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "topknucleus": ("temperature", "top_k", "top_p"),
}


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen: every change goes through `changed`, which checks it. Also the form in which they are saved."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None  # None: drawn for every turn
    max_new_tokens: int | None = None  # None: 256, or what there is room for
    speculative: bool = True
    drafters: tuple[str, ...] | None = None  # None: all there are
    max_draft_tokens: int | None = None  # None: as many as the engine takes
    uses_template: bool = True
    compare: bool = False
    debug: bool = False

    @property
    def active_drafters(self) -> tuple[str, ...] | None:
        return self.drafters if self.speculative else ()


def changed(settings: ChatSettings, **fields: object) -> ChatSettings:
    """Raises InvalidRequest naming field, value and limit."""
    return checked(msgspec.structs.replace(settings, **fields))


def checked(settings: ChatSettings) -> ChatSettings:
    """Raises InvalidRequest."""
    names = ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "max_draft_tokens")
    check_local_fields({name: getattr(settings, name) for name in names})
    return settings


def with_processor(settings: ChatSettings, words: list[str]) -> ChatSettings:
    """The settings for `NAME ARGUMENTS...`. Raises InvalidRequest."""
    name, values = (words or [""])[0], words[1:]
    if name not in PROCESSORS or len(values) != len(PROCESSORS[name]):
        usage = ", ".join(" ".join((known, *map(str.upper, fields))) for known, fields in PROCESSORS.items())
        raise InvalidRequest("processor", " ".join(words), f"it must be one of: {usage}")
    fields: dict[str, object] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    for field, text in zip(PROCESSORS[name], values, strict=True):
        fields[field] = integer(field, text) if field == "top_k" else number(field, text)
    return changed(settings, **fields)


def describe_processor(settings: ChatSettings) -> str:
    if settings.temperature <= 1e-6:
        return "greedy"
    parts = [f"temperature {settings.temperature:g}"]
    if settings.top_k > 0:
        parts.append(f"top-k {settings.top_k}")
    if settings.top_p < 1:
        parts.append(f"top-p {settings.top_p:g}")
    return ", ".join(parts)


def number(field: str, text: str) -> float:
    """Raises InvalidRequest."""
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(field, text, "it must be a number") from None


def integer(field: str, text: str) -> int:
    """Raises InvalidRequest."""
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(field, text, "it must be an integer") from None


def switch(field: str, text: str, now: bool) -> bool:
    """`on`, `off`, or nothing to change it. Raises InvalidRequest."""
    if text not in ("", "on", "off"):
        raise InvalidRequest(field, text, "write on, off, or nothing to change it")
    return text == "on" if text else not now

"""The settings of a conversation that `/set` changes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from actors.errors import InvalidRequest
from cluster.generation import generation_options


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None  # None: drawn for every turn
    max_new_tokens: int | None = None  # None: 256, or as many as there is room for
    max_draft_tokens: int | None = None  # None: as many as the engine takes
    speculative: bool = True
    compare: bool = False  # decode every turn again without drafts
    debug: bool = False
    drafters: tuple[str, ...] | None = None  # None: all; set by /drafters

    @property
    def active_drafters(self) -> tuple[str, ...] | None:
        return self.drafters if self.speculative else ()


_SWITCH = {"on": True, "off": False}
_READ: dict[str, Callable[[str], object]] = {"a number": float, "an integer": int, "on or off": _SWITCH.__getitem__}
_KINDS = {
    **dict.fromkeys(("temperature", "top_p"), "a number"),
    **dict.fromkeys(("top_k", "seed", "max_new_tokens", "max_draft_tokens"), "an integer"),
    **dict.fromkeys(("speculative", "compare", "debug"), "on or off"),
}


def checked(settings: ChatSettings) -> ChatSettings:
    """Raises InvalidRequest naming field, value and limit."""
    numbers = [name for name, kind in _KINDS.items() if kind != "on or off"]
    generation_options(**{name: getattr(settings, name) for name in numbers})
    return settings


def with_setting(settings: ChatSettings, name: str, text: str) -> ChatSettings:
    """`/set NAME VALUE`; `auto` is the default of any setting. Raises InvalidRequest."""
    kind = _KINDS.get(name)
    if kind is None:
        raise InvalidRequest("/set", name, f"it must be one of {', '.join(_KINDS)}")
    try:
        value = getattr(ChatSettings(), name) if text == "auto" else _READ[kind](text)
    except (ValueError, KeyError):
        raise InvalidRequest(name, text, f"it must be {kind}, or auto") from None
    return checked(msgspec.structs.replace(settings, **{name: value}))


def describe(settings: ChatSettings) -> str:
    """All that `/set` changes, in one line."""
    words = {None: "auto", True: "on", False: "off"}
    shown = {name: getattr(settings, name) for name in _KINDS}
    return ", ".join(
        f"{name} {words[value] if value is None or isinstance(value, bool) else f'{value:g}'}"
        for name, value in shown.items()
    )

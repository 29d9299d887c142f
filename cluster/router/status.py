"""What a router says of itself when it is asked whether it serves."""

from __future__ import annotations

import msgspec


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool  # takes requests
    live: bool  # false: only a restart helps
    detail: str = ""  # for people
    max_model_len: int | None = None  # tokens, prompt and answer together; None: not known yet

"""A router's readiness and liveness, which gateways need for their probes and for what they say of the model."""

from __future__ import annotations

import msgspec

from actors.links.keys import LinkAddress


class RouterStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    ready: bool  # takes requests
    live: bool  # false: only a restart helps
    detail: str = ""  # for people
    max_model_len: int | None = None  # tokens, prompt and answer together; None: not known yet
    told_by: tuple[str, LinkAddress] | None = None  # the router's id, and where gateways hear it; None in its news

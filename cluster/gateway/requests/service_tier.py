"""OpenAI's `service_tier` and the class of a request."""

from __future__ import annotations

from typing import Literal

from actors.messages import ServiceClass

ServiceTier = Literal["auto", "default", "flex", "priority"]


def class_of_tier(tier: str | None) -> ServiceClass | None:
    """flex, which is cheap and may take long, is batch. Nothing goes before interactive requests, so `priority` is
    served as one of them. None: the tenant's own, as for `auto`."""
    if tier == "flex":
        return "batch"
    return "interactive" if tier in ("default", "priority") else None


def tier_of_class(service_class: ServiceClass) -> ServiceTier:
    """The tier that an answer names: what the request was served as."""
    return "flex" if service_class == "batch" else "default"

"""OpenAI's `service_tier` and the class of a request."""

from __future__ import annotations

from typing import Literal

from actors.messages import ServiceClass

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]  # all that OpenAI's clients can send


def class_of_tier(tier: str | None) -> ServiceClass | None:
    """flex, which is cheap and may take long, is batch. Nothing goes before interactive requests, so the tiers that are
    to be fast are served as such. None: the tenant's own, as for `auto`."""
    if tier == "flex":
        return "batch"
    return "interactive" if tier in ("default", "scale", "priority", "fast") else None


def tier_of_class(service_class: ServiceClass) -> ServiceTier:
    """The tier that an answer names: what the request was served as."""
    return "flex" if service_class == "batch" else "default"

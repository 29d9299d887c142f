"""Errors of tenants: calls refused before any work, and registry files that cannot be used."""

from __future__ import annotations

from actors.errors import Overloaded, PacelineError
from cluster.errors import ConfigError


class RegistryUnusable(ConfigError):
    """The file that names the tenants is damaged or cannot be read. The message is one line that names it."""


class Unauthenticated(PacelineError):
    """No API key, or none that is known; the message never holds it. `reason` is what refusals are counted by:
    missing_key or unknown_key."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        if self.reason == "missing_key":
            return "an API key is required; send it as 'Authorization: Bearer KEY'"
        return "the API key is not known here, or has expired"


class TenantDisabled(PacelineError):
    """The key is right, its tenant is switched off. Reported only to holders of one of the tenant's keys."""

    reason = "disabled"

    def __str__(self) -> str:
        return "the tenant of this API key is disabled"


class OverLimit(Overloaded):
    """The tenant's own limit is reached. `limit_name` is the limit's field, which refusals are counted by."""

    def __init__(self, limit_name: str, limit: float, retry_after_s: float) -> None:
        super().__init__(f"the tenant's limit {limit_name} of {limit:g} is reached", retry_after_s)
        self.args = (limit_name, limit, retry_after_s)  # for unpickling
        self.limit_name = limit_name

"""Validated contents of the tenant registry file. It holds digests of keys, never keys."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.tenants.errors import RegistryUnusable
from cluster.validation import field_path, limit_of

MAX_LIVE_KEYS = 8  # a tenant

Policy = Literal["isolated", "group", "promoted", "shared"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
_Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TenantLimits(_Record):
    """Limits over the whole cluster, of which each gateway process enforces its share. None: no limit."""

    # The minimum keeps Retry-After finite: one request in twelve days.
    requests_per_second: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10**12)] | None = None  # prompt and answer
    max_concurrent: Annotated[int, Field(ge=1, le=100_000)] | None = None  # sequences
    cache_bytes: Annotated[int, Field(ge=0, le=2**50)] | None = None  # memory of its own namespaces


class StoredKey(_Record):
    id: _Id
    sha256: _Hex32  # digest of the whole key
    last4: Annotated[str, Field(pattern=r"^[0-9a-f]{4}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None

    def is_live(self, now: datetime) -> bool:
        return self.expires is None or now < self.expires


class StoredTenant(_Record):
    """The id is random, so that a tenant removed and added again does not get its namesake's data."""

    id: _Id
    name: Name
    created: AwareDatetime
    disabled: bool = False
    policy: Policy = "isolated"
    group: Name | None = None  # a trust group; None with policy group: tenants with the same cache_salt
    limits: TenantLimits = TenantLimits()
    keys: tuple[StoredKey, ...] = ()

    @model_validator(mode="after")
    def _group_and_policy(self) -> StoredTenant:
        if self.policy != "group" and self.group is not None:
            raise ValueError(f"group is {self.group!r}; policy {self.policy!r} has none")
        return self


class Registry(_Record):
    format: Literal[1] = 1
    # Derives namespaces from tenants' ids, so that neither reveals the other.
    server_key: _Hex32 = Field(default_factory=lambda: secrets.token_hex(32))
    tenants: tuple[StoredTenant, ...] = ()

    @model_validator(mode="after")
    def _are_distinct(self) -> Registry:
        keys = [key for tenant in self.tenants for key in tenant.keys]
        for what, values in (
            ("tenant id", [tenant.id for tenant in self.tenants]),
            ("tenant name", [tenant.name for tenant in self.tenants]),
            ("key id", [key.id for key in keys]),
            ("key digest", [key.sha256 for key in keys]),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"a {what} occurs twice")
        return self


def now_utc() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def parse_registry(data: bytes, where: str) -> Registry:
    """Raises RegistryUnusable naming file and field, but no value: the file may hold secrets by mistake."""
    try:
        return Registry.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise RegistryUnusable(f"{where}: {field_path(problem['loc'])}: {limit_of(problem)}") from None

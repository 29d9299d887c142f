"""The tenants of a registry, validated, and the lines of its file. It holds digests of keys, never keys."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from actors.messages import ServiceClass
from cluster.tenants.errors import RegistryUnusable
from cluster.validation import field_path, limit_of

MAX_LIVE_KEYS = 8  # a tenant

Policy = Literal["isolated", "group", "promoted", "shared"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
_Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class TenantLimits:
    """Limits over the whole cluster. None: no limit."""

    # The minimum keeps Retry-After finite: one request in twelve days.
    requests_per_second: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10**12)] | None = None  # prompt and answer
    max_concurrent: Annotated[int, Field(ge=1, le=100_000)] | None = None  # sequences
    cache_bytes: Annotated[int, Field(ge=0, le=2**50)] | None = None  # memory of its own namespaces
    weight: Annotated[float, Field(ge=0.01, le=100)] | None = None  # share of tokens among waiting tenants; None: 1


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoredKey:
    id: _Id
    sha256: _Hex32  # digest of the whole key
    last4: Annotated[str, Field(pattern=r"^[0-9a-f]{4}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None

    def is_live(self, now: datetime) -> bool:
        return self.expires is None or now < self.expires


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoredTenant:
    """The id is random, so that a tenant removed and added again does not get its namesake's data."""

    id: _Id
    name: Name
    created: AwareDatetime
    disabled: bool = False
    policy: Policy = "isolated"
    group: Name | None = None  # a trust group; None with policy group: tenants with the same cache_salt
    service_class: ServiceClass = "interactive"  # of requests that do not say
    limits: TenantLimits = TenantLimits()
    keys: tuple[StoredKey, ...] = ()

    @model_validator(mode="after")
    def _group_and_policy(self) -> StoredTenant:
        if self.policy != "group" and self.group is not None:
            raise ValueError(f"group is {self.group!r}; policy {self.policy!r} has none")
        return self


Changes = Mapping[str, StoredTenant | None]  # by id; None: it is removed


class Registry:
    """Never changes: `changed` makes another one, which shares what stays. Raises ValueError where tenants clash."""

    def __init__(self, tenants: Iterable[StoredTenant] = (), server_key: str = "") -> None:
        """server_key: derives namespaces from tenants' ids, so that neither reveals the other. "": a new one."""
        self.server_key = server_key or secrets.token_hex(32)
        self._mark = object()
        self._changes: tuple[object, Changes] | None = None  # the mark of the one before, and what has changed since
        self._by_id: dict[str, StoredTenant] = {}
        self._by_key: dict[str, StoredTenant] = {}  # by digest
        listed = list(tenants)
        if len({tenant.id for tenant in listed}) < len(listed):
            raise ValueError("a tenant id occurs twice")
        self._put({tenant.id: tenant for tenant in listed})

    @property
    def tenants(self) -> tuple[StoredTenant, ...]:
        """The one that was changed last comes last."""
        return tuple(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, tenant_id: str) -> bool:
        return tenant_id in self._by_id

    def find(self, digest: bytes) -> tuple[StoredKey, StoredTenant] | None:
        """The key with this digest, and its tenant."""
        sha256 = digest.hex()
        tenant = self._by_key.get(sha256)
        return None if tenant is None else next((key, tenant) for key in tenant.keys if key.sha256 == sha256)

    def changed(self, changes: Changes) -> Registry:
        other = Registry(server_key=self.server_key)
        other._by_id, other._by_key = dict(self._by_id), dict(self._by_key)
        other._put(changes)
        other._changes = self._mark, changes
        return other

    def changes_since(self, other: Registry | None) -> Changes:
        """What to change in `other`; all tenants, and those that are gone, unless this one was made from it."""
        if other is not None and self._changes is not None and self._changes[0] is other._mark:
            return self._changes[1]
        gone: dict[str, StoredTenant | None] = {} if other is None else dict.fromkeys(other._by_id)
        return gone | self._by_id

    def _put(self, changes: Changes) -> None:
        for tenant_id in changes:
            former = self._by_id.pop(tenant_id, None)
            for key in () if former is None else former.keys:
                del self._by_key[key.sha256]
        new = [tenant for tenant in changes.values() if tenant is not None]
        names = {tenant.name for tenant in new}
        if len(names) < len(new) or any(tenant.name in names for tenant in self._by_id.values()):
            raise ValueError("a tenant name occurs twice")
        for tenant in new:
            if len({key.id for key in tenant.keys}) < len(tenant.keys):
                raise ValueError("a key id occurs twice")
            for key in tenant.keys:
                if self._by_key.setdefault(key.sha256, tenant) is not tenant:
                    raise ValueError("a key digest occurs twice")
            self._by_id[tenant.id] = tenant


@dataclass(frozen=True, slots=True, config=_STRICT)
class _Header:
    """The first line. The next `num_tenants` are tenants, and then each line is a tenant that was added or changed, or
    the removal of one."""

    format: Literal[2]
    server_key: _Hex32
    num_tenants: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, config=_STRICT)
class _Removed:
    removed: _Id  # of a tenant


@dataclass(frozen=True, slots=True, config=_STRICT)
class _FirstFormat:
    """A file of the first format is one JSON document."""

    server_key: _Hex32
    format: Literal[1] = 1
    tenants: tuple[StoredTenant, ...] = ()


_REMOVAL = b'{"removed":'
_HEADER = TypeAdapter(_Header)
_TENANT = TypeAdapter(StoredTenant)
_REMOVED = TypeAdapter(_Removed)
_FIRST_FORMAT = TypeAdapter(_FirstFormat)


def now_utc() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def is_first_format(data: bytes) -> bool:
    try:
        head = json.loads(data.partition(b"\n")[0])
    except ValueError:  # it goes on in the second line
        return True
    return not isinstance(head, dict) or head.get("format", 1) == 1


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def parse_registry(data: bytes, where: str) -> Registry:
    """A whole file. Raises RegistryUnusable naming file and field, but no value: the file may hold secrets by
    mistake."""
    try:
        if is_first_format(data):
            old = _FIRST_FORMAT.validate_json(data)
            return Registry(old.tenants, old.server_key)
        head, *lines = data.splitlines()
        if lines and not data.endswith(b"\n") and not _is_json(lines[-1]):
            del lines[-1]  # incomplete: it is being written, or its writer was killed before it reported success
        header = _HEADER.validate_json(head)
        tenants = parse_changes(lines[: header.num_tenants], where)
        if len(tenants) < header.num_tenants:
            raise ValueError(f"it ends before its {header.num_tenants} tenants do")
        later = parse_changes(lines[header.num_tenants :], where)
        return Registry(server_key=header.server_key).changed(tenants).changed(later)
    except ValueError as error:
        raise RegistryUnusable(f"{where}: {_problem(error)}") from None


def parse_changes(lines: Iterable[bytes], where: str) -> dict[str, StoredTenant | None]:
    """Lines after the first. Raises RegistryUnusable."""
    changes: dict[str, StoredTenant | None] = {}
    try:
        for line in lines:
            if line.startswith(_REMOVAL):
                changes[_REMOVED.validate_json(line).removed] = None
            else:
                tenant = _TENANT.validate_json(line)
                changes[tenant.id] = tenant
    except ValidationError as error:
        raise RegistryUnusable(f"{where}: {_problem(error)}") from None
    return changes


def change_lines(changes: Changes) -> bytes:
    return b"".join(
        (
            _REMOVED.dump_json(_Removed(tenant_id))
            if tenant is None
            else _TENANT.dump_json(tenant, exclude_defaults=True)
        )
        + b"\n"
        for tenant_id, tenant in changes.items()
    )


def registry_lines(registry: Registry) -> bytes:
    """A whole file."""
    header = _HEADER.dump_json(_Header(2, registry.server_key, len(registry)))
    return header + b"\n" + change_lines({tenant.id: tenant for tenant in registry.tenants})


def _problem(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{field_path(problem['loc'])}: {limit_of(problem)}"

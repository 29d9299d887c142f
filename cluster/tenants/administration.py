"""Tenant administration: each action changes the registry file under its lock and is audited."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from actors.errors import InvalidRequest
from cache_service.admin.audit_log import AuditFile, os_user
from cache_service.errors import AuditError
from cluster.errors import ConfigError
from cluster.tenants.keys import key_digest, new_key
from cluster.tenants.registry import MAX_LIVE_KEYS, Registry, StoredKey, StoredTenant, TenantLimits, now_utc
from cluster.tenants.registry_file import RegistryFile, locked
from cluster.validation import first_problem, limit_of

LIMITS = tuple(one.name for one in fields_of(TenantLimits))
_MOST_NAMED = 20  # tenants, in an error
_LIMITS, _TENANT = TypeAdapter(TenantLimits), TypeAdapter(StoredTenant)


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key, shown once: only its digest is stored."""

    tenant: StoredTenant
    key_id: str
    key: str = field(repr=False)


@dataclass
class _Action:
    """A change in progress; `audited` goes to the audit log."""

    registry: Registry
    changes: dict[str, StoredTenant | None] = field(default_factory=dict)
    audited: dict[str, Any] = field(default_factory=dict)

    def find(self, name: str) -> StoredTenant:
        for tenant in self.registry.tenants:
            if tenant.name == name:
                return tenant
        known = sorted(tenant.name for tenant in self.registry.tenants)
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        there_are = ", ".join(known[:_MOST_NAMED]) or "none"
        raise InvalidRequest("name", name, f"there is no such tenant; there are: {there_are}{more}")

    def new_id(self) -> str:
        """So many tenants share 32 bits that chance alone would give two of them the same."""
        while (tenant_id := _random_id()) in self.registry:
            pass
        return tenant_id

    def put(self, tenant: StoredTenant) -> None:
        """Add the tenant, or replace the one with this id."""
        self.changes[tenant.id] = tenant

    def drop(self, tenant: StoredTenant) -> None:
        self.changes[tenant.id] = None


class TenantAdministration:
    """Administers one registry file, with its audit log beside it. Methods raise InvalidRequest naming field, value and
    limit, or ConfigError if a file cannot be used."""

    def __init__(self, path: Path, *, allow_shared: bool = False) -> None:
        """allow_shared: whether tenants may get the policy `shared`."""
        self._path = path
        self._file = RegistryFile(path)
        self._allow_shared = allow_shared

    @property
    def audit_path(self) -> Path:
        return self._path.with_name(f"{self._path.stem}-audit.jsonl")

    def registry(self) -> Registry | None:
        """None: there is no file yet."""
        return self._file.read()

    def tenants(self) -> tuple[StoredTenant, ...]:
        """Sorted by name."""
        registry = self.registry()
        return () if registry is None else tuple(sorted(registry.tenants, key=lambda tenant: tenant.name))

    def add(self, name: str, fields: Mapping[str, object]) -> IssuedKey:
        """fields: limits, policy, group; defaults are those of `StoredTenant` and `TenantLimits`."""
        now = now_utc()
        with self._action("add", name, now) as action:
            if any(tenant.name == name for tenant in action.registry.tenants):
                raise InvalidRequest("name", name, "there is such a tenant already; see `paceline tenant rotate`")
            tenant = self._checked({"id": action.new_id(), "name": name, "created": now}, TenantLimits(), fields)
            issued = _with_key(tenant, now)
            action.put(issued.tenant)
            action.audited |= {"id": tenant.id, "key": issued.key_id, **dict(fields)}
        return issued

    def rotate(self, name: str, keep_old_for: timedelta) -> IssuedKey:
        """Issue a new key. Live keys expire after `keep_old_for` at the latest; expired ones are removed."""
        now = now_utc()
        with self._action("rotate", name, now) as action:
            tenant = action.find(name)
            until = _later(now, keep_old_for)
            live = [key for key in tenant.keys if key.is_live(now)] if until > now else []
            if len(live) >= MAX_LIVE_KEYS:
                limit = f"at most {MAX_LIVE_KEYS} keys of a tenant live at once; remove one with --key"
                raise InvalidRequest("keys", len(live), limit)
            keys = [replace(key, expires=min(key.expires or until, until)) for key in live]
            issued = _with_key(replace(tenant, keys=tuple(keys)), now)
            action.put(issued.tenant)
            action.audited |= {"key": issued.key_id, "old_keys_expire": until.isoformat()}
        return issued

    def remove(self, name: str, key_id: str | None = None) -> None:
        """Remove the tenant, or one of its keys."""
        with self._action("remove" if key_id is None else "remove_key", name, now_utc()) as action:
            tenant = action.find(name)
            if key_id is None:
                action.drop(tenant)
                action.audited["id"] = tenant.id
                return
            rest = tuple(key for key in tenant.keys if key.id != key_id)
            if len(rest) == len(tenant.keys):
                known = ", ".join(key.id for key in tenant.keys) or "none"
                raise InvalidRequest("--key", key_id, f"the tenant has no such key; it has: {known}")
            action.put(replace(tenant, keys=rest))
            action.audited["key"] = key_id

    def change(self, name: str, fields: Mapping[str, object]) -> StoredTenant:
        """fields: limits (None: no limit), policy, group, disabled. Others stay, except that the group goes with policy
        `group`."""
        with self._action("set", name, now_utc()) as action:
            tenant = action.find(name)
            kept = {one.name: getattr(tenant, one.name) for one in fields_of(StoredTenant)}
            kept = {key: value for key, value in kept.items() if key not in ("limits", "group")}
            if fields.get("policy", tenant.policy) == "group":
                kept["group"] = tenant.group
            changed = self._checked(kept, tenant.limits, fields)
            action.put(changed)
            action.audited |= fields
        return changed

    def _checked(self, known: Mapping[str, object], limits: TenantLimits, fields: Mapping[str, object]) -> StoredTenant:
        """The known values, overridden by `fields`, as a validated tenant."""
        new_limits = asdict(limits) | {key: value for key, value in fields.items() if key in LIMITS}
        others = {key: value for key, value in fields.items() if key not in LIMITS}
        try:
            tenant = _TENANT.validate_python({**known, **others, "limits": _LIMITS.validate_python(new_limits)})
        except ValidationError as error:
            raise _problem(error, {**known, **others}) from None
        if tenant.policy == "shared" and "policy" in fields and not self._allow_shared:
            raise InvalidRequest("policy", "shared", "the cluster's tenants.allow_shared must be true for it")
        return tenant

    @contextmanager
    def _action(self, name: str, tenant: str, now: datetime) -> Iterator[_Action]:
        """Write the changes of the block at its end, unless it raises. tenant: its name."""
        line = {"time": now.isoformat(), "actor": os_user(), "action": name, "tenant": tenant}
        try:
            # Opened before the change, so that no change goes unrecorded. Keys appear in it by id only.
            with locked(self._path), closing(AuditFile(self.audit_path)) as audit:
                action = _Action(self._file.read() or Registry())
                yield action
                self._file.write(action.changes)
                audit.append({**line, "changes": action.audited})
        except AuditError as error:
            raise ConfigError(str(error)) from None


def _problem(error: ValidationError, fields: Mapping[str, object]) -> InvalidRequest:
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "value_error":  # policy and group disagree
        return InvalidRequest("group", fields.get("group"), limit_of(problem).partition("; ")[2])
    return first_problem(error)


def _with_key(tenant: StoredTenant, now: datetime) -> IssuedKey:
    key = new_key(tenant.id)
    stored = StoredKey(id=_random_id(), sha256=key_digest(key).hex(), last4=key[-4:], created=now)
    return IssuedKey(replace(tenant, keys=(*tenant.keys, stored)), stored.id, key)


def _random_id() -> str:
    return secrets.token_hex(4)


def _later(now: datetime, delay: timedelta) -> datetime:
    try:
        return now + delay
    except OverflowError:
        raise InvalidRequest("--keep-old-for", str(delay), "it must end before the year 10000") from None

"""Resolves tenants, names of parts and namespaces of `paceline cache list` to namespaces."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from actors.errors import InvalidRequest
from cache_service.errors import SettingError
from cache_service.formats.namespaces import (
    NAME_PATTERN,
    OPEN,
    PUBLIC,
    belongs_to,
    named,
    namespace_of,
    namespace_of_all,
    namespace_of_group,
)
from cluster.cache.promotion import organisation_of
from cluster.tenants.registry import Registry, StoredTenant

_WHOLE = re.compile(rf"({OPEN}|{PUBLIC}|[0-9a-f]{{32}})(-[0-9a-f]{{32}})?(\.{NAME_PATTERN}|\.REGIONS)?")


@dataclass(frozen=True, slots=True)
class Names:
    """registry: None without tenants."""

    registry: Registry | None = field(default=None, repr=False)
    allow_shared: bool = False

    def one(self, name: str | None, tenant: str | None) -> str:
        """The namespace that the tenant's requests (None: requests without a key) use; with a name, that part of it. A
        full namespace stands for itself. Raises InvalidRequest."""
        if tenant is None and name is not None and _WHOLE.fullmatch(name):
            return name
        owner = OPEN if tenant is None else self._used_by(self._find(tenant))
        try:
            return named(owner, name or "")
        except SettingError as error:
            raise InvalidRequest(error.field, error.value, error.limit) from None

    def belong_to(self, tenant: str, namespaces: list[str]) -> list[str]:
        """Those namespaces that are the tenant's own, with all its salts and parts. tenant: a name, or the id of a
        removed tenant. Raises InvalidRequest."""
        owner = namespace_of(self._server_key(tenant), self._id_of(tenant))
        return [namespace for namespace in namespaces if belongs_to(namespace, owner)]

    def feed_from(self, namespaces: Collection[str], tenant: str = "") -> set[str]:
        """Organisations, as the promotion gate counts them, whose namespaces are among these, and that of the tenant,
        if one is given as in `belong_to`. Raises InvalidRequest."""
        if self.registry is None:
            return set()
        own = {organisation_of(self.registry, known.id) for known in self.registry.tenants}
        return own.intersection(namespaces) | (
            {organisation_of(self.registry, self._id_of(tenant))} if tenant else set()
        )

    def shares_with(self, tenant: str) -> str | None:
        """The namespace that the tenant shares with others; None: it shares none, or has been removed."""
        found = self._named(tenant)
        used = None if found is None else self._used_by(found)
        return None if found is None or used == namespace_of(self._server_key(), found.id) else used

    def _used_by(self, tenant: StoredTenant) -> str:
        if tenant.policy == "group" and tenant.group is not None:
            return namespace_of_group(self._server_key(), tenant.group)
        if tenant.policy == "shared" and self.allow_shared:
            return namespace_of_all(self._server_key())
        return namespace_of(self._server_key(), tenant.id)

    def _named(self, tenant: str) -> StoredTenant | None:
        tenants = self.registry.tenants if self.registry is not None else ()
        return next((found for found in tenants if found.name == tenant), None)

    def _find(self, tenant: str) -> StoredTenant:
        self._server_key(tenant)
        found = self._named(tenant)
        if found is None:
            raise InvalidRequest("tenant", tenant, "there is no such tenant; see `paceline tenant list`")
        return found

    def _id_of(self, tenant: str) -> str:
        found = self._named(tenant)
        if found is not None:
            return found.id
        if not re.fullmatch("[0-9a-f]{8}", tenant):
            raise InvalidRequest(
                "tenant",
                tenant,
                "there is no such tenant; for a removed one, give its id from the audit log",
            )
        return tenant

    def _server_key(self, asked: str | None = None) -> bytes:
        if self.registry is None:
            raise InvalidRequest("tenant", asked, "there are no tenants; see `paceline tenant add`")
        return bytes.fromhex(self.registry.server_key)

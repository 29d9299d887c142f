"""Namespaces that a request reads and writes, by its tenant's policy and its own options."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.errors import InvalidRequest
from actors.messages import CacheUse
from cache_service.formats.namespaces import (
    OPEN,
    PUBLIC,
    imported,
    name_of_form,
    named,
    namespace_of,
    namespace_of_all,
    namespace_of_group,
    namespace_of_salt,
    salted,
)
from cluster.tenants.registry import Policy
from cluster.validation import counted

MIN_AGREED_SALT_CHARS = 16  # if the salt alone keeps strangers out


@dataclass(frozen=True, slots=True)
class Sharing:
    """With whom a tenant shares warm caches. policy: as in force in this cluster. group: None with policy group means
    sharing by the `cache_salt` of requests."""

    tenant_id: str
    policy: Policy
    group: str | None
    server_key: bytes = field(repr=False)
    may_write: bool = True
    has_regions: bool = False  # other clusters share with this one

    @property
    def namespace(self) -> str:
        """Default namespace."""
        if self.policy == "shared":
            return namespace_of_all(self.server_key)
        if self.policy == "group" and self.group is not None:
            return namespace_of_group(self.server_key, self.group)
        return namespace_of(self.server_key, self.tenant_id)


@dataclass(frozen=True, slots=True)
class Scope:
    """prefix_namespace: where prefix blocks are shared. has_company: other tenants also use both namespaces. promotes:
    the organisation that offers the answer to the public pool, or ""."""

    namespace: str
    prefix_namespace: str
    readable: tuple[str, ...] = ()
    cache: CacheUse = "read_write"
    has_company: bool = False
    promotes: str = ""

    @property
    def reads_others(self) -> bool:
        """Whether other tenants' text may speed the request up; its statistics are then withheld."""
        return self.has_company or PUBLIC in self.readable


def scope_of(
    sharing: Sharing | None, cache: CacheUse = "read_write", salt: str = "", name: str = "", grammar: str = ""
) -> Scope:
    """sharing: None without tenants. salt: separates a part of the tenant's or group's namespace. name: a named part,
    which is read and written, while the namespace that it belongs to is read. grammar: that the answer follows; without
    a name, answers with the same grammar have a separate part, but share prefix blocks with all others.

    Raises InvalidRequest for a salt too short to be the only secret of a group, which it does not show.
    """
    has_company, public, feeds = False, False, ""
    if sharing is None:
        whole = salted(b"", OPEN, salt)
    elif sharing.policy == "group" and sharing.group is None and salt:
        if len(salt) < MIN_AGREED_SALT_CHARS:
            limit = f"it must have at least {MIN_AGREED_SALT_CHARS}, since nothing else keeps others out of the group"
            raise InvalidRequest("cache_salt", counted(len(salt), "character"), limit)
        whole, has_company = namespace_of_salt(sharing.server_key, salt), True
    else:
        whole = salted(sharing.server_key, sharing.namespace, salt)
        has_company = sharing.policy == "shared" or sharing.group is not None
        public = sharing.policy == "promoted"
        # A salt or a name may separate the text of somebody who has not agreed to its promotion.
        feeds = sharing.namespace if public and not salt and not name else ""
    prefix_namespace = named(whole, name)
    if grammar and not name:
        name = name_of_form(b"" if sharing is None else sharing.server_key, whole, grammar)
    part = named(whole, name)
    readable = (*([] if part == whole else [whole]), *([PUBLIC] if public else []))
    if sharing is not None and sharing.has_regions:
        if sharing.policy == "group" and sharing.group is not None and not salt:
            readable = (*readable, imported(whole))
        elif public:
            readable = (*readable, imported(PUBLIC))
    if cache == "read_write" and sharing is not None and not sharing.may_write:
        cache = "read"
    promotes = feeds if cache == "read_write" else ""
    return Scope(
        namespace=part,
        prefix_namespace=prefix_namespace,
        readable=() if cache == "off" else readable,
        cache=cache,
        has_company=has_company,
        promotes=promotes,
    )

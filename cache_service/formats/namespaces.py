"""Names of namespaces in requests and in Redis. Only the holder of the server's key can tell whose a namespace is.

    <owner>             32 hex digits of HMAC-SHA-256 of a tenant or a group, of "shared" (all tenants), or of "agreed"
                        (tenants that share a salt); or `open`; or `public`
    <owner>-<salt>      a part kept apart by a salt, 32 more hex digits
    <owner>.<name>      a part that its owner has named
    <owner>-<salt>.<name>
    <owner>.form-<digits>  a part for answers of one form, with 16 hex digits of an HMAC of its grammar
    <owner>.REGIONS     what other clusters share of the owner's namespace; only the exchange of regions writes it

All of an owner's namespaces begin with its name, so they can be found and erased without knowing salts and names.
"""

from __future__ import annotations

import hmac
import re

from cache_service.errors import SettingError

PUBLIC = "public"  # phrases said by many tenants; only the promotion gate writes it
OPEN = "open"  # a cluster without tenants
REGIONS = "regions"  # what the exchange with other clusters must remember

_IMPORTED = ".REGIONS"  # no name of a part: these have no capitals

NAME_PATTERN = r"[a-z0-9](?:[a-z0-9_-]{0,30}[a-z0-9])?"

_DIGITS = 32  # 128 bits, so that collisions cannot be found
_FORM_DIGITS = 16  # within one owner's namespace a collision harms nobody


def namespace_of(server_key: bytes, tenant_id: str, salt: str = "") -> str:
    """A tenant's own namespace. server_key: 32 random bytes known to the registry of tenants only."""
    return salted(server_key, _digest(server_key, f"tenant:{tenant_id}"), salt)


def namespace_of_group(server_key: bytes, group: str) -> str:
    """The namespace shared by the tenants of a trust group."""
    return _digest(server_key, f"group:{group}")


def namespace_of_salt(server_key: bytes, salt: str) -> str:
    """The namespace shared by all who know a salt.

    They all have one owner, since a salt does not tell its tenant: trying many salts displaces no tenant's own data.
    """
    return salted(server_key, _digest(server_key, "agreed"), salt)


def namespace_of_all(server_key: bytes) -> str:
    """The namespace of tenants that share with everybody."""
    return _digest(server_key, "shared")


def salted(server_key: bytes, namespace: str, salt: str) -> str:
    """The part of a namespace kept apart by a salt; the namespace itself for ""."""
    return f"{namespace}-{_digest(server_key, f'salt:{namespace}:{salt}')}" if salt else namespace


def named(namespace: str, name: str) -> str:
    """The part of a namespace with this name; the namespace itself for "". Raises SettingError."""
    if not name:
        return namespace
    if not re.fullmatch(NAME_PATTERN, name):
        raise SettingError("namespace", name, "it must be 1-32 characters of a-z 0-9 _ -, the last two inside")
    return f"{namespace}.{name}"


def imported(namespace: str) -> str:
    """The namespace with what other clusters share of this one."""
    return namespace + _IMPORTED


def is_imported(namespace: str) -> bool:
    return namespace.endswith(_IMPORTED)


def name_of_form(server_key: bytes, namespace: str, grammar: str) -> str:
    """The name, for `named`, of the part of a namespace where answers that follow a grammar are learnt."""
    return f"form-{_digest(server_key, f'form:{namespace}:{grammar}')[:_FORM_DIGITS]}"


def owner_of(namespace: str) -> str:
    return namespace.partition("-")[0].partition(".")[0]


def belongs_to(namespace: str, owner: str) -> bool:
    return namespace == owner or namespace.startswith((f"{owner}-", f"{owner}."))


def _digest(server_key: bytes, what: str) -> str:
    return hmac.digest(server_key, what.encode(), "sha256").hex()[:_DIGITS]

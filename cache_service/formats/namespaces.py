"""What namespaces are called, in requests and in Redis: who they belong to is told by whoever has the server's key.

    <owner>             32 hexadecimal digits of HMAC-SHA-256 of a tenant or a group; `open`; `public`; of all that
                        tenants agree on by salt alone
    <owner>-<salt>      what a salt keeps apart, 32 digits more
    <owner>.<name>      a part that its owner gave a name
    <owner>-<salt>.<name>

So all that belongs to an owner begins with it, and can be found and erased without knowing salts and names.
"""

from __future__ import annotations

import hmac
import re

from cache_service.errors import SettingError

PUBLIC = "public"  # the pool of what many tenants have said; nothing but the promotion gate writes to it
OPEN = "open"  # the namespace of a cluster without tenants

NAME_PATTERN = r"[a-z0-9](?:[a-z0-9_-]{0,30}[a-z0-9])?"

_DIGITS = 32  # 128 bits: nobody finds two owners with the same


def namespace_of(server_key: bytes, tenant_id: str, salt: str = "") -> str:
    """A tenant's own namespace. server_key: 32 random bytes that stay with the registry of tenants."""
    return salted(server_key, _digest(server_key, f"tenant:{tenant_id}"), salt)


def namespace_of_group(server_key: bytes, group: str, salt: str = "") -> str:
    """The namespace that all tenants of a trust group share."""
    return salted(server_key, _digest(server_key, f"group:{group}"), salt)


def namespace_of_salt(server_key: bytes, salt: str) -> str:
    """The namespace of everybody who knows a salt, which alone keeps others out. All such namespaces have one owner:
    somebody who tries many salts takes no room from a tenant's own namespaces."""
    return salted(server_key, _digest(server_key, "agreed"), salt)


def namespace_of_all(server_key: bytes, salt: str = "") -> str:
    """The namespace of all tenants that share everything."""
    return salted(server_key, _digest(server_key, "shared"), salt)


def salted(server_key: bytes, namespace: str, salt: str) -> str:
    """The part of a namespace that a salt keeps apart; with "" the namespace itself."""
    return f"{namespace}-{_digest(server_key, f'salt:{namespace}:{salt}')}" if salt else namespace


def named(namespace: str, name: str) -> str:
    """The part of a namespace that has this name; with "" the namespace itself. Raises SettingError."""
    if not name:
        return namespace
    if not re.fullmatch(NAME_PATTERN, name):
        raise SettingError("namespace", name, "it must be 1-32 characters of a-z 0-9 _ -, the last two inside")
    return f"{namespace}.{name}"


def owner_of(namespace: str) -> str:
    """What its name begins with."""
    return namespace.partition("-")[0].partition(".")[0]


def belongs_to(namespace: str, owner: str) -> bool:
    """Whether a namespace is the owner's or a part of it."""
    return namespace == owner or namespace.startswith((f"{owner}-", f"{owner}."))


def _digest(server_key: bytes, what: str) -> str:
    return hmac.digest(server_key, what.encode(), "sha256").hex()[:_DIGITS]

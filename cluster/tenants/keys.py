"""API keys and their stored digests.

A key has 256 random bits behind a readable prefix. It cannot be guessed, so plain SHA-256 is as safe as a slow password
hash. A salt would only help against common or repeated passwords, and without one a digest can be looked up in 1 us.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from cluster.tenants.errors import Unauthenticated

_KEY_BYTES = 32


def new_key(tenant_id: str) -> str:
    """`pl-<tenant id>-<64 hexadecimal digits>`, recognisable with its tenant in any file."""
    return f"pl-{tenant_id}-{secrets.token_hex(_KEY_BYTES)}"


def key_digest(key: str) -> bytes:
    """SHA-256, 32 bytes."""
    return hashlib.sha256(key.encode(errors="replace")).digest()


def bearer_key(authorization: Iterable[str]) -> str:
    """Raises Unauthenticated. Not constant-time: it depends only on what the caller sent."""
    values = list(authorization)
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("missing_key")
    return key

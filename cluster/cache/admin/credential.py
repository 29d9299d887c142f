"""The administrators' bearer token, which is separate from the tenants' API keys."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from cluster.cache.access import read_secret
from cluster.errors import ConfigError

VARIABLE = "PACELINE_CACHE_ADMIN_TOKEN"
MIN_CHARS = 24
_SCHEME = "bearer "


class Credential:
    """A bearer token. Only its digest is kept, and comparisons take constant time."""

    __slots__ = ("_digest",)

    def __init__(self, token: str, source: str) -> None:
        """Raises ConfigError, which names `source` and shows no part of the token."""
        if len(token) < MIN_CHARS or not token.isascii() or any(char.isspace() for char in token):
            raise ConfigError(
                f"{source}: the token has {len(token)} characters; it must have {MIN_CHARS} or more, of ASCII without "
                "spaces, as `openssl rand -hex 32` makes it"
            )
        self._digest = _digest_of(token.encode())

    def __repr__(self) -> str:
        return "Credential(...)"

    def admits(self, authorization: str | None) -> bool:
        """Whether an Authorization header holds `Bearer <token>`."""
        text = authorization or ""
        token = text[len(_SCHEME) :] if text[: len(_SCHEME)].lower() == _SCHEME else ""
        return hmac.compare_digest(_digest_of(token.strip().encode("utf-8", "replace")), self._digest)


def load_credential(path: Path | None) -> Credential:
    """From a file, else from $PACELINE_CACHE_ADMIN_TOKEN. Raises ConfigError."""
    source = f"${VARIABLE}" if path is None else f"--credential-file {path}"
    token = read_secret(source, path, VARIABLE)
    if token is None:
        raise ConfigError(f"administrators need a credential: give --credential-file, or set ${VARIABLE}")
    return Credential(token.strip(), source)


def _digest_of(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()

"""The API key that a client of a server sends."""

from __future__ import annotations

from actors.errors import InvalidRequest


def bearer_headers(api_key: str | None) -> dict[str, str]:
    """Raises InvalidRequest, which does not show the key, for one that no header can hold."""
    if not api_key:
        return {}
    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest("--api-key", "not shown", "it must be of printable ASCII characters")
    return {"Authorization": f"Bearer {key}"}

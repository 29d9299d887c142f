"""The API key of commands that call a server."""

from __future__ import annotations

from typing import Annotated

import typer

from actors.errors import InvalidRequest

ApiKeyOption = Annotated[
    str | None,
    typer.Option(envvar="PACELINE_API_KEY", help="Of `paceline tenant add`, if the server wants one.", metavar="KEY"),
]


def bearer_headers(api_key: str | None) -> dict[str, str]:
    """Raises InvalidRequest, which does not show the key, if no header can hold it."""
    if not api_key:
        return {}
    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest("--api-key", "not shown", "it must be of printable ASCII characters")
    return {"Authorization": f"Bearer {key}"}

"""Where a worker listens and by which key it proves itself."""

from __future__ import annotations

from dataclasses import dataclass

from actors.links.keys import check_public_key


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """What a client needs in order to connect. A worker that restarts has another one: port and key are both new."""

    endpoint: str  # tcp://host:port
    server_public_key: bytes  # Z85, 40 bytes

    def __post_init__(self) -> None:
        check_public_key(self.server_public_key)

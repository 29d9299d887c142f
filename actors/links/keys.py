"""CURVE key pairs of links: one for each worker, made at its start, and one for all routers of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from actors.errors import LinkError

_Z85_LENGTH = 40  # 32 bytes as Z85 text


def check_public_key(key: bytes) -> bytes:
    """`key` itself if it is 32 bytes as Z85 text; raises LinkError otherwise, without repeating the value."""
    try:
        if len(key) == _Z85_LENGTH and len(z85.decode(key)) == 32:
            return key
    except Exception:  # the decoder raises different errors for different kinds of text
        pass
    raise LinkError(f"a link key has {len(key)} bytes or is not Z85; it must be {_Z85_LENGTH} characters of Z85")


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """A CURVE key pair, both halves as 40 bytes of Z85 text. The secret half is left out of repr.

    Raises LinkError if the halves do not belong together.
    """

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_public_key(self.public)
        check_public_key(self.secret)
        if zmq.curve_public(self.secret) != self.public:
            raise LinkError("a link's public key does not belong to its secret key")

    @staticmethod
    def generate() -> LinkKeys:
        """A new pair from the operating system's random source."""
        public, secret = zmq.curve_keypair()
        return LinkKeys(public, secret)


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Address and key of a worker. Both change when it restarts."""

    endpoint: str  # tcp://host:port
    server_public_key: bytes  # Z85, 40 bytes

    def __post_init__(self) -> None:
        check_public_key(self.server_public_key)

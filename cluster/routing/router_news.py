"""What routers announce to gateways, several times a second."""

from __future__ import annotations

import msgspec
import numpy as np

from cluster.routing.router_load import RouterLoad
from cluster.routing.router_status import RouterStatus

NEWS = b"news"  # the topic
WHOLE = b"whole-"  # prefix of a gateway's own topic: there a router sends all its blocks when the gateway connects


class RouterNews(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    router_id: str
    load: RouterLoad | None  # None: it takes no requests
    num_gateways: int  # that listen
    num_blocks: int  # that the target's memory holds; 0: it has no prefix cache
    blocks: bytes  # little-endian uint64 hashes, used since the last news, in order of use
    is_whole: bool  # `blocks` are all there are
    status: RouterStatus | None = None  # when it has changed, and once a second

    def block_hashes(self) -> list[int]:
        """Raises ValueError where the bytes are no hashes."""
        hashes: list[int] = np.frombuffer(self.blocks, dtype="<u8").tolist()
        return hashes


_decoder = msgspec.msgpack.Decoder(RouterNews)


def decode_news(data: bytes) -> RouterNews:
    """Raises MsgspecError."""
    return _decoder.decode(data)


def packed(blocks: list[int]) -> bytes:
    return np.array(blocks, dtype="<u8").tobytes()

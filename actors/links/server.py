"""The worker's end of its links: a synchronous socket for a busy loop, serving any number of routers."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterable
from typing import NewType

import zmq

from actors.errors import LinkError
from actors.links.codec import FrameError, pack, unpack
from actors.links.gate import Gate
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.settings import LinkSettings, milliseconds
from actors.links.stats import LinkStats
from actors.messages import Message

Peer = NewType("Peer", bytes)  # one connection of a client; a client that reconnects is another peer


class LinkServer:
    """Takes requests from routers and sends them answers, encrypted, on a TCP port that the system chooses.

    Anything but a message of an admitted client is dropped, counted in `stats` and never answered. Incoming requests
    queue up to `settings.queue_messages` for each client; beyond that, the client's sending fails. One thread may use
    `recv` and `send`; `allow` and `stats` belong to any thread.
    """

    def __init__(
        self,
        keys: LinkKeys,
        allowed_client_public_keys: Iterable[bytes],
        host: str = "127.0.0.1",
        settings: LinkSettings | None = None,
    ) -> None:
        """`host`: the IP address to bind and to tell clients. Raises LinkError if it cannot be bound."""
        self.stats = LinkStats()
        self._settings = settings or LinkSettings()
        host = bindable(host)
        self._context = zmq.Context()  # not shared: a context has one authentication handler
        self._socket = self._context.socket(zmq.ROUTER)
        self._gate: Gate | None = None
        self._recv_timeout_ms = -1
        self._closed = False
        try:
            self._settings.apply(self._socket)
            self._socket.ipv6 = host.startswith("[")
            self._socket.router_mandatory = True  # sending to a peer that has left is an error
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.secret
            self._gate = Gate(self._context, self._socket, allowed_client_public_keys, self.stats)
            self._socket.bind(f"tcp://{host}:*")
            endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"cannot listen on {host}: {error}") from None
        except BaseException:
            self.close()
            raise
        self.address = LinkAddress(endpoint, keys.public)

    def allow(self, client_public_keys: Iterable[bytes]) -> None:
        """Admit only these clients from now on. Open connections stay open."""
        assert self._gate is not None
        self._gate.allow(client_public_keys)

    def recv(self, timeout_s: float) -> tuple[Peer, Message] | None:
        """The next message and who sent it, or None after `timeout_s` seconds (0: only what is there)."""
        deadline = time.monotonic() + timeout_s
        remaining = timeout_s
        while True:
            self._set_recv_timeout(remaining)
            try:
                frames = self._socket.recv_multipart()
            except zmq.Again:
                return None
            read = self._read(frames)
            if read is not None:
                return read
            remaining = deadline - time.monotonic()  # garbage must not keep the loop busy
            if remaining < 0:
                return None

    def send(self, peer: Peer, message: Message) -> bool:
        """Queue an answer. False, and counted, if the peer has left or does not take its answers.

        Raises FrameError if the message itself cannot go on the wire, so that the worker can send `Failure` instead.
        """
        frame = pack(message, self._settings.max_frame_bytes)
        try:
            self._socket.send_multipart([peer, frame], zmq.DONTWAIT)
        except zmq.Again:
            self.stats.drop("full")
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise LinkError(f"cannot send on {self.address.endpoint}: {error}") from None
            self.stats.drop("gone")
            return False
        self.stats.sent += 1
        self.stats.sent_bytes += len(frame)
        return True

    def close(self) -> None:
        """Close every connection and end the gate's thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._socket.close(linger=0)
        self._context.term()
        if self._gate is not None:
            self._gate.join()

    def __enter__(self) -> LinkServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self, frames: list[bytes]) -> tuple[Peer, Message] | None:
        if len(frames) != 2:
            self.stats.drop("garbage")
            return None
        try:
            message = unpack(frames[1], self._settings.max_frame_bytes)
        except FrameError as error:
            self.stats.drop(error.reason)
            return None
        self.stats.received += 1
        self.stats.received_bytes += len(frames[1])
        return Peer(frames[0]), message

    def _set_recv_timeout(self, seconds: float) -> None:
        timeout_ms = milliseconds(seconds)
        if timeout_ms != self._recv_timeout_ms:
            self._socket.rcvtimeo = self._recv_timeout_ms = timeout_ms


def bindable(host: str) -> str:
    """The IP address as it stands in an endpoint. Raises LinkError if it is none, or a wildcard."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise LinkError(f"host is {host!r}; it must be an IP address of this node") from None
    if address.is_unspecified:
        raise LinkError(f"host is {host!r}; it must be an address that clients can reach, not a wildcard")
    return f"[{address}]" if address.version == 6 else str(address)

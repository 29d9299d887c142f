"""Ports for servers that tests start."""

import random
import socket

# Below the ports that systems hand out by themselves (from 32768), and above those of Ray's workers (to 19999): what is
# free now is not taken by a connection or a worker before the server listens.
_FIRST, _END = 20_000, 32_000

_given: set[int] = set()  # to servers that may not listen yet


def free_ports(count: int) -> list[int]:
    """Loopback ports on which nobody listens now, and which no call in this process has returned before."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(_FIRST, _END), _END - _FIRST):
        if len(ports) == count:
            break
        if port in _given:
            continue
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        _given.add(port)
    return ports

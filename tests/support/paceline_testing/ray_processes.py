"""The processes of a Ray that a test has started, as the system sees them."""

from contextlib import suppress

import psutil


def ray_processes(title: str) -> list[int]:
    """Ids of those whose title begins so, which for an actor is the name of its class; `ServeReplica:` and the names of
    application and deployment for a replica of Serve."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if " ".join(one.cmdline()).startswith(f"ray::{title}"):
                found.append(one.pid)
    return found

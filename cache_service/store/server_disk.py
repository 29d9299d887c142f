"""Rewriting a server's append-only file, in which deleted data stay until it is rewritten."""

from __future__ import annotations

import logging
import time
from typing import Any

from cache_service.errors import StoreError
from cache_service.store.answers import faults_told
from cache_service.store.connection import Connection

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02
_PATIENCE_S = 10.0


def forget_deleted(connection: Connection) -> bool:
    """Have a server rewrite its append-only file, so that deleted data are no longer on its disk.

    False, with a warning: it refuses, or has not finished within some seconds. Servers also rewrite the file by
    themselves when it has doubled in size.
    """
    deadline = time.monotonic() + _PATIENCE_S
    try:
        with faults_told():
            client: Any = connection.client()
            if not client.info("persistence")["aof_enabled"]:
                return True
            if _is_idle(client, deadline):  # a rewrite begun earlier may contain deleted data
                client.bgrewriteaof()
                if _is_idle(client, deadline):
                    return bool(client.info("persistence")["aof_last_bgrewrite_status"] == "ok")
    except StoreError as error:
        log.warning("what was deleted may stay on the disk of the cache's server for a while: %s", error)
        return False
    log.warning("what was deleted may stay on the disk of the cache's server for a while: it is busy with it")
    return False


def _is_idle(client: Any, deadline: float) -> bool:
    """Wait until no rewrite is running; False after the deadline."""
    while True:
        facts = client.info("persistence")
        if not facts["aof_rewrite_in_progress"] and not facts["aof_rewrite_scheduled"]:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)

"""A server's append-only file, in which whatever was deleted stays until it is written anew."""

from __future__ import annotations

import logging
import time
from typing import Any

from cache_service.errors import StoreError
from cache_service.store.answers import faults_told
from cache_service.store.connection import Connection

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02


def forget_deleted(connection: Connection, patience_s: float = 10.0) -> bool:
    """Have one server write its append-only file anew, so that what was deleted before is on its disk no more.

    False, with a warning: it cannot be asked, or has not done so within `patience_s`. It does by itself when the file
    has grown to twice its size.
    """
    deadline = time.monotonic() + patience_s
    try:
        with faults_told():
            client: Any = connection.client()
            if not client.info("persistence")["aof_enabled"]:
                return True
            if _is_idle(client, deadline):  # one that has begun before may write what has been deleted meanwhile
                client.bgrewriteaof()
                if _is_idle(client, deadline):
                    return bool(client.info("persistence")["aof_last_bgrewrite_status"] == "ok")
    except StoreError as error:
        log.warning("what was deleted may stay on the disk of the cache's server for a while: %s", error)
        return False
    log.warning("what was deleted may stay on the disk of the cache's server for a while: it is busy with it")
    return False


def _is_idle(client: Any, deadline: float) -> bool:
    """Wait until the file is not being written anew; false if that takes too long."""
    while True:
        facts = client.info("persistence")
        if not facts["aof_rewrite_in_progress"] and not facts["aof_rewrite_scheduled"]:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)

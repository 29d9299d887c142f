"""A worker's entry in the directory, renewed by a background thread."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from actors.links.heartbeat import Heartbeat
from actors.links.server import LinkServer
from actors.workers.directory import HeartbeatAnswer, WorkerEntry
from actors.workers.directory_contact import DirectoryContact
from actors.workers.model_changes import WantedModel

_TIMEOUT_S = 2.0  # of a call


class Registration:
    """Registers a worker at once and renews the entry every `interval_s` until `leave`.

    Where the directory has very many callers, it asks for longer intervals. It waits without limit for a directory that
    is away, restarting or replaced. Each heartbeat reports the messages that `server` has dropped; the answer has the
    clients that `server` must admit, and what the workers of its pool are to run: `wanted`, None until the first one.
    """

    def __init__(
        self,
        directory_name: str,
        entry: WorkerEntry,
        server: LinkServer,
        interval_s: float = 1.0,
    ) -> None:
        self._contact = DirectoryContact(directory_name)
        self._entry = entry
        self._server = server
        self._timeout_s = max(interval_s, _TIMEOUT_S)
        self.wanted: WantedModel | None = None
        self._intervals_left = 0  # until the entry is to be renewed
        self._renewing = threading.Lock()  # by one thread at a time: an older entry must not come after a newer one
        self._heartbeat = Heartbeat(self._beat, interval_s, f"registration of {entry.worker_id}")

    def announce_leaving(self) -> None:
        """Tell routers to send nothing more to this worker. It answers until they notice."""
        self.update(is_leaving=True)

    def update(self, **fields: Any) -> None:
        """Change fields of the entry, and tell the directory at once if it answers, else with the next heartbeat."""
        self._entry = replace(self._entry, **fields)
        with contextlib.suppress(RayError, ValueError):
            self._renew()

    def leave(self) -> None:
        """Stop renewing and remove the entry, so that routers need not wait for it to expire."""
        self._heartbeat.stop()
        with contextlib.suppress(RayError, ValueError):
            self._call("remove", self._entry.worker_id, self._entry.incarnation)

    def _beat(self) -> None:
        self._intervals_left -= 1
        if self._intervals_left <= 0:
            self._renew()

    def _renew(self) -> None:
        with self._renewing:
            self._intervals_left = 0  # if this fails
            entry = replace(self._entry, link_drops=tuple(dict(self._server.stats.dropped).items()))
            answer: HeartbeatAnswer = self._call("heartbeat", entry)
            self._contact.answered(answer.relay)
            self._server.allow(answer.clients)
            self.wanted, self._intervals_left = answer.wanted, answer.stretch

    def _call(self, method: str, *arguments: Any) -> Any:
        """Raises RayError, or ValueError if there is no directory."""
        used_relay = self._contact.uses_relay
        try:
            return self._call_once(method, *arguments)
        except RayError:
            if not used_relay or self._contact.uses_relay:
                raise
            return self._call_once(method, *arguments)  # of the directory; the next heartbeat might come too late

    def _call_once(self, method: str, *arguments: Any) -> Any:
        contact = self._contact.find()
        try:
            return ray.get(getattr(contact, method).remote(*arguments), timeout=self._timeout_s)
        except RayError as error:
            self._contact.failed(error)
            raise

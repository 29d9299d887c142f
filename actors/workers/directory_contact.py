"""Whom a worker or router calls: the directory, or the relay that it has named."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import ray
from ray.exceptions import ActorDiedError

from actors.errors import LinkError, Unavailable
from actors.workers.directory_actor import NAMESPACE, DirectoryHandle, RelayHandle, find_directory

_AVOIDED_S = 10.0  # that a relay is not called after it did not answer

Contact: TypeAlias = DirectoryHandle | RelayHandle


class DirectoryContact:
    """For one caller. A relay that does not answer is not called for a while. One that the directory does not answer is
    not called until the directory names it again. A directory that is gone for good is looked up anew."""

    def __init__(self, directory_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory_name = directory_name
        self._clock = clock
        self.found: Contact | None = None  # the one to call, as far as it is known
        self._directory: DirectoryHandle | None = None
        self._relay: str | None = None  # None: the directory itself
        self._avoided: tuple[str | None, float] = (None, 0.0)  # a relay, and until when

    def find(self) -> Contact:
        """The one to call. Blocking where it is not known. Raises ValueError if there is no directory."""
        if self.found is None and self._relay is not None:
            try:
                self.found = ray.get_actor(self._relay, namespace=NAMESPACE)
            except ValueError:
                self._avoid_relay()
        if self.found is None:
            self._directory = self.found = self._directory or find_directory(self._directory_name)
        return self.found

    @property
    def uses_relay(self) -> bool:
        return self._relay is not None

    def answered(self, relay: str | None) -> None:
        """relay: that the answer named."""
        avoided, until = self._avoided
        if relay == avoided and self._clock() < until:
            relay = None
        if relay != self._relay:
            self._relay, self.found = relay, None

    def failed(self, error: Exception) -> None:
        """The call, or `find`, has raised this."""
        if self._relay is not None:
            if isinstance(error, LinkError):  # the directory names the relay again when it hears from it
                self._relay = self.found = None
            elif not isinstance(error, Unavailable):  # else the directory is slow or restarting
                self._avoid_relay()
        elif isinstance(error, ActorDiedError):
            self._directory = self.found = None

    def _avoid_relay(self) -> None:
        self._avoided = self._relay, self._clock() + _AVOIDED_S
        self._relay = self.found = None

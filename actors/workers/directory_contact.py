"""Whom a worker or router calls: the directory, or the relay that it named last."""

from __future__ import annotations

from typing import TypeAlias

import ray
from ray.actor import ActorProxy
from ray.exceptions import ActorDiedError, RayTaskError

from actors.workers.directory_actor import NAMESPACE, DirectoryHandle, find_directory
from actors.workers.directory_relay import RelayActor

Contact: TypeAlias = DirectoryHandle | ActorProxy[RelayActor]


class DirectoryContact:
    """For one caller. A relay that cannot be called is left for the directory, which names another, or the same again.
    A directory that is gone for good is looked up anew."""

    def __init__(self, directory_name: str) -> None:
        self._directory_name = directory_name
        self._directory: DirectoryHandle | None = None
        self._relay: str | None = None
        self._found: Contact | None = None

    def directory(self) -> DirectoryHandle:
        """Blocking. Raises ValueError if there is none."""
        if self._directory is None:
            self._directory = find_directory(self._directory_name)
        return self._directory

    def find(self) -> Contact:
        """The one to call. Blocking when it has changed. Raises ValueError if there is no directory."""
        if self._found is None:
            try:
                self._found = None if self._relay is None else ray.get_actor(self._relay, namespace=NAMESPACE)
            except ValueError:
                self._relay = None
            self._found = self._found or self.directory()
        return self._found

    def answered(self, relay: str | None) -> None:
        """relay: that the answer named."""
        if relay != self._relay:
            self._relay, self._found = relay, None

    def failed(self, error: Exception) -> None:
        if self._relay is not None:
            if not isinstance(error, RayTaskError):  # the directory did not answer the relay
                self.answered(None)
        elif isinstance(error, ActorDiedError):
            self._directory = self._found = None

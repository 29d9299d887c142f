"""Who is there: the worker addresses of a cluster and the key by which its routers prove themselves.

A plain `Directory` inside one named Ray actor. Nothing in it is worth saving: the key pair is an argument of the
actor, so Ray hands the same one to every restart, and workers refill the registry with their next heartbeat. Should
a directory be made anew with another key, the answer to that heartbeat tells the workers' links. Established links
need no directory, so routers keep them while it is away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import ray
from ray.actor import ActorProxy

from actors.links.address import LinkAddress
from actors.links.keys import LinkKeys
from cluster.autoscaling.draft_demand import DraftDemand, combined

NAMESPACE = "paceline"
TTL_S = 4.0  # four missed heartbeats

Role = Literal["target", "draft"]


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One worker as the directory knows it. A restarted worker keeps its `worker_id` and has another `incarnation`."""

    role: Role
    worker_id: str
    address: LinkAddress
    incarnation: int
    link_drops: tuple[tuple[str, int], ...] = ()  # messages its link server has dropped so far, by reason
    is_leaving: bool = False  # it still answers, but is to be asked for nothing more


@dataclass(slots=True)
class _Record:
    entry: WorkerEntry
    heard_at: float
    previous_incarnation: int | None  # of the worker that this one replaced


class Directory:
    """The registry itself. Entries that are not renewed within `ttl_s` seconds vanish."""

    def __init__(
        self, client_keys: LinkKeys, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client_keys = client_keys
        self._ttl_s = ttl_s
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._demands: dict[str, tuple[DraftDemand, float]] = {}  # of routers, and when they said so

    def heartbeat(self, entry: WorkerEntry) -> tuple[bytes, ...]:
        """Enter or renew a worker; returns the public keys of clients that its links must admit.

        A worker that was replaced under its id cannot take the place back, should it turn out to live on.
        """
        self._expire()
        record = self._records.get(entry.worker_id)
        if record is None:
            self._records[entry.worker_id] = _Record(entry, self._clock(), None)
        elif record.entry.incarnation == entry.incarnation:
            record.entry, record.heard_at = entry, self._clock()
        elif record.previous_incarnation != entry.incarnation:
            self._records[entry.worker_id] = _Record(entry, self._clock(), record.entry.incarnation)
        return (self._client_keys.public,)

    def remove(self, worker_id: str, incarnation: int) -> None:
        """Take a worker out that leaves in order; unknown ones and those already replaced are fine."""
        record = self._records.get(worker_id)
        if record is not None and record.entry.incarnation == incarnation:
            del self._records[worker_id]

    def workers(self, role: Role | None = None) -> list[WorkerEntry]:
        """The live workers, of one role or all, ordered by id."""
        self._expire()
        entries = (record.entry for _, record in sorted(self._records.items()))
        return [entry for entry in entries if role is None or entry.role == role]

    def client_keys(self) -> LinkKeys:
        """The key pair that every router of the cluster uses."""
        return self._client_keys

    def tell_demand(self, router_id: str, demand: DraftDemand) -> None:
        """What a router says of the draft workers; it holds for `ttl_s` seconds."""
        self._demands[router_id] = demand, self._clock()

    def draft_demand(self) -> DraftDemand:
        """Of all routers that have spoken lately."""
        self._expire()
        return combined(demand for demand, _ in self._demands.values())

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl_s
        for worker_id in [worker_id for worker_id, record in self._records.items() if record.heard_at < oldest]:
            del self._records[worker_id]
        for router_id in [router_id for router_id, (_, told_at) in self._demands.items() if told_at < oldest]:
            del self._demands[router_id]


class DirectoryActor:
    """The actor around a `Directory`."""

    def __init__(self, client_keys: LinkKeys, ttl_s: float) -> None:
        self._directory = Directory(client_keys, ttl_s)

    @ray.method
    def heartbeat(self, entry: WorkerEntry) -> tuple[bytes, ...]:
        return self._directory.heartbeat(entry)

    @ray.method
    def remove(self, worker_id: str, incarnation: int) -> None:
        self._directory.remove(worker_id, incarnation)

    @ray.method
    def workers(self, role: Role | None = None) -> list[WorkerEntry]:
        return self._directory.workers(role)

    @ray.method
    def client_keys(self) -> LinkKeys:
        return self._directory.client_keys()

    @ray.method
    def tell_demand(self, router_id: str, demand: DraftDemand) -> None:
        self._directory.tell_demand(router_id, demand)

    @ray.method
    def draft_demand(self) -> DraftDemand:
        return self._directory.draft_demand()


DirectoryHandle: TypeAlias = ActorProxy[DirectoryActor]

_RemoteDirectory = ray.remote(DirectoryActor)


def get_or_create_directory(
    name: str, lifetime: Literal["detached"] | None = None, ttl_s: float = TTL_S
) -> DirectoryHandle:
    """The directory of that name; it is made if it does not exist. Safe to call from several processes at once.

    `lifetime` None: it ends with the process that made it.
    """
    options = _RemoteDirectory.options(
        name=name,
        namespace=NAMESPACE,
        lifetime=lifetime,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_pending_calls=64,  # of one caller; beyond, its calls fail at once
    )
    handle: DirectoryHandle = options.remote(LinkKeys.generate(), ttl_s)  # unused if it exists: its own keys count
    return handle


def find_directory(name: str) -> DirectoryHandle:
    """The existing directory of that name. Raises ValueError if there is none."""
    handle: DirectoryHandle = ray.get_actor(name, namespace=NAMESPACE)
    return handle

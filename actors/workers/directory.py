"""The registry of a cluster: worker addresses, the key pair of its routers, and which router has which target group.

A plain `Directory` inside one named Ray actor. A restart gets the same key pair, an argument of the actor, and the
what was set by hand, from Ray's store. Workers register again with their next heartbeat. If a new
directory has another key, the answer to that heartbeat tells the workers. Established links need no directory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec
import ray
from ray.actor import ActorProxy
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.links.keys import LinkAddress, LinkKeys
from actors.pool_names import FIRST_POOL
from actors.workers.demand import DraftDemand, TargetDemand, combined_drafts, combined_targets
from actors.workers.model_changes import ModelTurns, WantedModel

logger = logging.getLogger(__name__)

NAMESPACE = "paceline"
TTL_S = 4.0  # four missed heartbeats
_DEMAND_TIMEOUT_S = 2.0
_KEYS_TIMEOUT_S = 5.0
_KV_NAMESPACE = b"paceline"  # of Ray's own store

Demand = TypeVar("Demand")

Role = Literal["target", "draft"]


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One worker. After a restart it has the same `worker_id` and another `incarnation`."""

    role: Role
    worker_id: str
    address: LinkAddress
    incarnation: int
    link_drops: tuple[tuple[str, int], ...] = ()  # messages dropped by its link server so far, by reason
    is_leaving: bool = False  # it still answers, but must not be asked for more
    model: str = ""  # a target's fingerprint; what a draft worker's model is called
    pool: str = FIRST_POOL  # of a draft worker
    model_number: int = 0  # of a draft worker: `WantedModel.number` of the last one that it followed


class SetByHand(msgspec.Struct):
    """What `paceline scale` has set."""

    groups: int = 0  # number of target groups; 0: as the load asks for
    workers: dict[str, int] = {}  # number of draft workers by pool; 0: as the load asks for
    models: dict[str, WantedModel] = {}  # by pool


@dataclass(slots=True)
class _Record:
    entry: WorkerEntry
    heard_at: float
    previous_incarnation: int | None  # incarnation of the worker that this one replaced


@dataclass(slots=True)
class _Claim:
    worker_id: str
    renewed_at: float


class Directory:
    """Entries and claims expire if they are not renewed within `ttl_s` seconds."""

    def __init__(
        self,
        client_keys: LinkKeys,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
        is_restarted: bool = False,
    ) -> None:
        """is_restarted: workers and routers may hold claims of the previous directory."""
        self._client_keys = client_keys
        self._ttl_s = ttl_s
        self._clock = clock
        self._is_restarted = is_restarted
        self._filled_at = clock() + ttl_s  # by then all live workers and routers have reported
        self._records: dict[str, _Record] = {}
        self._claims: dict[str, _Claim] = {}  # by router id
        # By router id, with the time of arrival.
        self._demands: dict[str, tuple[Mapping[str, DraftDemand], TargetDemand | None, float]] = {}
        self._by_hand = SetByHand()
        self._turns = ModelTurns(ttl_s, clock)

    def heartbeat(self, entry: WorkerEntry) -> tuple[bytes, ...]:
        """Register or renew a worker. Returns the public keys of clients that its links must admit.

        A worker that was replaced under its id is ignored.
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
        """Remove a worker. Unknown and replaced workers are ignored."""
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

    def claim_target(self, router_id: str, held: str | None, model: str = "") -> str | None:
        """The target group of that model for the router, or None. No two routers have the same group.

        The router keeps its group while that is alive and not leaving. Otherwise it gets `held`, its group from before,
        if no other router has claimed it, or else a free one. In the first `ttl_s` seconds `held` is believed; after a
        restart of the directory, routers without a group wait so long.
        """
        self._expire()
        now = self._clock()
        claimed = {claim.worker_id for other, claim in self._claims.items() if other != router_id}
        if now < self._filled_at and held is not None and held not in claimed and not self._is_leaving(held):
            wanted: str | None = held
        elif now < self._filled_at and self._is_restarted:
            wanted = None
        else:
            own = self._claims.get(router_id)
            free = [
                entry.worker_id
                for entry in self.workers("target")
                if entry.model == model and not entry.is_leaving and entry.worker_id not in claimed
            ]
            preferred = [worker_id for worker_id in (own.worker_id if own else None, held) if worker_id in free]
            wanted = next(iter([*preferred, *free]), None)
        if wanted is None:
            self._claims.pop(router_id, None)
        else:
            self._claims[router_id] = _Claim(wanted, now)
        return wanted

    def release_target(self, router_id: str) -> None:
        """End the router's claim. Another router may claim the group at once."""
        self._claims.pop(router_id, None)

    def tell_demand(
        self, router_id: str, drafts: Mapping[str, DraftDemand], targets: TargetDemand | None = None
    ) -> None:
        """Store a router's demand on draft workers, by pool, and, if it has one, on its target group, for `ttl_s`
        seconds."""
        self._demands[router_id] = drafts, targets, self._clock()

    def hold(self, role: Role, number: int, pool: str = FIRST_POOL) -> None:
        """Set the number of draft workers of a pool, or of target groups, by hand. 0: as the load asks for."""
        if role == "target":
            self._by_hand.groups = number
        else:
            self._by_hand.workers[pool] = number

    def want_model(self, pool: str, spec: str) -> WantedModel:
        """Have a pool's workers run this model, one after the other. "": the model of the configuration."""
        wanted = WantedModel(spec, self.wanted_model(pool).number + 1)
        self._by_hand.models[pool] = wanted
        self._turns.forget_refusals(pool)
        return wanted

    def wanted_model(self, pool: str) -> WantedModel:
        return self._by_hand.models.get(pool, WantedModel())

    def take_turn(self, pool: str, worker: str, is_changing: bool = False) -> bool:
        """Whether this worker may change its model now: see `ModelTurns.take`. is_changing: it has the turn, and renews
        it. For `ttl_s` seconds after a restart of the directory, which knows of no turns, nobody else gets one."""
        if self._is_restarted and self._clock() < self._filled_at and not is_changing:
            return False
        return self._turns.take(pool, worker)

    def end_turn(self, pool: str, worker: str) -> None:
        self._turns.end(pool, worker)

    def refuse_model(self, pool: str, worker: str, number: int, reason: str) -> None:
        """The worker could not load the wanted model of that number, and keeps the one it has."""
        if number == self.wanted_model(pool).number:
            self._turns.refuse(pool, worker, reason)

    def refusals(self, pool: str) -> list[str]:
        """Why workers could not load the model that is wanted, one reason a worker."""
        return self._turns.refusals(pool)

    def draft_demand(self, pool: str = FIRST_POOL) -> DraftDemand:
        """Combined demand on a pool's workers of the routers that reported within `ttl_s`, and their number set by
        hand."""
        self._expire()
        told = combined_drafts(drafts[pool] for drafts, _, _ in self._demands.values() if pool in drafts)
        return replace(told, held=self._by_hand.workers.get(pool, 0))

    def target_demand(self) -> TargetDemand:
        """Combined demand of the routers that reported within `ttl_s` and have a target group, and the number set by
        hand."""
        self._expire()
        told = combined_targets(targets for _, targets, _ in self._demands.values() if targets is not None)
        return replace(told, held=self._by_hand.groups)

    def _is_leaving(self, worker_id: str) -> bool:
        record = self._records.get(worker_id)
        return record is not None and record.entry.is_leaving

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl_s
        self._records = {key: record for key, record in self._records.items() if record.heard_at >= oldest}
        self._claims = {key: claim for key, claim in self._claims.items() if claim.renewed_at >= oldest}
        self._demands = {key: told for key, told in self._demands.items() if told[2] >= oldest}


class DirectoryActor(Directory):
    """A `Directory` as an actor. Ray's own store keeps what was set by hand: nobody would say it again."""

    def __init__(self, client_keys: LinkKeys, ttl_s: float) -> None:
        is_restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        super().__init__(client_keys, ttl_s, is_restarted=is_restarted)
        stored = internal_kv._internal_kv_get(_by_hand_key(), namespace=_KV_NAMESPACE) if is_restarted else None
        if stored is not None:
            self._by_hand = msgspec.json.decode(stored, type=SetByHand)

    def hold(self, role: Role, number: int, pool: str = FIRST_POOL) -> None:
        super().hold(role, number, pool)
        self._keep()

    def want_model(self, pool: str, spec: str) -> WantedModel:
        wanted = super().want_model(pool, spec)
        self._keep()
        return wanted

    def _keep(self) -> None:
        internal_kv._internal_kv_put(_by_hand_key(), msgspec.json.encode(self._by_hand), namespace=_KV_NAMESPACE)

    def follow(self, router_id: str, held: str | None, model: str) -> tuple[list[WorkerEntry], str | None]:
        """Polled by routers: the live workers, and the target group assigned to the router."""
        return self.workers(), self.claim_target(router_id, held, model)


def _by_hand_key() -> bytes:
    return f"by-hand-{ray.get_runtime_context().get_actor_id()}".encode()


DirectoryHandle: TypeAlias = ActorProxy[DirectoryActor]

_RemoteDirectory = ray.remote(DirectoryActor)


def get_or_create_directory(
    name: str, lifetime: Literal["detached"] | None = None, ttl_s: float = TTL_S
) -> DirectoryHandle:
    """The directory of that name, created if it does not exist. Safe to call from several processes at once.

    `lifetime` None: it ends with the process that created it.
    """
    options = _RemoteDirectory.options(
        name=name,
        namespace=NAMESPACE,
        lifetime=lifetime,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_pending_calls=64,  # by one caller; further calls fail at once
        # Not on a node that comes and goes with the load.
        scheduling_strategy=NodeAffinitySchedulingStrategy(_head_node_id(), soft=True),
    )
    handle: DirectoryHandle = options.remote(LinkKeys.generate(), ttl_s)  # ignored if it exists
    return handle


def _head_node_id() -> str:
    """Id of Ray's head node, or of this node if Ray does not name its head."""
    heads = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
    return next(iter(heads), ray.get_runtime_context().get_node_id())


def find_directory(name: str) -> DirectoryHandle:
    """The existing directory of that name. Raises ValueError if there is none."""
    handle: DirectoryHandle = ray.get_actor(name, namespace=NAMESPACE)
    return handle


async def read_client_keys(name: str) -> LinkKeys:
    """The key pair of the clients of links. Raises ValueError if there is no directory of that name, TimeoutError or
    Ray's error if it does not answer."""
    directory = await asyncio.to_thread(find_directory, name)
    async with asyncio.timeout(_KEYS_TIMEOUT_S):
        keys: LinkKeys = await directory.client_keys.remote()
    return keys


class DemandReader(Generic[Demand]):
    """Reads the routers' demand from the directory of that name, which is looked up again after a failure."""

    def __init__(self, directory_name: str, ask: Callable[[DirectoryHandle], Awaitable[Demand]]) -> None:
        self._directory_name = directory_name
        self._ask = ask
        self._directory: DirectoryHandle | None = None

    async def read(self) -> Demand | None:
        """None while the directory does not answer."""
        try:
            directory = self._directory or await asyncio.to_thread(find_directory, self._directory_name)
            self._directory = directory
            async with asyncio.timeout(_DEMAND_TIMEOUT_S):
                return await self._ask(directory)
        except (RayError, ValueError, TimeoutError) as error:
            logger.warning("the directory did not say what routers want of workers: %r", error)
            self._directory = None
            return None

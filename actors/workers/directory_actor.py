"""The directory as a named actor of Ray, with relays as its callers grow many."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal, TypeAlias

import msgspec
import ray
from ray.actor import ActorProxy
from ray.exceptions import ActorDiedError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.links.keys import LinkKeys
from actors.pool_names import FIRST_POOL
from actors.workers.directory import MOST_CALLERS, TTL_S, Asked, Directory, Kept, Relayed, Role, WorkerEntry
from actors.workers.directory_relay import Relay
from actors.workers.model_changes import WantedModel

logger = logging.getLogger(__name__)

NAMESPACE = "paceline"
_MOST_CALLS = 8192  # at a time; most of them wait
_KEYS_TIMEOUT_S = 5.0
_RUN_AGAIN_S = 1.0  # after a failure of a relay itself
_KV_NAMESPACE = b"paceline"  # of Ray's own store


class DirectoryActor(Directory):
    """A `Directory` as an actor. Numbers set by hand are kept in Ray's key-value store, because no process would send
    them again."""

    def __init__(self, client_keys: LinkKeys, ttl_s: float, most_callers: int) -> None:
        is_restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        super().__init__(client_keys, ttl_s, is_restarted=is_restarted, most_callers=most_callers)
        stored = internal_kv._internal_kv_get(_kept_key(), namespace=_KV_NAMESPACE) if is_restarted else None
        if stored is not None:
            self._kept = msgspec.json.decode(stored, type=Kept)
            self._filled_at += ttl_s * (self._kept.stretch - 1)

    def hold(self, role: Role, number: int, pool: str = FIRST_POOL) -> None:
        super().hold(role, number, pool)
        self._keep()

    def want_model(self, pool: str, spec: str) -> WantedModel:
        wanted = super().want_model(pool, spec)
        self._keep()
        return wanted

    def refuse_model(self, pool: str, worker: str, number: int, reason: str) -> None:
        super().refuse_model(pool, worker, number, reason)
        self._keep()

    def _change_stretch(self, stretch: int) -> None:
        super()._change_stretch(stretch)
        self._keep()

    def _make_relays(self, number: int) -> None:
        """Relays outlive a restart of the directory, and end with it."""
        try:
            directory, options = find_directory(ray.get_runtime_context().get_actor_name()), _actor_options()
            for name in map(self._relay_name, range(self._kept.relays, number)):
                _RemoteRelay.options(name=name, lifetime="detached", **options).remote(name, directory)
            super()._make_relays(number)
            self._keep()
        except Exception as error:  # of Ray's store; callers call less often meanwhile
            logger.warning("the directory could not make relays: %r", error)

    def _relay_name(self, number: int) -> str:
        return f"{super()._relay_name(number)}-{ray.get_runtime_context().get_actor_id()}"

    def _keep(self) -> None:
        internal_kv._internal_kv_put(_kept_key(), msgspec.json.encode(self._kept), namespace=_KV_NAMESPACE)


def _kept_key() -> bytes:
    return f"kept-{ray.get_runtime_context().get_actor_id()}".encode()


DirectoryHandle: TypeAlias = ActorProxy[DirectoryActor]


class _Upstream:
    """The directory's actor for a relay of that name."""

    def __init__(self, name: str, directory: DirectoryHandle) -> None:
        self._name = name
        self._directory = directory

    async def relayed(self, entries: list[WorkerEntry], questions: list[Asked]) -> Relayed:
        return await self._directory.relayed.remote(self._name, entries, questions)

    async def remove(self, worker_id: str, incarnation: int) -> None:
        await self._directory.remove.remote(worker_id, incarnation)

    async def release_target(self, router_id: str) -> None:
        await self._directory.release_target.remote(router_id)


class RelayActor(Relay):
    """A relay as an actor, which ends when its directory is gone for good."""

    def __init__(self, name: str, directory: DirectoryHandle) -> None:
        super().__init__(_Upstream(name, directory))
        self._name = name
        self._running = asyncio.get_running_loop().create_task(self._run_to_the_end())

    async def _run_to_the_end(self) -> None:
        while True:
            try:
                await self.run()
            except ActorDiedError:
                ray.kill(ray.get_actor(self._name, namespace=NAMESPACE))
                return
            except Exception:
                logger.exception("a relay of the directory failed")
                await asyncio.sleep(_RUN_AGAIN_S)


RelayHandle: TypeAlias = ActorProxy[RelayActor]

_RemoteDirectory = ray.remote(DirectoryActor)
_RemoteRelay = ray.remote(RelayActor)


def get_or_create_directory(
    name: str,
    lifetime: Literal["detached"] | None = None,
    ttl_s: float = TTL_S,
    most_callers: int = MOST_CALLERS,
) -> DirectoryHandle:
    """The directory of that name, created if it does not exist. Safe to call from several processes at once.

    `lifetime` None: it ends with the process that created it.
    """
    options = _RemoteDirectory.options(name=name, lifetime=lifetime, **_actor_options())
    handle: DirectoryHandle = options.remote(LinkKeys.generate(), ttl_s, most_callers)  # ignored if it exists
    return handle


def _actor_options() -> dict[str, Any]:
    return {
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": _MOST_CALLS,
        "max_pending_calls": 64,  # by one caller; further calls fail at once
        # Not on a node that comes and goes with the load.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(_head_node_id(), soft=True),
    }


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

"""Serve's request router, with replicas that say what routers say, and the announcers and the directory's key."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve.request_router import PendingRequest, RunningReplica

from actors.links.keys import LinkKeys
from actors.messages import GenerationRequest, SamplingParams
from cluster.routing import policy as policy_module
from cluster.routing.announcer import Announcer
from cluster.routing.heard_statuses import heard_statuses
from cluster.routing.policy import ENDPOINT, PUBLIC_KEY, READY, ROUTER_ID, SoonestFirst
from cluster.routing.prefix_blocks import BLOCK_TOKENS, prefix_blocks
from cluster.routing.publisher import Publisher
from cluster.routing.router_status import RouterStatus
from paceline_testing.router_loads import IDLE

DEPLOYMENT = DeploymentID(name="Router", app_name="paceline")
DIRECTORY = "the directory of these tests"


class Replica:
    def __init__(self, announcer: Announcer | None = None, router_id: str = "", *, is_ready: bool = True) -> None:
        self.replica_id = object()
        self.routing_stats: dict[str, Any] = {READY: is_ready, ROUTER_ID: router_id}
        if announcer is not None:
            address = announcer._publisher.address
            self.routing_stats |= {ENDPOINT: address.endpoint, PUBLIC_KEY: address.server_public_key}


class Pending:
    def __init__(self, *args: Any) -> None:
        self.routing_context = RequestRoutingContext()
        self.args = list(args)


def request(tokens: np.ndarray) -> GenerationRequest:
    sampling = SamplingParams(seed=0, temperature=0.0)
    return GenerationRequest(request_id="r", prompt_token_ids=tokens, sampling=sampling, max_new_tokens=1)


@pytest.fixture
def keys() -> LinkKeys:
    return LinkKeys.generate()


@pytest.fixture
async def announcers(keys: LinkKeys) -> AsyncIterator[list[Announcer]]:
    made = [Publisher([keys.public], "127.0.0.1") for _ in "abc"]
    yield [Announcer(name, publisher) for name, publisher in zip("abc", made, strict=True)]
    for publisher in made:
        publisher.close()


async def keys_of(name: str, answer: LinkKeys | Exception) -> LinkKeys:
    """Handles of clusters that this process has tested ask, too, for as long as it lives: they wait."""
    if name != DIRECTORY:
        await asyncio.sleep(600.0)
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
async def policy(keys: LinkKeys, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SoonestFirst]:
    async def read_client_keys(name: str) -> LinkKeys:
        return await keys_of(name, keys)

    monkeypatch.setattr(policy_module, "read_client_keys", read_client_keys)
    one = SoonestFirst.__new__(SoonestFirst)
    one.initialize_state(directory_name=DIRECTORY)
    yield one
    if one._asking is not None:
        one._asking.cancel()
    if one._listener is not None:  # its socket must not outlive the test's event loop
        one._listener.close()


async def test_as_long_as_nothing_is_known_those_that_are_ready_come_first_and_in_no_fixed_order(policy):
    ready = [Replica(router_id=name) for name in "abc"]
    others = [Replica(router_id="d", is_ready=False), Replica(is_ready=False)]
    first = Counter[int]()
    for _ in range(200):
        pending = Pending(request(np.zeros(9, np.int32)))
        ranks = await policy.choose_replicas([*others, *ready], pending)
        assert [set(rank) for rank in ranks] == [set(ready), set(others)]
        assert pending.routing_context.should_backoff
        first[ready.index(ranks[0][0])] += 1
    assert set(first) == {0, 1, 2}
    assert [set(rank) for rank in await policy.choose_replicas([*others, *ready], Pending())] == [
        set(ready),
        set(others),
    ]
    assert await policy.choose_replicas(others) in ([[], others], [[], others[::-1]])
    assert await policy.choose_replicas([]) == [[], []]


async def test_routers_of_before_an_upgrade_which_do_not_say_who_they_are_are_all_used(policy):
    replicas = [Replica() for _ in "abc"]
    (rank, _) = await policy.choose_replicas(replicas, Pending(request(np.zeros(9, np.int32))))
    assert set(rank) == set(replicas)


async def test_a_gateway_asks_for_the_key_until_it_has_it(policy, keys, monkeypatch):
    answers = [ConnectionError("Ray is not reached"), keys]

    async def read_client_keys(name: str) -> LinkKeys:
        return await keys_of(name, answers.pop(0) if name == DIRECTORY else keys)

    monkeypatch.setattr(policy_module, "read_client_keys", read_client_keys)
    monkeypatch.setattr(policy_module, "_ASK_AGAIN_S", 0.0)
    async with asyncio.timeout(10):
        while policy._listener is None:
            await policy.choose_replicas([])
            await asyncio.sleep(0)


async def test_a_prompt_goes_to_the_router_that_says_it_knows_it(policy, announcers):
    replicas = [Replica(announcer, name) for announcer, name in zip(announcers, "abc", strict=True)]
    standby = Replica(router_id="d", is_ready=False)
    prompt = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    announcers[1].announce(IDLE, 100 * BLOCK_TOKENS)
    announcers[1].use(prefix_blocks(prompt, ""), "")

    async def ranks_of(tokens: np.ndarray) -> list[list[Replica]]:
        found: Any = await policy.choose_replicas([*replicas, standby], Pending(request(tokens)))  # type: ignore[arg-type,list-item]
        return found

    async with asyncio.timeout(20):
        # Whoever is heard first gets these, and is taken to know them. News that are sent while a gateway connects have
        # no blocks yet.
        heard = policy._known._heard.by_id
        while len(await ranks_of(prompt[:1])) < 4 or "b" not in heard or len(heard["b"].warm) < 4:
            for announcer in announcers:
                announcer.announce(IDLE, 100 * BLOCK_TOKENS)
            await asyncio.sleep(0.02)
    longer = np.concatenate([prompt, prompt])
    ranks = await ranks_of(longer)
    assert ranks[0] == [replicas[1]]
    assert ranks[-1] == [standby]
    assert [len(rank) for rank in ranks] == [1, 1, 1, 1]
    replicas[1].routing_stats[READY] = False  # it drains: the warmth is lost, and nothing else
    assert [set(rank) for rank in await ranks_of(longer)][-1] == {replicas[1], standby}


class Listed(Replica):
    """As Serve lists it."""

    max_ongoing_requests = 100
    node_id = availability_zone = ""

    def __init__(self, name: str, announcer: Announcer | None = None) -> None:
        super().__init__(announcer, router_id=name)
        self.replica_id = ReplicaID(name, DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(0.001)
        return 0


async def test_all_calls_of_one_http_request_are_routed(keys, monkeypatch):
    """Those for its `n` answers are made at once, and have Serve's id of the HTTP request."""

    async def read_client_keys(name: str) -> LinkKeys:
        raise TimeoutError("the directory does not answer")

    monkeypatch.setattr(policy_module, "read_client_keys", read_client_keys)
    policy = SoonestFirst(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    policy.initialize_state(directory_name="the directory")
    replicas: Any = [Listed("a"), Listed("b")]
    policy.update_replicas(replicas)

    async def routed() -> RunningReplica:
        metadata = RequestMetadata(request_id="r", internal_request_id="of the HTTP request")
        pending = PendingRequest([request(np.zeros(9, np.int32))], {}, metadata)
        return await policy._choose_replica_for_request(pending)

    async with asyncio.timeout(10):
        chosen = await asyncio.gather(*(routed() for _ in range(6)))
    assert set(chosen) <= set(replicas)
    policy._asking.cancel()  # type: ignore[union-attr]


async def test_routers_are_heard_before_the_first_request(keys, announcers, monkeypatch):
    async def read_client_keys(name: str) -> LinkKeys:
        return keys

    monkeypatch.setattr(policy_module, "read_client_keys", read_client_keys)
    policy = SoonestFirst(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    policy.initialize_state(directory_name="another directory")
    known = heard_statuses("another directory")
    replicas: Any = [Listed(name, announcer) for announcer, name in zip(announcers, "abc", strict=True)]
    policy.update_replicas(replicas)
    statuses = [RouterStatus(ready=True, live=True, detail=name) for name in "abc"]
    async with asyncio.timeout(20):
        while (heard := known.current(time.monotonic())) is None:
            for announcer, status in zip(announcers, statuses, strict=True):
                announcer.announce(IDLE, 100 * BLOCK_TOKENS, status)
            await asyncio.sleep(0.02)
        assert sorted(status.detail for status in heard) == ["a", "b", "c"]
        assert set(known.addresses) == {"a", "b", "c"}
        changed = RouterStatus(ready=False, live=True, detail="draining")
        announcers[0].announce(None, 100 * BLOCK_TOKENS, changed)
        while changed not in (known.current(time.monotonic()) or []):  # noqa: ASYNC110 (it is told by a socket)
            await asyncio.sleep(0.02)
    policy.update_replicas(replicas[:2])
    assert set(known.addresses) == {"a", "b"}
    policy.update_replicas([*replicas[:2], Listed("d")])  # it has not said where it is heard
    assert known.current(time.monotonic()) is None
    assert policy._listener is not None
    policy._listener.close()

"""A gateway before several routers: what all of them say together."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import PendingCallsLimitExceeded, RayActorError

from actors.errors import Overloaded, RouterLost, Unavailable
from actors.links.keys import LinkAddress, LinkKeys
from actors.messages import GenerationRequest, Refusal
from cluster.gateway import router_client as asking
from cluster.gateway.router_client import RouterClient, ask_all, status_of_all
from cluster.router.deployment import Router
from cluster.routing.heard_statuses import HeardStatuses
from cluster.routing.router_status import RouterStatus
from paceline_testing.rounds import toy_request


def status(ready: bool, live: bool = True, detail: str = "", max_model_len: int | None = None) -> RouterStatus:
    return RouterStatus(ready=ready, live=live, detail=detail, max_model_len=max_model_len)


def test_routers_are_ready_if_one_is_and_dead_if_all_are():
    alone = status(True, detail="2 draft workers", max_model_len=64)
    assert status_of_all([alone]) == alone
    standing_by = status(False, detail="standing by for a target group")
    together = status_of_all([standing_by, alone, status(True, detail="2 draft workers", max_model_len=48)])
    assert (together.ready, together.live, together.max_model_len) == (True, True, 48)
    assert together.detail == "2 of 3 routers ready: 2 draft workers; standing by for a target group"
    dead = status(False, live=False, detail="rounds have stopped", max_model_len=64)
    assert (status_of_all([dead, standing_by]).ready, status_of_all([dead, standing_by]).live) == (False, True)
    assert not status_of_all([dead, dead]).live
    assert status_of_all([dead, alone]).ready


class Handle:
    """A deployment handle whose replicas answer as they are told."""

    def __init__(self, *answers: Callable[[], Any]) -> None:
        self._answers = answers

    def options(self, **_: Any) -> "Handle":
        return self

    def broadcast(self, method: str) -> "Handle":
        return self

    async def _fetch_replica_results_async(self) -> list[Any]:
        if not self._answers:
            raise RouterLost("none is there")
        return [Reply(answer) for answer in self._answers]


class Reply:
    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        return await self._answer()


def says(value: Any, after_s: float = 0.0) -> Callable[[], Any]:
    async def answer() -> Any:
        await asyncio.sleep(after_s)
        if isinstance(value, BaseException):
            raise value
        return value

    return answer


async def test_one_that_hangs_or_fails_keeps_no_other_from_answering(monkeypatch):
    monkeypatch.setattr(asking, "_STRAGGLERS_S", 0.05)
    handle = Handle(says(1), says(2, after_s=3600.0), says(RouterLost("gone")), says(4))
    answers, missing = await ask_all(handle, "status", 30.0)
    assert (sorted(answers), missing) == ([1, 4], 2)
    stopped = asyncio.CancelledError()  # so Serve tells the end of a replica
    answers, missing = await ask_all(Handle(says(1), says(stopped), says(4)), "status", 30.0)
    assert (sorted(answers), missing) == ([1, 4], 1)
    with pytest.raises(Unavailable, match="stopped"):
        await ask_all(Handle(says(stopped)), "status", 30.0)
    assert await ask_all(Handle(says(1, after_s=3600.0)), "status", 0.05) == ([], 1)
    with pytest.raises(RouterLost, match="gone"):
        await ask_all(Handle(says(RouterLost("gone"))), "status", 30.0)


async def test_a_client_of_several_routers_speaks_of_them_as_one(monkeypatch):
    ready, waiting = status(True), status(False)
    client = RouterClient(Handle(says(waiting), says(ready)))
    assert (await client.status()).ready
    monkeypatch.setattr(asking, "_STRAGGLERS_S", 0.0)  # whoever stands by answers at once, whoever serves is busy
    client = RouterClient(Handle(says(waiting), says(ready, after_s=0.1)))
    assert (await client.status()).ready
    busy = RouterClient(Handle(says(("a", "")), says(("b", "# TYPE x gauge\nx 2.0\n"), after_s=0.1)))
    assert await busy.metrics_text()
    monkeypatch.undo()
    pages = RouterClient(Handle(says(("a", "# TYPE x gauge\nx 1.0\n")), says(("b", "# TYPE x gauge\nx 2.0\n"))))
    text = await pages.metrics_text()
    assert 'x{router="a"} 1.0' in text
    assert 'x{router="b"} 2.0' in text
    assert text.endswith("paceline_metrics_missing_routers 0\n")
    with pytest.raises(RouterLost, match="no router answered"):
        await RouterClient(Handle(says(ready, after_s=3600.0)), status_timeout_s=0.05).status()
    with pytest.raises(Unavailable):
        await RouterClient(Handle()).status()
    with pytest.raises(RouterLost, match="no router is running: it is starting, or it has ended"):
        await RouterClient(Handle(says(RayActorError()))).status()


class Refusing(Handle):
    """Notes the requests, and refuses them."""

    def __init__(self, *answers: Callable[[], Any]) -> None:
        super().__init__(*answers)
        self.asked: list[GenerationRequest] = []

    def remote(self, request: GenerationRequest) -> Any:
        self.asked.append(request)
        raise Overloaded("full", 1.0)


@pytest.mark.parametrize(
    ("told", "asks_another"),
    [
        ([says(status(True)), says(status(True))], True),
        ([says(status(True)), says(status(False)), says(RouterLost("gone"))], True),  # it may serve
        ([says(status(True)), says(status(False)), says(status(False))], False),
        ([says(status(True))], False),
    ],
)
async def test_another_router_is_asked_only_where_another_one_serves(told, asks_another):
    handle = Refusing(*told)
    client = RouterClient(handle, num_routers=8)
    await client.status()
    for refusal in (None, Refusal("a", 1.0)):
        request = msgspec.structs.replace(toy_request(), refusal=refusal)
        with pytest.raises(Overloaded):
            await anext(client.generate(request))
    assert [one.asks_another for one in handle.asked] == [asks_another, False]


def test_a_router_that_stops_does_not_mind_a_directory_that_takes_no_more_calls():
    def refuse(router_id: str) -> None:
        raise PendingCallsLimitExceeded("64 calls wait")

    directory = SimpleNamespace(release_target=SimpleNamespace(remote=refuse))
    contact = SimpleNamespace(find=lambda: directory)
    router: Any = SimpleNamespace(_has_left=False, _contact=contact, _router_id="r")
    Router._leave_group(router)
    assert router._has_left


async def test_the_status_does_not_wait_for_the_directory_which_is_asked_once_at_a_time():
    asked = 0
    answers = asyncio.Event()

    async def client_keys() -> LinkKeys:
        nonlocal asked
        asked += 1
        await answers.wait()
        if asked == 1:
            raise TimeoutError("the directory does not answer")
        return LinkKeys.generate()

    address = LinkAddress("tcp://127.0.0.1:9", LinkKeys.generate().public)
    told = msgspec.structs.replace(status(True), told_by=("a", address))
    client = RouterClient(Handle(says(told)), client_keys=client_keys)
    async with asyncio.timeout(10):
        await asyncio.gather(*(client.status() for _ in range(3)))
        assert (asked, client._receiver) == (1, None)
        answers.set()
        while client._receiver is None:
            await client.status()
    assert asked == 2
    client._receiver.close()


class ManyRouters(Handle):
    """A single call goes to one of them, as Serve chooses."""

    def __init__(self, *answers: Callable[[], Any]) -> None:
        super().__init__(*answers)
        self.broadcasts, self.calls = 0, 0

    def broadcast(self, method: str) -> Handle:
        self.broadcasts += 1
        return self

    async def remote(self) -> Any:
        self.calls += 1
        return await self._answers[0]()


async def test_of_many_routers_one_is_asked_in_between_and_all_where_it_is_not_ready():
    answers = [says(status(True)) for _ in range(100)]
    many = ManyRouters(*answers)
    client = RouterClient(many, num_routers=100)
    for _ in range(5):
        assert (await client.status()).ready
    assert (many.broadcasts, many.calls) == (1, 4)
    assert await client.metrics_text() == asking.missing_text("routers", 100)
    assert many.broadcasts == 1
    waiting = ManyRouters(says(status(False)), *answers)
    client = RouterClient(waiting, num_routers=100)
    for _ in range(2):
        assert (await client.status()).detail.startswith("100 of 101")
    assert (waiting.broadcasts, waiting.calls) == (2, 1)


async def test_whoever_stops_asking_one_of_many_routers_is_not_made_to_ask_all():
    many = ManyRouters(says(status(True), after_s=3600.0), *[says(status(True)) for _ in range(99)])
    client = RouterClient(many, num_routers=100)
    client._all_asked_at = time.monotonic()
    asking_now = asyncio.create_task(client.status())
    await asyncio.sleep(0)
    assert many.calls == 1
    asking_now.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking_now
    assert many.broadcasts == 0


@pytest.mark.parametrize("num_routers", [2, 100])
async def test_routers_that_are_heard_are_not_asked(num_routers):
    names = [f"router-{number}" for number in range(num_routers)]
    handle, heard = ManyRouters(*[says(status(True)) for _ in names]), HeardStatuses()
    public_key = LinkKeys.generate().public
    client = RouterClient(handle, num_routers=num_routers, heard=heard)
    addresses = {name: LinkAddress(f"tcp://127.0.0.1:{9 + number}", public_key) for number, name in enumerate(names)}
    assert (await client.status()).ready
    assert handle.broadcasts == 1  # nobody is heard yet
    heard.follow(addresses, num_routers)
    for name in names:
        heard.hear(name, status(name == names[0], detail="told", max_model_len=48), time.monotonic())
    for _ in range(3):
        told = await client.status()
        assert (told.ready, told.max_model_len) == (True, 48)
    assert (handle.broadcasts, handle.calls) == (1, 0)
    assert client._num_serving == 1
    assert client._heard.keys() == addresses.keys()
    heard.follow(addresses, num_routers + 1)  # a new one is not heard yet
    assert (await client.status()).ready
    assert handle.broadcasts + handle.calls == 2

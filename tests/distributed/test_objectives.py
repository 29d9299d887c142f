"""Two real routers: what one cannot answer in time, the other is asked for, their statuses are heard unasked, and a
scraper finds their metrics at the agent of the Ray node."""

from __future__ import annotations

import asyncio
import itertools
import time

import httpx
import msgspec
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.handle import DeploymentHandle

from actors.errors import ObjectiveUnreachable
from actors.messages import GenerationRequest, Refusal
from cluster import serve as serve_module
from cluster.config import ClusterConfig
from cluster.gateway import deployment as gateway_deployment
from cluster.gateway.resume import generate_unbroken
from cluster.gateway.router_client import RouterClient, ask_all, status_of_all
from cluster.ray_names import APPLICATION, DIRECTORY
from cluster.routing.heard_statuses import heard_statuses
from paceline_testing.deployed import deployed, wait_for
from paceline_testing.rounds import toy_request
from paceline_testing.scraped import value_of, values_of
from paceline_testing.tiny_models import save_tiny_model

# Which router is asked and what refusals become are tested without Ray in tests/unit/cluster/{gateway,router,routing}.
# That the page of many routers leaves their figures to the nodes, only the test here shows.
pytestmark = pytest.mark.slow

LONG = 60_000  # tokens, which outlast the test: attention alone takes minutes
WARM = 100  # tokens of first answers
WITHIN_S = 100.0
HELD = ("paceline_sequences_waiting", "paceline_sequences_running")
REFUSED = ("paceline_objective_refusals_total",)
GENERATED = "paceline_generation_tokens_total"
TOLD_ROUTERS = 33

_numbers = itertools.count()


@pytest.fixture(scope="module")
def routers(ray_here, ports, tmp_path_factory):
    """The processes are told that there are more of their kind than one page of metrics shows: so many would not fit
    here."""
    model = save_tiny_model(
        tmp_path_factory.mktemp("target"), "llama", 5, layers=4, hidden_size=96, max_positions=65_536
    )
    target = {"model": str(model), "device": "cpu", "kv_cache_tokens": 65_536, "groups": 2}
    config = ClusterConfig.model_validate(
        {
            "target": target,
            "draft": {"model": "none"},
            "speculation": {"drafters": ["none"]},
            "router": {"max_running": 1, "objectives": {"interactive": {"ttft_s": 1.0}}},
            "gateway": ports,
            "cache": {"url": "none"},
        }
    )
    application = serve_module.gateway_application
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_module, "MOST_ON_PAGE", 0)
        patch.setattr(gateway_deployment, "MOST_ON_PAGE", 0)
        many = {"num_routers": TOLD_ROUTERS}
        patch.setattr(serve_module, "gateway_application", lambda *given, **more: application(*given, **more | many))
        # A busy router may say late how many requests it has: by default Serve gives the request to another one then.
        patch.setattr(RequestRouter, "queue_len_response_deadline_s", 10.0)
        with deployed(config):
            # Serve's function for handles returns one of an earlier test, which had another policy for its routers.
            yield DeploymentHandle("Router", APPLICATION)


class FirstAsks(RouterClient):
    """Its first request goes to a router that it did not choose."""

    def __init__(self, handle, others: Refusal) -> None:
        super().__init__(handle, num_routers=2)
        self._others = others
        self._routers, self._generate = self._generate, self
        self.asked = []

    def remote(self, request: GenerationRequest):
        self.asked.append(request)
        if len(self.asked) == 1:
            request = msgspec.structs.replace(request, refusal=self._others)
        return self._routers.remote(request)


def question(tokens, **fields):
    return toy_request(f"r{next(_numbers)}", max_new_tokens=tokens, **fields)


async def pages_of(handle):
    """Metrics by router."""
    while True:
        pages, missing = await ask_all(handle, "own_metrics", 20.0, lambda page: False)
        if len(pages) == 2 and not missing:
            return dict(pages)


def sum_of(page, names):
    return sum(value_of(page, name) for name in names)


async def reach(handle, router_id, others: Refusal):
    """Until requests come to this router: a gateway hears that one is ready some seconds after it is."""
    client = RouterClient(handle, num_routers=2)
    while True:
        _ = [chunk async for chunk in client.generate(question(WARM, refusal=others))]
        if value_of((await pages_of(handle))[router_id], "paceline_emitted_tokens_total") >= WARM:
            return


async def fill(handle, router_id, others: Refusal, streams):
    """Send long requests until this router refuses one; returns the refusal. Serve gives a request to the other one
    where this one does not say in time how many it has: such a request is taken back."""
    client = RouterClient(handle, num_routers=2)
    while True:
        expected = {one: sum(router == one for router, *_ in streams) for one in await by_router(handle, HELD)}
        if await by_router(handle, HELD) != expected:  # one that was taken back is still there
            await asyncio.sleep(0.1)
            continue
        refused_before = await by_router(handle, REFUSED)
        chunks = client.generate(question(LONG, refusal=others))
        first = asyncio.create_task(anext(chunks))
        came, refused = set(), set()
        while not (came or refused):
            await asyncio.sleep(0.1)
            came = more(await by_router(handle, HELD), expected)
            refused = more(await by_router(handle, REFUSED), refused_before)
        if came == {router_id}:
            streams.append((router_id, first, chunks))
        elif refused == {router_id}:
            with pytest.raises(ObjectiveUnreachable) as raised:
                await first
            return raised.value
        else:
            await end(first, chunks)


async def by_router(handle, names):
    return {one: sum_of(page, names) for one, page in (await pages_of(handle)).items()}


def more(after, before):
    return {one for one, value in after.items() if value > before[one]}


async def end(first, chunks):
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await chunks.aclose()


class CountsStatusCalls:
    """The routers' handle as a gateway has it."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._handle = DeploymentHandle("Router", APPLICATION)

    def options(self, **given):
        self.num_calls += given.get("method_name") == "status"
        return self._handle.options(**given)

    def broadcast(self, method):
        self.num_calls += method == "status"
        return self._handle.broadcast(method)


async def test_the_status_of_routers_is_heard_and_not_asked_for(routers):
    async with asyncio.timeout(WITHIN_S):
        while True:
            asked = status_of_all((await ask_all(routers, "status", 10.0, lambda status: False))[0])
            if asked.detail.startswith("2 of 2"):
                break
            await asyncio.sleep(0.5)
        handle, heard = CountsStatusCalls(), heard_statuses(DIRECTORY)
        client = RouterClient(handle, num_routers=2, heard=heard)
        while heard.current(time.monotonic()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for _ in range(30):  # three times as long as a status is news
            assert await client.status() == asked
            await asyncio.sleep(0.1)
        assert handle.num_calls == 0


async def test_a_request_that_one_router_refuses_is_answered_by_another_or_refused_once(routers):
    async with asyncio.timeout(WITHIN_S):
        await refused_by_one_then_by_both(routers)


async def refused_by_one_then_by_both(routers):
    while True:
        statuses, _ = await ask_all(routers, "status", 10.0)
        if len(statuses) == 2 and all(status.ready for status in statuses):
            break
        await asyncio.sleep(0.5)
    busy, free = (Refusal(status.told_by[0], 1000.0) for status in statuses)

    await reach(routers, busy.router_id, others=free)
    await reach(routers, free.router_id, others=busy)
    streams = []
    try:
        error = await fill(routers, busy.router_id, free, streams)
        assert not error.router_id

        asked, before = [], await by_router(routers, REFUSED)
        while len(asked) < 2:  # or Serve has given the first one to the free router
            client = FirstAsks(routers, free)
            answer = [chunk async for chunk in generate_unbroken(client, question(8), lambda: None)]
            assert sum(len(chunk.token_ids) for chunk in answer) == 8
            asked = client.asked
        assert [one.asks_another for one in asked] == [True, False]
        assert asked[1].refusal.router_id == busy.router_id
        assert await by_router(routers, REFUSED) == before  # no client was refused

        await fill(routers, free.router_id, busy, streams)
        client, before = FirstAsks(routers, free), await by_router(routers, REFUSED)
        with pytest.raises(ObjectiveUnreachable) as raised:
            _ = [chunk async for chunk in generate_unbroken(client, question(8), lambda: None)]
        assert [one.asks_another for one in client.asked] == [True, False]
        assert raised.value.retry_after_s <= client.asked[1].refusal.retry_after_s
        after = await by_router(routers, REFUSED)
        assert sum(after.values()) == sum(before.values()) + 1
        first = client.asked[1].refusal.router_id
        assert after[first] == before[first]
    finally:
        for _, first, chunks in streams:
            await end(first, chunks)


def scraped(name, label):
    """The sum of the samples of that name at the agent of the node, which all name the process."""
    (node,) = ray.nodes()
    page = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=30).text
    lines = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(name))  # to read all takes a second
    samples = [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
    samples = [sample for sample in samples if sample.name == name]
    assert all(sample.labels.get(label) for sample in samples), samples
    return sum(sample.value for sample in samples)


def test_each_process_tells_its_node_and_the_page_has_no_routers(routers, ports):
    url = f"http://127.0.0.1:{ports['http_port']}"
    body = {"prompt": "one", "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code == 200
    page = httpx.get(f"{url}/metrics", timeout=30).text
    assert sum(values_of(page, GENERATED)) >= 7
    assert values_of(page, "paceline_rounds_total") == []
    assert values_of(page, "paceline_metrics_missing_routers") == [TOLD_ROUTERS]
    wait_for(lambda: scraped(f"ray_{GENERATED}", "gateway") >= 7, "the gateway's figures")
    wait_for(lambda: scraped("ray_paceline_rounds_total", "router") >= 1, "the router's figures")
    assert scraped("ray_paceline_time_to_first_token_seconds_count", "gateway") >= 1

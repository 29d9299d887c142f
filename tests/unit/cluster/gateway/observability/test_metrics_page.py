"""Where metrics are shown, how old they are, and what a poller of the public port learns from them: nothing."""

import asyncio
import random
import re
from collections import Counter
from typing import ClassVar

import httpx
import pytest

from actors.errors import InvalidRequest
from actors.messages import TokenChunk
from cluster.gateway.http_app import create_app
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.gateway.observability.metrics_page import MetricsPage, metrics_listener
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.gatekeeper import Gatekeeper
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.free_ports import free_ports
from paceline_testing.scraped import value_of
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
MODEL = ServedModel("toy", max_model_len=256, vocab_size=len(TOKENIZER), eos_token_ids=())
CONFIG = GatewayConfig(stream_interval_ms=0)


class RoundsRouter(EchoRouter):
    """Each candidate's rounds accept numbers of tokens of its own. After each round, everybody else has a turn."""

    ROUNDS: ClassVar = {
        "a": (1, 1, 4, 4, 1, 2),
        "b": (2, 2, 2, 2, 2, 3),
        "c": (4, 4, 1, 1, 2, 1),
        "d": (1, 4, 1, 4, 1, 2),
        "e": (3, 1, 3, 1, 3, 2),
        "f": (1, 2, 1, 4, 4, 1),
    }

    def __init__(self):
        super().__init__()
        self.after_round = asyncio.Queue()
        self.go_on = asyncio.Queue()

    async def generate(self, request):
        rounds = self.ROUNDS[TOKENIZER.decode(request.prompt_token_ids[-1:]).strip()]
        for index, count in enumerate(rounds):
            is_last = index == len(rounds) - 1
            token_ids = (5,) * count
            yield TokenChunk(
                request_id=request.request_id,
                index=index,
                token_ids=token_ids,
                finish_reason="length" if is_last else None,
            )
            if not is_last:
                self.after_round.put_nowait(index)
                await self.go_on.get()


@pytest.fixture
def admin(tmp_path):
    return TenantAdministration(tmp_path / "tenants.json")


def make_service(admin, tmp_path, router, config=CONFIG):
    metrics = GatewayMetrics()
    access = TenantAccess(tmp_path / "tenants.json", may_be_open=True)
    keeper = Gatekeeper(access, 1, metrics.tenant_refusals, metrics.tenant_registry_failures)
    return GenerationService(router, TOKENIZER, MODEL, config, metrics, keeper)


class Poller:
    """Reads all numbers of all that it can reach, and notes by how much each has grown."""

    def __init__(self, client, headers, paths):
        self._client, self._headers, self._paths = client, headers, paths
        self._before = {}

    async def growth(self):
        now = {}
        for path in self._paths:
            answer = await self._client.get(path, headers=self._headers)
            for index, line in enumerate(answer.text.splitlines()):
                for place, number in enumerate(re.findall(r"(?<![\w.])\d+(?:\.0)?(?![\w.])", line)):
                    now[path, index, place] = float(number)
        grown = {key: value - self._before.get(key, value) for key, value in now.items()}
        self._before = now
        return frozenset((key, by) for key, by in grown.items() if by)


async def watched(client, router, poller, key, candidate):
    """What a poller sees of each round of a call."""
    await poller.growth()
    body = {"prompt": candidate, "max_tokens": 14}
    call = asyncio.create_task(
        client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=20)
    )
    seen = []
    for _ in RoundsRouter.ROUNDS[candidate][1:]:
        await router.after_round.get()
        seen.append(await poller.growth())
        router.go_on.put_nowait(None)
    assert (await call).status_code == 200
    return seen


def guess(seen, profiles, chance):
    matches = Counter(
        {name: sum(len(a & b) for a, b in zip(seen, profile, strict=True)) for name, profile in profiles.items()}
    )
    best = max(matches.values())
    return chance.choice([name for name, count in matches.items() if count == best])


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_poller_of_the_public_port_cannot_tell_which_prompt_is_being_answered(admin, tmp_path, has_key):
    victim, other = admin.add("victim", {}), admin.add("other", {})
    router, chance = RoundsRouter(), random.Random(7)
    service = make_service(admin, tmp_path, router)
    headers = {"Authorization": f"Bearer {other.key}"} if has_key else {}
    paths = [route.path for route in create_app(service, CONFIG).routes if "{" not in route.path]
    async with gateway_client(service, CONFIG) as client:
        poller = Poller(client, headers, paths)
        profiles = {name: await watched(client, router, poller, victim.key, name) for name in router.ROUNDS}
        hits = 0
        for _ in range(16):
            candidate = chance.choice(sorted(router.ROUNDS))
            seen = await watched(client, router, poller, victim.key, candidate)
            hits += guess(seen, profiles, chance) == candidate
    assert hits <= 9, f"{hits} of 16 were told apart"  # by chance 2.7; more than 9 once in 20,000 times


async def test_without_tenants_metrics_are_public_and_current(admin, tmp_path):
    service = make_service(admin, tmp_path, EchoRouter())
    async with gateway_client(service, CONFIG) as client:
        for count in (1, 2):
            await client.post("/v1/completions", json={"prompt": "the quick", "max_tokens": 5})
            page = (await client.get("/metrics")).text
            assert value_of(page, "paceline_generation_tokens_total") == 5 * count
        admin.add("first", {})
        service = make_service(admin, tmp_path, EchoRouter())
    async with gateway_client(service, CONFIG) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 404
    assert "gateway.metrics_port" in answer.json()["error"]["message"]


async def test_a_snapshot_holds_for_its_period():
    now, taken = [100.0], []
    intervals = [10.0]

    async def current():
        taken.append(now[0])
        return f"{now[0]:g}"

    page = MetricsPage(current, lambda: intervals[0], clock=lambda: now[0])
    assert await asyncio.gather(*(page.text() for _ in range(5))) == ["100"] * 5
    now[0] = 109.9
    assert await page.text() == "100"
    now[0] = 110.0
    assert await page.text() == "110"
    assert taken == [100.0, 110.0]
    intervals[0] = 0
    now[0] = 111.0
    assert await page.text() == "111"


async def test_with_tenants_the_page_on_its_own_port_is_a_snapshot(admin, tmp_path):
    issued = admin.add("a", {})
    (port,) = free_ports(1)
    config = CONFIG.model_copy(update={"metrics_port": port})
    service = make_service(admin, tmp_path, EchoRouter(), config)
    async with (
        gateway_client(service, config) as client,
        metrics_listener(config, service.metrics_page),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as scraper,
    ):
        first = await scraper.get("/metrics")
        assert first.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert value_of(first.text, "paceline_generation_tokens_total") == 0
        body, headers = {"prompt": "the quick", "max_tokens": 5}, {"Authorization": f"Bearer {issued.key}"}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert (await scraper.get("/metrics")).text == first.text
        for path in ("/", "/livez", "/v1/models"):
            assert (await scraper.get(path)).status_code == 404
        assert (await scraper.get("/metrics", headers={"Host": "rebound.example"})).status_code == 403
        assert "gateway.metrics_port" in (await client.get("/metrics")).json()["error"]["message"]


async def test_several_gateways_listen_on_one_port_and_a_taken_one_is_named():
    (port,) = free_ports(1)
    config = GatewayConfig(metrics_port=port)

    async def text():
        return "page\n"

    page = MetricsPage(text, lambda: 0.0)
    async with metrics_listener(config, page), metrics_listener(config, page), httpx.AsyncClient() as scraper:
        assert (await scraper.get(f"http://127.0.0.1:{port}/metrics")).text == "page\n"
    with pytest.raises(InvalidRequest, match=r"gateway.metrics_port is \d+; cannot listen on 192.0.2.1"):
        async with metrics_listener(GatewayConfig(metrics_port=port, metrics_host="192.0.2.1"), page):
            pass

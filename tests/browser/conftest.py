"""Pages of a gateway in headless Chromium. After each test: no request left the origin, nothing broke the policy, no
script failed, and nothing was stored."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from actors.drafters.registry import create_drafters
from actors.links.keys import LinkKeys
from cache_service.store.connection import ConnectionSettings
from cluster.cache.shared_cache import SharedCache
from cluster.gateway.observability.metrics import GatewayMetrics, merged
from cluster.router.connections import Connections
from cluster.router.driver import RouterDriver
from cluster.router.metrics import RouterMetrics
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.gatekeeper import Gatekeeper
from paceline_testing.browser_visit import Visit
from paceline_testing.echo_gateway import echo_gateway
from paceline_testing.echo_router import EchoRouter
from paceline_testing.rounds import learning_core, serve, toy_info, toy_request
from paceline_testing.toy_target import ToyTarget

CHROMIUM = shutil.which("chromium")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP *.example 127.0.0.1",
)  # fmt: skip


class MeasuredRouter(EchoRouter):
    """Shows the metrics of a router that has served a toy target."""

    def __init__(self) -> None:
        super().__init__()
        with ThreadPoolExecutor(1) as threads:  # playwright's event loop is running in this one
            self.text = threads.submit(asyncio.run, _router_metrics()).result()

    async def metrics_text(self) -> str:
        return self.text


async def _router_metrics() -> str:
    cache = SharedCache(ConnectionSettings("redis://127.0.0.1:1"), "weights")  # out of reach
    target = ToyTarget(seed=4)
    core = learning_core(toy_info(97), create_drafters(("suffix",)), token_sink=cache)
    core.add(toy_request("r", [5, 6, 7], 240), 0.0)
    serve(core, target.verify)
    driver = RouterDriver(core, verify_timeout_s=1.0, draft_deadline_s=0.1)
    connections = Connections(LinkKeys.generate())
    try:
        return merged("router", {"r1": RouterMetrics(core, driver, connections, cache).text()})
    finally:
        driver.close()
        connections.close()
        cache.close(1.0)


@pytest.fixture(scope="module")  # asynchronous tests of other folders cannot run beside its event loop
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not on the PATH: run `make test-browser`")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("the package playwright is not installed: run `make test-browser`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def gateway(browser: Any) -> Iterator[tuple[str, EchoRouter]]:
    with echo_gateway("toy", router=MeasuredRouter()) as (address, _, router):
        yield f"http://{address}", router


@pytest.fixture
def router(gateway: tuple[str, EchoRouter]) -> EchoRouter:
    """As new for each test."""
    _, router = gateway
    router.chunk_tokens, router.delay_s, router.max_running = 3, 0.0, 1000
    router.failures.clear()
    router.requests.clear()
    return router


@pytest.fixture
def visit(browser: Any, gateway: tuple[str, EchoRouter], router: EchoRouter) -> Iterator[Visit]:
    with Visit(browser, gateway[0]) as visit:
        yield visit


@pytest.fixture(scope="module")
def thinking(browser: Any) -> Iterator[tuple[str, EchoRouter]]:
    """A gateway of a model that thinks, which answers with the messages themselves."""
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{# <think> </think> #}"
    with echo_gateway("toy", chat_template=template) as (address, _, router):
        yield f"http://{address}", router


@pytest.fixture(scope="module")
def guarded(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """The address of a gateway that serves tenants only, a key, and the key of a tenant who reads what others wrote."""
    registry = tmp_path_factory.mktemp("tenants") / "tenants.json"
    tenants = TenantAdministration(registry, allow_shared=False)
    keys = tenants.add("a", {}).key, tenants.add("b", {"policy": "group", "group": "g"}).key
    metrics = GatewayMetrics()
    access = TenantAccess(registry, may_be_open=False)
    gatekeeper = Gatekeeper(access, 1, metrics.tenant_refusals, metrics.tenant_registry_failures)
    with echo_gateway("toy", metrics=metrics, gatekeeper=gatekeeper) as (address, _, _):
        yield f"http://{address}", *keys

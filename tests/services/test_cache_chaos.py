"""Whatever becomes of the cache's server or the way to it, answers stay the same, none fails, and it passes."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.models.loader import read_model_info
from actors.models.source import ModelSource
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.log.compactor import CompactorSettings
from cache_service.log.follower import FollowerSettings
from cache_service.log.publisher import PublisherSettings
from cache_service.store.connection import ConnectionSettings, open_client
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.offline.engine import LocalEngine
from paceline_testing.bad_network import BadNetwork, bad_network
from paceline_testing.cache_stores import kill, until
from paceline_testing.sentinel_group import Member, SentinelGroup, sentinel_group
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm")]
GREEDY = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7, "ignore_eos": True}
WAYS = (GREEDY, SAMPLED)
NUM_TOKENS = len(WAYS) * len(PROMPTS) * 24  # of all answers

pytestmark = pytest.mark.usefixtures("drafts_pay")
# Faults are the same for both; what either does with its data, the other tests of this folder ask both.
each_engine = pytest.mark.parametrize(
    "engine", ["valkey", pytest.param("redis", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", 5, hidden_size=48, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def wanted(model) -> list[list[list[int]]]:
    """What is said without drafts, in each way."""
    engine = make_engine(model, None, drafters=("none",))
    return [[generation.token_ids for generation in engine.generate(PROMPTS, **way)] for way in WAYS]


def make_engine(model: Path, cache: SharedCache | None, drafters: tuple[str, ...] = ("cache",)) -> LocalEngine:
    return LocalEngine(
        str(model), draft_model="none", drafters=drafters, batch_size=2, device="cpu", exact="bitwise",
        kv_cache_tokens=2048, cache=cache,
    )  # fmt: skip


@contextmanager
def shared_cache(model: Path, settings: ConnectionSettings, directory: Path) -> Iterator[SharedCache]:
    """An impatient one, with bases in files."""
    cache = SharedCache(
        replace(settings, connect_timeout_s=0.3, read_timeout_s=0.3),
        read_model_info(ModelSource("tiny", "tiny", model)).fingerprint,
        settings=SharedCacheSettings(
            publisher=PublisherSettings(flush_s=0.01),
            compactor=CompactorSettings(fold_every_s=0.05),
            index=WarmIndexSettings(
                directory=directory,
                base_tokens=40,
                follower=FollowerSettings(poll_s=0.01, idle_poll_s=0.02, retry_s=0.02, max_retry_s=0.2),
            ),
        ),
    )
    try:
        cache.follow([""])
        yield cache
    finally:
        cache.close(20)
    assert cache.publisher.counters.faults == 0
    assert cache.compactor._turns.num_faults == 0
    assert cache.index._follower._turns.num_faults == cache.index._builder.num_faults == 0
    assert cache.stats().index.build_faults == 0


class Client:
    """Asks one engine, and finds the answers that are wanted."""

    def __init__(self, model: Path, cache: SharedCache, wanted: list[list[list[int]]]) -> None:
        self.cache = cache
        self._engine = make_engine(model, cache)
        self._wanted = wanted

    def ask(self, in_round: Callable[[], None] | None = None) -> int:
        """In each way; returns how many tokens the cache has drafted. in_round: called in the third round of each."""
        accepted = 0
        for way, wanted in zip(WAYS, self._wanted, strict=True):
            num_rounds = 0

            def on_round(_: object) -> None:
                nonlocal num_rounds
                num_rounds += 1
                if num_rounds == 3 and in_round is not None:
                    in_round()

            generations = self._engine.generate(PROMPTS, **way, on_round=on_round)
            assert [generation.token_ids for generation in generations] == wanted
            assert num_rounds >= 3
            accepted += sum(generation.accepted_tokens.get("cache", 0) for generation in generations)
        counters = self._engine.core.counters
        assert (counters.drafter_errors, counters.sink_faults) == ({}, 0)
        return accepted

    def learns(self) -> bool:
        """Whether what is said from now on comes back from the server."""
        index = self.cache.index.stats()
        self.ask()
        return until(lambda: self.cache.index.stats().entries + self.cache.index.stats().segments
                     > index.entries + index.segments)  # fmt: skip


@contextmanager
def client(model, settings, tmp_path, wanted, is_warm=True) -> Iterator[Client]:
    with shared_cache(model, settings, tmp_path / "index") as cache:
        client = Client(model, cache, wanted)
        if is_warm:
            client.ask()
            assert until(lambda: cache.stats().index.tokens >= NUM_TOKENS and cache.stats().folds)
        yield client


def assert_recovered(client: Client, model, server: EmbeddedServer | SentinelGroup, tmp_path, wanted) -> None:
    """The one that went through it learns and drafts again, and so does one that has just come."""
    assert client.learns()
    assert until(lambda: client.ask() > 0)
    with shared_cache(model, server.settings, tmp_path / "other") as other:
        assert until(lambda: other.stats().index.tokens > 0)
        newcomer = Client(model, other, wanted)
        assert until(lambda: newcomer.ask() > 0)


def halt(server):
    os.kill(server.pid, signal.SIGSTOP)


def go_on(server):
    os.kill(server.pid, signal.SIGCONT)


def order(*command):
    return orders(command)


def orders(*commands):
    def send(server):
        with open_client(server.settings) as redis:
            for command in commands:
                redis.execute_command(*command)

    return send


SERVER_FAULTS = {
    "killed": (kill, EmbeddedServer.restart),
    "stopped": (halt, go_on),
    "paused": (order("CLIENT", "PAUSE", 800, "ALL"), None),
    "paused for writers": (order("CLIENT", "PAUSE", 600_000, "WRITE"), order("CLIENT", "UNPAUSE")),
    "full": (order("CONFIG", "SET", "maxmemory", 1), order("CONFIG", "SET", "maxmemory", 2**28)),
    "full, evicts nothing": (
        # One setting at a time, as Redis 6.2 has it.
        orders(("CONFIG", "SET", "maxmemory-policy", "noeviction"), ("CONFIG", "SET", "maxmemory", 1)),
        order("CONFIG", "SET", "maxmemory", 2**28),
    ),
    "a replica": (order("REPLICAOF", "127.0.0.1", 1), order("REPLICAOF", "NO", "ONE")),
    "empty": (order("FLUSHALL"), None),
    "closed to us": (order("CONFIG", "SET", "requirepass", "another"), None),
}


@pytest.mark.parametrize("fault", SERVER_FAULTS)
@each_engine
def test_a_server_fails_in_the_middle_of_requests_and_comes_back(engine, model, wanted, tmp_path, fault):
    begin, end = SERVER_FAULTS[fault]
    with EmbeddedServer(tmp_path / "server", engine) as server, client(model, server.settings, tmp_path, wanted) as one:
        num_begun = 0

        def begin_once() -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == 1:
                begin(server)

        one.ask(begin_once)
        one.ask()
        if fault == "closed to us":
            with open_client(replace(server.settings, password="another")) as redis:
                redis.config_set("requirepass", server.settings.password)
        elif end is not None:
            end(server)
        assert_recovered(one, model, server, tmp_path, wanted)


@each_engine
def test_a_server_comes_and_goes_while_answers_are_given(engine, model, wanted, tmp_path):
    with EmbeddedServer(tmp_path / "server", engine) as server, client(model, server.settings, tmp_path, wanted) as one:
        for begin, end in ((halt, go_on), (order("FLUSHALL"), None), (kill, EmbeddedServer.restart)) * 2:
            begin(server)
            one.ask()
            if end is not None:
                one.ask(lambda end=end: end(server))
        assert_recovered(one, model, server, tmp_path, wanted)


@each_engine
def test_old_data_that_are_restored_are_what_is_known_from_then_on(engine, model, wanted, tmp_path):
    with EmbeddedServer(tmp_path / "server", engine) as server, client(model, server.settings, tmp_path, wanted) as one:
        with open_client(server.settings) as redis:
            one.cache.compactor.close(20)  # so that the copy is of one moment
            old = {name: redis.dump(name) for name in redis.keys("*")}
            for _ in range(3):
                assert one.learns()

            def restore() -> None:
                with redis.pipeline(transaction=True) as pipe:
                    pipe.flushall()
                    for name, value in old.items():
                        pipe.restore(name, 0, value)
                    pipe.execute()

            num_new = one.cache.stats().index.tokens
            resets = one.cache.stats().index.resets
            restore()
            assert until(lambda: one.cache.stats().index.resets > resets)
            with shared_cache(model, server.settings, tmp_path / "later") as later:
                assert until(lambda: 0 < later.stats().index.tokens == one.cache.stats().index.tokens < num_new)
            one.ask(restore)
        assert_recovered(one, model, server, tmp_path, wanted)


@each_engine
def test_sentinels_choose_another_primary_and_the_old_one_comes_back(engine, model, wanted, tmp_path):
    with sentinel_group(tmp_path / "group", engine) as group, client(model, group.settings, tmp_path, wanted) as one:
        old, new = group.primary, group.replica
        is_first = itertools.count()
        one.ask(lambda: old.kill() if next(is_first) == 0 else None)
        while not group.is_agreed(new):  # some ten seconds
            one.ask()
            time.sleep(0.5)
        known = last_written(new)
        assert_recovered(one, model, group, tmp_path, wanted)
        assert last_written(new) > known

        old.start()  # with older data, and it takes itself for the primary until a sentinel tells it
        stale = last_written(old)
        while old.role == "master":  # some ten seconds
            one.ask()
            written = last_written(old)
            assert written == stale or old.role == "slave"  # asked after: it may become one between the two
            time.sleep(0.5)
        assert group.is_agreed(new)
        assert one.learns()
        assert until(lambda: last_written(old) == last_written(new))


def last_written(member: Member) -> tuple[int, int]:
    """The id of the last entry of its log."""
    (name,) = member.redis.keys("sd:{*}:log")
    time_ms, _, number = member.redis.xinfo_stream(name)["last-generated-id"].decode().partition("-")
    return int(time_ms), int(number)


def silent(network: BadNetwork) -> None:
    network.fall_silent()


def cut(network: BadNetwork) -> None:
    network.cut()


def cut_within_answers(network: BadNetwork) -> None:
    network.cut(3)


def slow(network: BadNetwork) -> None:
    network.slow_down(16)


@pytest.mark.parametrize(
    ("fault", "begins_cold"),
    [
        (silent, False),
        (cut, False),
        (cut_within_answers, False),
        (slow, True),
        *(pytest.param(fault, True, marks=pytest.mark.slow) for fault in (silent, cut, cut_within_answers)),
        pytest.param(slow, False, marks=pytest.mark.slow),
    ],
)
def test_a_network_fails_and_is_mended(model, wanted, tmp_path, fault, begins_cold):
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(tmp_path / "server"))
        network = stack.enter_context(bad_network(server.port))
        settings = replace(server.settings, url=f"redis://127.0.0.1:{network.port}")
        if begins_cold:
            fault(network)
        one = stack.enter_context(client(model, settings, tmp_path, wanted, is_warm=not begins_cold))
        one.ask(lambda: fault(network))
        one.ask()
        assert fault is slow or until(lambda: one.cache.publisher.counters.failures > 0)
        network.mend()
        assert_recovered(one, model, server, tmp_path, wanted)

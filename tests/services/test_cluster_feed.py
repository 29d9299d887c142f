"""Logs of a Redis Cluster with three primaries, which are followed by a feed as those of one server are."""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cache_service.log.cluster_pump import ClusterPump
from cache_service.log.follower import Follower, FollowerSettings
from cache_service.log.log_feed import LogFeed
from cache_service.store.connection import ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer
from paceline_testing.cache_stores import Documents, Namespace, contents, kill, piece, until

NODES = 3
SLOTS = 16384
PASSWORD = "shared"
CONFIGURATION = (
    "cluster-enabled yes",
    "cluster-node-timeout 1000",
    "cluster-require-full-coverage no",
    f"user everybody on >{PASSWORD} ~* &* +@all",
)
# Polls become rare, so that what comes soon after a pause has come by the feed.
SELDOM = FollowerSettings(poll_s=0.1, idle_poll_s=2.0, unwanted_poll_s=2.0)
SOON_S = 0.7


class Cluster:
    """Each of the servers has a third of the slots."""

    def __init__(self, servers):
        self.servers = servers
        self.nodes = [Namespace(server.settings).redis for server in servers]
        for number, node in enumerate(self.nodes):
            node.execute_command(
                "CLUSTER", "ADDSLOTS", *range(SLOTS * number // len(servers), SLOTS * (number + 1) // len(servers))
            )
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        assert until(lambda: all(self.is_whole(node) for node in self.nodes))
        ports = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        self.settings = ConnectionSettings(f"redis+cluster://everybody:{PASSWORD}@{ports}")

    @staticmethod
    def is_whole(node):
        told = node.execute_command("CLUSTER", "INFO")
        return b"cluster_state:ok" in told and f"cluster_known_nodes:{NODES}".encode() in told

    def namespaces(self):
        """One on each server, in their order."""
        found = {}
        while len(found) < len(self.servers):
            namespace = Namespace(self.settings, f"ns{random.randrange(10**9)}")
            found.setdefault(self.port_of(namespace), namespace)
        return [found[server.port] for server in self.servers]

    @staticmethod
    def port_of(namespace):
        return namespace.redis.get_node_from_key(namespace.keys.epoch).port

    def move(self, namespace, source, target):
        """Move a namespace's slot and what is in it."""
        slot = namespace.redis.keyslot(namespace.keys.epoch)
        ids = [node.execute_command("CLUSTER", "MYID") for node in self.nodes]
        self.nodes[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        self.nodes[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        keys = self.nodes[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        port = self.servers[target].port
        self.nodes[source].execute_command(
            "MIGRATE", "127.0.0.1", port, "", 0, 5000, "AUTH2", "everybody", PASSWORD, "KEYS", *keys
        )
        for node in (self.nodes[target], self.nodes[source], *self.nodes):
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    def calls(self):
        """Commands about keys, of all servers."""
        others = ("ping", "info", "auth", "hello", "client", "cluster", "config", "command", "replconf")
        stats = Counter()
        for node in self.nodes:
            for name, stat in node.info("commandstats").items():
                command = name.removeprefix("cmdstat_").partition("|")[0]
                if command not in others:
                    stats[command] += stat["calls"]
        return stats


@contextmanager
def started(directory, engine):
    with ExitStack() as stack:
        servers = [
            stack.enter_context(EmbeddedServer(Path(directory, str(number)), engine, extra=CONFIGURATION))
            for number in range(NODES)
        ]
        yield Cluster(servers)


@pytest.fixture(scope="module")
def cluster(engine, tmp_path_factory):
    with started(tmp_path_factory.mktemp("cluster"), engine) as cluster:
        yield cluster


@pytest.fixture
def node():
    """A directory in which processes meet, with a name that is short enough for a socket."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "node")


@contextmanager
def followed(cluster, namespaces, directory=None):
    """Documents and readers of a follower of all, and its feed."""
    feed = LogFeed(cluster.settings, directory)
    follower = Follower(namespaces[0].open, SELDOM, feed)
    documents = [Documents() for _ in namespaces]
    readers = [
        follower.follow(namespace.keys.namespace, one) for namespace, one in zip(namespaces, documents, strict=True)
    ]
    try:
        yield documents, readers, feed
    finally:
        assert follower.close(20)
        assert feed.close(20)


def add(namespace, given):
    given.append(piece(f"d{len(given)}", 0, [len(given), 2, 3]))
    namespace.append(given[-1])


def written(cluster):
    """A namespace on each server, and the one text in each."""
    namespaces = cluster.namespaces()
    texts = [[] for _ in namespaces]
    for namespace, given in zip(namespaces, texts, strict=True):
        add(namespace, given)
    return namespaces, texts


def comes(documents, given, within_s):
    return until(lambda: documents.contents == contents(given), within_s)


def test_entries_of_all_servers_come_at_once_and_silence_costs_next_to_nothing(cluster):
    namespaces, texts = written(cluster)
    with followed(cluster, namespaces) as (documents, readers, feed):
        assert until(lambda: all(reader.is_current for reader in readers))
        for _ in range(3):
            for namespace, given, one in zip(namespaces, texts, documents, strict=True):
                add(namespace, given)
                assert comes(one, given, SOON_S)
        assert until(lambda: all(reader.is_current for reader in readers))
        time.sleep(1.0)
        before, began = cluster.calls(), time.monotonic()
        time.sleep(5.0)
        silent = cluster.calls() - before
        assert set(silent) <= {"get"}
        assert silent["get"] <= NODES * (1 + (time.monotonic() - began) // 4)
        assert all(reader.lag_s < 5.0 for reader in readers)
        assert len(feed._node._pump._pumps) == NODES


def test_a_node_reads_each_log_of_a_cluster_once(cluster, node):
    namespaces = cluster.namespaces()
    with followed(cluster, namespaces, node) as one, followed(cluster, namespaces, node) as two:
        texts = [[] for _ in namespaces]
        for namespace, given in zip(namespaces, texts, strict=True):
            add(namespace, given)
        assert until(lambda: all(reader.is_current for reader in (*one[1], *two[1])))
        before = cluster.calls()
        for _ in range(3):
            for number, (namespace, given) in enumerate(zip(namespaces, texts, strict=True)):
                add(namespace, given)
                assert all(comes(each[0][number], given, SOON_S) for each in (one, two))
            time.sleep(0.25)
        assert 9 <= (cluster.calls() - before)["xrange"] <= 18
        assert sum(each[2]._node._pump is not None for each in (one, two)) == 1


def test_a_server_that_is_lost_concerns_only_its_own_logs_and_they_are_followed_when_it_is_back(cluster):
    namespaces, texts = written(cluster)
    with followed(cluster, namespaces) as (documents, readers, feed):
        assert until(lambda: all(reader.is_current for reader in readers))
        pump = feed._node._pump
        kill(cluster.servers[0])
        assert until(lambda: not readers[0].is_current)
        for _ in range(3):
            for number in (1, 2):
                add(namespaces[number], texts[number])
                assert comes(documents[number], texts[number], SOON_S)
        cluster.servers[0].restart()
        assert feed._node._pump is pump
        assert until(lambda: cluster.is_whole(Namespace(cluster.servers[0].settings).redis))
        # The data may have been lost with the server.
        assert until(lambda: readers[0].is_current)
        texts[0] = [one for one in texts[0] if documents[0].contents]
        for _ in range(3):
            add(namespaces[0], texts[0])
            assert until(lambda: documents[0].contents == contents(texts[0]))
        assert until(lambda: readers[0].is_current)
        add(namespaces[0], texts[0])
        assert comes(documents[0], texts[0], SOON_S)


def test_a_server_that_hangs_concerns_only_its_own_logs(cluster):
    namespaces, texts = written(cluster)
    with followed(cluster, namespaces) as (documents, readers, feed):
        assert until(lambda: all(reader.is_current for reader in readers))
        pump = feed._node._pump
        os.kill(cluster.servers[0].pid, signal.SIGSTOP)
        try:
            assert until(lambda: not readers[0].is_current)
            assert all(reader.is_current for reader in readers[1:])
            for number in (1, 2):
                add(namespaces[number], texts[number])
                assert until(lambda: documents[number].contents == contents(texts[number]))  # noqa: B023
            assert feed._node._pump is pump
        finally:
            os.kill(cluster.servers[0].pid, signal.SIGCONT)
        assert until(lambda: all(cluster.is_whole(node) for node in cluster.nodes))
        assert until(lambda: readers[0].is_current)
        add(namespaces[0], texts[0])
        assert comes(documents[0], texts[0], SOON_S)


def test_the_slot_map_is_read_from_another_server_if_one_has_hung_for_a_second(cluster):
    with closing(ClusterPump(replace(cluster.settings, read_timeout_s=5.0))) as pump:
        for server in cluster.servers:  # one of them is asked first
            os.kill(server.pid, signal.SIGSTOP)
            try:
                pump._may_have_moved, began = True, time.monotonic()
                pump._read_slots()
                assert time.monotonic() - began < 3.0
                assert pump._slots_at > began
                assert not pump._may_have_moved
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert until(lambda: all(cluster.is_whole(node) for node in cluster.nodes))


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_feed_begins_while_the_first_server_is_away(cluster, fault):
    namespaces, texts = written(cluster)
    if fault == "killed":
        kill(cluster.servers[0])
    else:
        os.kill(cluster.servers[0].pid, signal.SIGSTOP)
    try:
        with followed(cluster, namespaces) as (documents, readers, _):
            assert until(lambda: readers[1].is_current and readers[2].is_current)
            for number in (1, 2):
                add(namespaces[number], texts[number])
                assert comes(documents[number], texts[number], SOON_S)
            assert not readers[0].is_current
    finally:
        if fault == "killed":
            cluster.servers[0].restart()
        else:
            os.kill(cluster.servers[0].pid, signal.SIGCONT)
    assert until(lambda: all(cluster.is_whole(Namespace(server.settings).redis) for server in cluster.servers))


def test_a_log_whose_slot_moves_is_followed_where_it_is_then(cluster):
    namespaces = cluster.namespaces()
    texts = [[] for _ in namespaces]
    with followed(cluster, namespaces) as (documents, readers, _):
        for namespace, given in zip(namespaces, texts, strict=True):
            add(namespace, given)
        assert until(lambda: all(reader.is_current for reader in readers))
        resets = documents[0].num_resets
        cluster.move(namespaces[0], 0, 2)
        for _ in range(3):
            add(namespaces[0], texts[0])
            assert until(lambda: documents[0].contents == contents(texts[0]))
        assert cluster.port_of(namespaces[0]) == cluster.servers[2].port
        assert documents[0].num_resets == resets
        assert until(lambda: readers[0].is_current)
        add(namespaces[0], texts[0])
        assert comes(documents[0], texts[0], SOON_S)


def test_a_cluster_that_is_away_is_polled_until_it_is_back(cluster):
    namespaces = cluster.namespaces()
    given = []
    for server in cluster.servers:
        kill(server)
    with followed(cluster, namespaces) as (documents, readers, feed):
        time.sleep(1.0)
        assert not feed._is_open
        for server in cluster.servers:
            server.restart()
        assert until(lambda: all(cluster.is_whole(Namespace(server.settings).redis) for server in cluster.servers))
        add(namespaces[0], given)
        assert until(lambda: documents[0].contents == contents(given))
        assert until(lambda: readers[0].is_current)
        add(namespaces[0], given)
        assert comes(documents[0], given, SOON_S)

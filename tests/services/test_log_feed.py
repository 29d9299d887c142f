"""Logs that are followed by a feed: silent ones cost nothing, entries come at once, and a node reads each log once.

Covers also `cache_service.log.log_pump` and `cache_service.log.node_feed`.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cache_service.admin.administration import CacheAdministration
from cache_service.counts.soft_exchange import SoftExchange
from cache_service.errors import StoreRefused
from cache_service.formats.stream_id import START
from cache_service.index.epoch_watch import EpochWatch
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.index.warm_index import WarmIndex
from cache_service.log import log_pump, node_feed
from cache_service.log.compactor import Compactor
from cache_service.log.folded_log_reader import Place
from cache_service.log.follower import Follower, FollowerSettings
from cache_service.log.log_feed import LogFeed
from cache_service.log.log_pump import Followed, LogPump
from cache_service.log.log_reader import LogReader, ReaderSettings
from cache_service.log.log_tail import News
from cache_service.log.node_feed import _SILENCE_S, Follow, Forget
from cache_service.store.connection import ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer
from cache_service.store.store import LogView
from paceline_testing.cache_stores import Documents, Namespace, contents, fold_all, piece, until

SELDOM = FollowerSettings(poll_s=0.1, idle_poll_s=0.1, unwanted_poll_s=0.1)

CHILD = """
import sys
from pathlib import Path
from cache_service.log.follower import Follower
from cache_service.log.log_feed import LogFeed
from cache_service.store.connection import ConnectionSettings
from paceline_testing.cache_stores import Documents, Namespace, until

settings = ConnectionSettings(sys.argv[1], password=sys.argv[2])
namespace, documents = Namespace(settings, sys.argv[4]), Documents()
feed = LogFeed(settings, Path(sys.argv[3]))
reader = Follower(namespace.open, feed=feed).follow(sys.argv[4], documents)
assert until(lambda: reader.is_current)
print("is current", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node():
    """A directory in which processes meet, with a name that is short enough for a socket."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "node")


@contextmanager
def followed(namespace, directory=None, settings=None):
    """Documents, reader and feed of a follower."""
    documents, feed = Documents(), LogFeed(settings or namespace.connection.settings, directory)
    follower = Follower(namespace.open, SELDOM, feed)
    try:
        yield documents, follower.follow(namespace.keys.namespace, documents), feed
    finally:
        assert follower.close(20)
        assert feed.close(20)
        assert follower._turns.num_faults == 0


@contextmanager
def other_process(settings, directory, name):
    """Another process that follows a namespace, and is the first to do so."""
    command = [sys.executable, "-c", CHILD, settings.url, settings.password or "", str(directory), name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "is current\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def calls(server, *commands):
    stats = Namespace(server.settings).redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in commands)


def all_calls(server):
    """Those of commands about keys."""
    stats = Namespace(server.settings).redis.info("commandstats")
    others = {"cmdstat_ping", "cmdstat_info", "cmdstat_auth", "cmdstat_hello", "cmdstat_client|setinfo"}
    return sum(stat["calls"] for name, stat in stats.items() if name not in others)


def test_of_silent_namespaces_only_epochs_are_read(engine, tmp_path):
    """Once in four seconds, in one request."""
    with EmbeddedServer(tmp_path, engine) as server:
        namespace, feed = Namespace(server.settings), LogFeed(server.settings)
        names = [f"tenant{number}" for number in range(20)]
        index = WarmIndex(namespace.open, WarmIndexSettings(directory=None), feed)
        soft = SoftExchange(namespace.open, feed=feed)
        watch = EpochWatch(namespace.connection, lambda name: namespace.open(name)[0].keys, feed=feed)
        soft._folding.close(20)
        for name in names:
            namespace.open(name)[0].begin_epoch()
            index.follow(name)
            soft.follow(name)
            watch.watch(name)
        readers = [index._followed[name].live.reader for name in names] + [soft._feeds[name].reader for name in names]
        assert until(lambda: all(reader.is_current for reader in readers))
        assert until(lambda: all(one.subscription.is_current for one in watch._watched.values()))
        time.sleep(1.0)
        before = all_calls(server)
        time.sleep(2.5)
        assert all_calls(server) - before in (0, len(names))
        assert all(reader.lag_s < 5.0 for reader in readers[: len(names)])
        for each in (index, soft, watch, feed):
            assert each.close(20)


def test_an_entry_comes_at_once_and_while_there_are_more_reads_are_rare(engine, tmp_path):
    with EmbeddedServer(tmp_path, engine) as server:
        namespace = Namespace(server.settings)
        with followed(namespace) as (documents, reader, _):
            assert until(lambda: reader.is_current)
            given, before = [], calls(server, "xrange")
            began = time.monotonic()
            while time.monotonic() < began + 2.0:
                given.append(piece(f"d{len(given)}", 0, [1, 2, 3]))
                namespace.append(given[-1])
                time.sleep(0.005)
            assert until(lambda: documents.contents == contents(given))
            taken_s = time.monotonic() - began
            assert 5 < calls(server, "xrange") - before < 10 * taken_s + 10
            assert until(lambda: reader.is_current)
            assert documents.num_resets <= 1, "the epoch has begun"


def test_folds_purges_and_losses_are_noticed(namespace):
    with followed(namespace) as (documents, reader, _):
        given = [piece(f"d{number}", 0, [number]) for number in range(20)]
        folding = Compactor(namespace.store, namespace.codec)
        for number, part in enumerate(given):
            namespace.append(part)
            if number % 7 == 6:
                assert until(lambda: reader.is_current and reader.counters.entries == number + 1)  # noqa: B023
                fold_all(folding)
        assert until(lambda: documents.contents == contents(given))
        resets = documents.num_resets
        namespace.redis.delete(*namespace.names())
        assert until(lambda: documents.num_resets == resets + 1 and not documents.contents)
        namespace.append(given[0])
        assert until(lambda: documents.contents == contents(given[:1]))


@pytest.mark.parametrize("loss", ["trimmed", "purged", "restored"])
def test_readers_are_sent_to_the_server_when_entries_may_have_been_missed(namespace, loss):
    folding = Compactor(namespace.store, namespace.codec)
    namespace.append(piece("a", 0, [1]))
    fold_all(folding)
    backup = {name: namespace.redis.dump(name) for name in namespace.names()}
    cursor = namespace.append(piece("b", 0, [1]))
    pump, view = LogPump(namespace.connection.settings), namespace.store.read_log(cursor, 8)
    pump.follow(Followed(namespace.keys, 8, 0.02), view, cursor)
    (news,) = pump.news()
    assert (news.after, news.is_anchored, news.entries) == (cursor, True, [])
    if loss == "trimmed":
        for number in range(3):
            namespace.append(piece(f"c{number}", 0, [1]))
            fold_all(folding)
    else:
        namespace.redis.delete(*namespace.names())
        for name, value in backup.items() if loss == "restored" else ():
            namespace.redis.restore(name, 0, value)
        namespace.append(piece("c", 0, [1]))
    heard = []
    assert until(lambda: heard.extend(news for news in pump.news() if news.name) or heard)
    assert heard[0].after is None
    pump.close()


def test_messages_that_never_come_are_not_relied_on(namespace, monkeypatch):
    monkeypatch.setattr(log_pump, "SURE_S", 0.2)
    monkeypatch.setattr(log_pump, "PING_S", 0.05)
    pump = LogPump(namespace.connection.settings)
    pump.follow(Followed(namespace.keys, 8, 0.02), LogView(None, 0, []), "0-0")
    assert [news.name for news in pump.news()] == [namespace.keys.log]
    pump._connection.send_command("CLIENT", "TRACKING", "OFF")
    pump._connection.read_response()
    namespace.store.begin_epoch()
    heard = []
    assert until(lambda: heard.extend(pump.news()) or any(news.name for news in heard))
    assert heard[-1].name == namespace.keys.log
    assert all(not news.name for news in heard[:-1])
    pump.close()


def test_purges_are_heard_of_without_messages(namespace, monkeypatch):
    """All logs of the namespace are read then, in one request a pause and no more."""
    monkeypatch.setattr(log_pump, "EPOCHS_S", 0.2)
    monkeypatch.setattr(log_pump, "PING_S", 0.1)
    pump, quiet = LogPump(namespace.connection.settings), Namespace(namespace.connection.settings)
    for keys, at_once in ((namespace.keys, 8), (namespace.keys, 0), (quiet.keys, 8)):
        pump.follow(Followed(keys, at_once, 0.02), LogView(None, 0, []), "0-0")
    assert len([news for news in pump.news() if news.name]) == 3
    pump._connection.send_command("CLIENT", "TRACKING", "OFF")
    pump._connection.read_response()
    namespace.store.begin_epoch()
    heard, reads = [], []
    monkeypatch.setattr(pump, "_read", lambda logs, read=pump._read: reads.extend(logs) or read(logs))
    assert until(lambda: heard.extend(news for news in pump.news() if news.name) or len(heard) == 2, 5.0)
    assert {news.name for news in heard} == {namespace.keys.log, namespace.keys.epoch}
    assert len(reads) == 2
    pump.close()


def test_messages_that_come_with_answers_are_not_left_lying(namespace):
    pump = LogPump(namespace.connection.settings)
    pump.follow(Followed(namespace.keys, 0, 0.02), LogView(None, 0, []), "0-0")
    assert [news.name for news in pump.news()] == [namespace.keys.epoch]
    pump._next_ping = 0.0
    send = pump._connection.send_packed_command

    def send_slowly(*args, **options):
        send(*args, **options)
        namespace.store.begin_epoch()
        time.sleep(0.1)

    pump._connection.send_packed_command = send_slowly
    assert [news.name for news in pump.news()] == [""]
    assert pump.wait_s() < 0.1
    assert until(lambda: [news.name for news in pump.news()] == [namespace.keys.epoch], 1.0)
    pump.close()


def test_a_pump_that_is_refused_leaves_no_connection(shared_server):
    whole = Namespace(shared_server.settings)
    rights = "+@all -client|tracking"
    whole.redis.execute_command("ACL", "SETUSER", "deaf", "reset", "on", ">pass", "~*", *rights.split())
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(StoreRefused):
                LogPump(replace(shared_server.settings, username="deaf", password="pass"))
        assert until(lambda: not [one for one in whole.redis.client_list() if one["user"] == "deaf"], 2.0)
    finally:
        gc.enable()


def test_logs_beyond_the_limit_are_polled_no_faster(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(node_feed, "_MAX_LOGS", 1)
    with EmbeddedServer(tmp_path, engine) as server:
        one, two = Namespace(server.settings), Namespace(server.settings)
        with followed(one) as (_, reader, feed):
            assert until(lambda: reader.is_current)
            follower, documents = Follower(two.open, SELDOM, feed), Documents()
            follower.follow(two.keys.namespace, documents)
            two.append(piece("a", 0, [1]))
            assert until(lambda: documents.contents == contents([piece("a", 0, [1])]))
            before = calls(server, "xrange")
            time.sleep(1.0)
            assert calls(server, "xrange") - before < 15
            assert follower.close(20)


def test_a_log_that_is_followed_again_is_not_forgotten(namespace):
    """Another thread follows it while the last one who followed it stops."""
    feed, said = LogFeed(namespace.connection.settings), []
    feed._node.start = lambda: None
    feed.opened()

    def request(message):
        if isinstance(message, Forget):
            again.start()
            again.join(0.2)
        said.append(type(message).__name__)

    feed._node.request = request
    first = feed.follow(namespace.store, 8, 0.02, lambda: None)
    again = threading.Thread(
        target=lambda: feed.follow(namespace.store, 8, 0.02, lambda: None).read_log(Place(None, 0, START), 9)
    )
    first.read_log(Place(None, 0, START), 9)
    first.close()
    again.join(20)
    assert said == ["Follow", "Forget", "Follow"]


def test_a_place_that_is_given_up_is_not_followed(namespace):
    """The feed has dropped a purged log before its reader asks for it once more."""
    feed = LogFeed(namespace.connection.settings)
    subscription = feed.follow(namespace.store, 8, 0.02, lambda: None)
    settings = ReaderSettings(read_entries=8)
    reader = LogReader(namespace.store, namespace.codec, Documents(), settings, subscription)
    namespace.append(piece("a", 0, [1]))
    assert until(lambda: not reader.step() and reader.is_current)
    CacheAdministration(namespace.connection).purge(namespace.keys)
    assert until(lambda: not reader.is_current)
    assert until(lambda: not reader.step() and reader.is_current, 20)
    subscription.close()
    assert feed.close(20)


def test_what_the_only_reader_has_read_is_not_kept(namespace):
    with followed(namespace) as (documents, reader, feed):
        assert until(lambda: reader.is_current)
        namespace.append(piece("a", 0, [1]))
        assert until(lambda: documents.contents and reader.is_current)
        namespace.append(piece("b", 0, list(range(1000))))
        assert until(lambda: len(documents.contents) == 2 and reader.is_current)
        assert [tail._num_bytes for tail in feed._tails.values()] == [0]


def test_an_exchange_that_ends_follows_no_logs(namespace):
    feed = LogFeed(namespace.connection.settings)
    exchange = SoftExchange(namespace.open, feed=feed)
    namespace.store.begin_epoch()
    exchange.follow(namespace.keys.namespace)
    assert until(lambda: exchange._feeds[namespace.keys.namespace].reader.is_current)
    exchange.close(0.0)
    assert until(lambda: not feed._subscriptions and not feed._node._followers, 5.0)
    assert feed.close(20)


def test_a_server_that_refuses_is_polled(shared_server):
    """Without the right to track keys, and where a namespace may not be read."""
    whole = Namespace(shared_server.settings)
    rights = "+@all -client|tracking"
    whole.redis.execute_command(
        "ACL", "SETUSER", "blind", "reset", "on", ">pass", f"~{whole.keys.key('*')}", *rights.split()
    )
    narrow = Namespace(replace(shared_server.settings, username="blind", password="pass"), whole.keys.namespace)
    with followed(narrow) as (documents, reader, feed):
        whole.append(piece("a", 0, [1]))
        assert until(lambda: documents.contents == contents([piece("a", 0, [1])]))
        assert not feed._is_open
        assert not reader.is_current
    whole.redis.execute_command("ACL", "SETUSER", "blind", "+client|tracking")
    with followed(narrow) as (documents, reader, feed):
        assert until(lambda: reader.is_current)
        foreign = Namespace(narrow.connection.settings, "foreign")
        subscription, told, tell = feed.follow(foreign.store, 8, 0.02, lambda: None), [], feed.told
        feed.told = lambda news: told.append(news) or tell(news)
        feed._node.request(Follow(foreign.keys.fingerprint, "foreign", "", 8, 0.02, None, 0, "0-0"))
        whole.append(piece("b", 0, [1]))
        assert until(lambda: len(documents.contents) == 2)
        assert until(lambda: News(foreign.keys.log) in told)
        assert foreign.keys.log not in feed._node._followers
        assert feed._is_open
        subscription.close()


def test_a_node_reads_each_log_once(engine, tmp_path, node):
    with EmbeddedServer(tmp_path / "server", engine) as server:
        namespace = Namespace(server.settings)
        with (
            followed(namespace, node) as one,
            followed(namespace, node) as two,
            followed(namespace, node) as three,
        ):
            given = [piece("a", 0, [1])]
            namespace.append(given[0])
            assert until(lambda: all(each[1].is_current for each in (one, two, three)))
            before = calls(server, "xrange")
            for number in range(5):
                given.append(piece(f"d{number}", 0, [1, 2, 3]))
                namespace.append(given[-1])
                assert until(lambda: all(each[0].contents == contents(given) for each in (one, two, three)))
                time.sleep(0.25)
            assert 5 <= calls(server, "xrange") - before <= 10
            assert sum(each[2]._node._pump is not None for each in (one, two, three)) == 1
        assert node.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_the_process_that_reads_ends_or_hangs(server, node, fault):
    namespace = Namespace(server.settings)
    with (
        other_process(server.settings, node, namespace.keys.namespace) as process,
        followed(namespace, node) as (documents, reader, feed),
    ):
        namespace.store.begin_epoch()
        assert until(lambda: reader.is_current)
        assert feed._node._pump is None
        given = []
        for number in range(60):
            given.append(piece(f"d{number}", 0, [1, 2, 3]))
            namespace.append(given[-1])
            if number == 20:
                os.kill(process.pid, fault)
            time.sleep(0.02)
        began = time.monotonic()
        assert until(lambda: documents.contents == contents(given))
        assert time.monotonic() - began < _SILENCE_S + 2.0
        assert (reader.counters.entries, documents.num_resets) == (60, 0), "none is lost or comes twice"
        if fault == signal.SIGKILL:
            assert until(lambda: feed._node._pump is not None and reader.is_current)
        else:
            os.kill(process.pid, signal.SIGCONT)
            assert until(lambda: reader.is_current)


def test_a_process_with_quiet_logs_is_told_that_the_other_one_lives(server, node, monkeypatch):
    """While that one always has something to read."""
    monkeypatch.setattr(log_pump, "PING_S", 0.3)
    monkeypatch.setattr(node_feed, "_SILENCE_S", 1.0)
    busy, quiet = Namespace(server.settings), Namespace(server.settings)
    with followed(busy, node) as one:
        assert until(lambda: one[1].is_current)
        with followed(quiet, node) as two:
            assert until(lambda: two[1].is_current)
            lost = []
            monkeypatch.setattr(two[2], "lost", lambda lose=two[2].lost: lost.append(lose()))
            began, number = time.monotonic(), 0
            while time.monotonic() < began + 2.5:
                busy.append(piece(f"d{number}", 0, [1]))
                number += 1
                time.sleep(0.01)
            assert not lost
            assert two[1].is_current


def test_only_the_same_credentials_meet(server, node):
    namespace = Namespace(server.settings)
    namespace.redis.execute_command("ACL", "SETUSER", "other", "reset", "on", ">pass", "~*", "+@all")
    other = Namespace(replace(server.settings, username="other", password="pass"), namespace.keys.namespace)
    with followed(namespace, node) as one, followed(other, node) as two:
        assert until(lambda: one[1].is_current and two[1].is_current)
        assert one[2]._node._pump is not None
        assert two[2]._node._pump is not None


def test_garbage_ends_only_its_own_connection(server, node):
    namespace = Namespace(server.settings)
    with followed(namespace, node) as (documents, reader, feed):
        assert until(lambda: reader.is_current)
        (path,) = node.glob("*.socket")
        for said in (b"\xff\xff\xff\xff", b"\0\0\0\4abcd", b"\0\0\0\1\x00", b"\0\0"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(path))
                peer.sendall(said)
                peer.settimeout(20)
                if said != b"\0\0":
                    while peer.recv(4096):
                        pass
        assert until(lambda: not feed._node._peers)
        namespace.append(piece("a", 0, [1]))
        assert until(lambda: documents.contents == contents([piece("a", 0, [1])]))


def test_an_absent_server_is_waited_for_and_closing_takes_no_time(tmp_path):
    feed = LogFeed(ConnectionSettings("redis://127.0.0.1:1"), tmp_path)
    feed.follow(Namespace(ConnectionSettings("redis://127.0.0.1:1")).store, 8, 0.02, lambda: None)
    time.sleep(0.3)
    began = time.monotonic()
    assert feed.close(5)
    assert time.monotonic() - began < 1.0

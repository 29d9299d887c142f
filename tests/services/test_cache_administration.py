"""The administration of the shared cache on real servers: what goes in comes out, and what is purged is gone.

Covers also `cache_service.admin.namespace_contents`.
"""

import json
import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_service.admin.administration import CacheAdministration
from cache_service.admin.audit_log import AuditLog
from cache_service.admin.purge import Purge
from cache_service.errors import (
    AuditError,
    NamespaceBusy,
    NamespaceUnknown,
    NamespaceUnread,
    StoreRefused,
    StoreUnavailable,
)
from cache_service.formats.documents import Piece, RecordKind, assemble, content_id
from cache_service.formats.earnings import Earnings
from cache_service.formats.entry_codec import encode_entry
from cache_service.formats.export_format import decode_piece, encode_piece
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.manifest import Manifest
from cache_service.formats.purged_times import PurgedTimes, TimeRange
from cache_service.formats.store_keys import StoreKeys
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.index.index_files import index_name
from cache_service.index.warm_index import WarmIndex
from cache_service.log.compactor import Compactor, CompactorSettings
from cache_service.log.earnings_ledger import EarningsLedger
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.follower import Follower, FollowerSettings
from cache_service.log.publisher import Publisher, PublisherSettings
from cache_service.store.admin_store import AdminStore
from cache_service.store.connection import Connection, ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer
from paceline_testing.cache_stores import FINGERPRINT, Documents, Namespace, contents, kill, piece, until

RING = KeyRing({1: b"1" * 32})
ON_ONE_SERVER = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def administration(namespace, **arguments):
    return CacheAdministration(namespace.connection, namespace.ring, **arguments)


def fold(namespace, **limits):
    compactor = Compactor(namespace.store, namespace.codec, CompactorSettings(limits=FoldLimits(**limits)))
    while compactor.fold():
        pass
    compactor.release()
    return compactor


def document(*tokens):
    token_ids = np.array(tokens, np.int32)
    return Piece(content_id(token_ids), 0, token_ids, RecordKind.IMPORTED, 1_000)


def keys_of(namespace):
    """Every key of the whole server that has anything to do with a namespace."""
    return sorted(
        key.decode().rpartition("}:")[2]
        for key in namespace.redis.scan_iter(count=1000)
        if f":{namespace.keys.namespace}}}:".encode() in key
    )


token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
any_pieces = st.lists(
    st.builds(
        lambda name, offset, tokens, kind, time_s: piece(name, offset, tokens, time_s, kind),
        st.sampled_from("abc"),
        st.integers(0, 2**31 - 1 - 20),
        token_lists,
        st.integers(0, 255),
        st.integers(0, 2**32 - 1),
    ),
    max_size=12,
)


@ON_ONE_SERVER
@given(pieces=any_pieces, folds_at=st.sets(st.integers(0, 11)))
def test_what_is_exported_and_imported_is_the_same(shared_server, pieces, folds_at):
    source, target = Namespace(shared_server.settings, ring=RING), Namespace(shared_server.settings)
    with closing(source.connection), closing(target.connection):
        for row, part in enumerate(pieces):
            source.append(part)
            if row in folds_at:
                fold(source, segment_tokens=30)
        exported = administration(source).export(source.keys).pieces if pieces else []
        lines = [encode_piece(part) for part in exported]
        assert contents(exported) == source.read()[0].contents
        added = administration(target).import_documents(target.keys, map(decode_piece, lines))
        assert (added.documents, added.known_documents) == (len(exported), 0)
        assert target.read()[0].contents == contents(exported)
        assert [part.time_s for part in assemble(exported)] == [part.time_s for part in exported]
        again = administration(target).import_documents(target.keys, map(decode_piece, lines))
        assert (again.documents, again.known_documents, again.stored_bytes) == (0, len(exported), 0)
        assert target.read()[0].contents == contents(exported)


def test_an_import_that_broke_off_goes_on_where_it_ended(namespace):
    admin = administration(namespace)
    given_documents = [document(*range(number, number + 50)) for number in range(40)]

    def broken():
        yield from given_documents[:25]
        raise RuntimeError("the file cannot be read any further")

    with pytest.raises(RuntimeError):
        admin.import_documents(namespace.keys, broken())
    assert namespace.read()[0].contents == contents(given_documents[:25])
    result = admin.import_documents(namespace.keys, given_documents)
    assert (result.documents, result.known_documents) == (15, 25)
    assert (result.tokens, result.known_tokens) == (15 * 50, 25 * 50)
    assert namespace.read()[0].contents == contents(given_documents)


def test_a_long_import_is_folded_as_it_goes_and_tells_what_had_no_room(namespace):
    admin = administration(namespace, limits=FoldLimits(generation_tokens=2**20, max_generations=2))
    rng = np.random.default_rng(0)
    parts = [document(*rng.integers(0, 50_000, 2**18)) for _ in range(12)]
    result = admin.import_documents(namespace.keys, parts)
    assert (result.documents, result.tokens) == (12, 12 * 2**18)
    assert result.dropped_generations == 2
    left = namespace.read()[0].contents
    assert left == contents(parts[-4:])
    assert AdminStore(namespace.connection, namespace.keys).log_length() < 300
    ttls = [
        namespace.redis.ttl(namespace.keys.key(kind)) for kind in keys_of(namespace) if kind in ("epoch", "manifest")
    ]
    assert min(ttls) > 300 * 24 * 3600, "what was imported does not come back by itself"


def test_what_was_imported_for_long_lives_on_when_traffic_writes_beside_it(namespace):
    administration(namespace).import_documents(namespace.keys, [document(1, 2, 3)], keep_s=1_000_000)
    for number in range(3):
        frame = encode_entry(namespace.codec, [piece(f"d{number}", 0, [4, 5, 6])])
        namespace.store.append([frame], 1_000, keep_s=60)
        compactor = Compactor(namespace.store, namespace.codec, CompactorSettings(keep_s=60, retire_s=60))
        assert not compactor.fold()
        compactor.release()
    assert namespace.store.append_in_epoch(namespace.store.begin_epoch(60), frame, 1_000, 60)
    manifest = Manifest.decode(namespace.codec, namespace.store.read_manifest().frame)
    live = {f"segment:{entry.digest}" for entry in manifest.segments}
    for kind in ("epoch", "log", "manifest", *live):
        assert 999_000 < namespace.redis.ttl(namespace.keys.key(kind)) <= 1_000_000, kind
    retired = [kind for kind in keys_of(namespace) if kind.startswith("segment:") and kind not in live]
    assert retired
    assert all(namespace.redis.ttl(namespace.keys.key(kind)) <= 60 for kind in retired)


def test_traffic_gives_a_namespace_the_time_it_wants_and_no_more(namespace):
    frame = encode_entry(namespace.codec, [piece("d", 0, [4, 5, 6])])
    for keep_s in (60, 600):
        namespace.store.append([frame], 1_000, keep_s=keep_s)
        for kind in ("epoch", "log"):
            assert keep_s - 30 < namespace.redis.ttl(namespace.keys.key(kind)) <= keep_s


@pytest.mark.parametrize("is_folded", [True, False])
def test_nothing_is_imported_unencrypted_beside_what_is_encrypted(shared_server, is_folded):
    """The cluster, which has keys, would not read it, and in Redis it would lie open."""
    namespace = Namespace(shared_server.settings, ring=RING)
    namespace.append(piece("a", 0, [1]))
    if is_folded:
        fold(namespace)
        namespace.redis.delete(namespace.keys.log)
    without_key = CacheAdministration(namespace.connection)
    with pytest.raises(NamespaceUnread, match="cannot be read here: a frame is encrypted with key 1; this side has no"):
        without_key.import_documents(namespace.keys, [document(2, 3)])
    assert namespace.redis.xlen(namespace.keys.log) == (0 if is_folded else 1)
    assert administration(namespace).import_documents(namespace.keys, [document(2, 3)]).documents == 1
    assert namespace.read()[0].num_tokens == 3


def test_documents_are_known_by_what_they_say(namespace):
    admin = administration(namespace)
    result = admin.import_documents(namespace.keys, [document(1, 2, 3), document(1, 2, 3), document(1, 2)])
    assert (result.documents, result.known_documents) == (2, 1)


def test_followers_draft_from_an_import_at_once(namespace):
    documents = Documents()
    follower = Follower(namespace.open, FollowerSettings(poll_s=0.01, idle_poll_s=0.02))
    follower.follow(namespace.keys.namespace, documents)
    try:
        administration(namespace).import_documents(namespace.keys, [document(1, 2, 3)])
        assert until(lambda: documents.contents == contents([document(1, 2, 3)]))
    finally:
        assert follower.close(20)


@ON_ONE_SERVER
@given(pieces=any_pieces, folds_at=st.sets(st.integers(0, 11)), encrypted=st.booleans())
def test_a_purge_leaves_nothing(shared_server, pieces, folds_at, encrypted):
    namespace = Namespace(shared_server.settings, ring=RING if encrypted else None)
    other = Namespace(shared_server.settings, namespace.keys.namespace + "-other")
    with closing(namespace.connection), closing(other.connection):
        other.append(piece("a", 0, [7]))
        namespace.append(piece("first", 0, [1]))
        for row, part in enumerate(pieces):
            namespace.append(part)
            if row in folds_at:
                fold(namespace, segment_tokens=30)
        namespace.redis.set(namespace.keys.key("soft2:log"), "what another part has learnt")
        AdminStore(namespace.connection, namespace.keys).add_earnings(Earnings(1, 1, 2, 1))
        administration(namespace).purge(namespace.keys)
        assert (keys_of(namespace), namespace.read()[0].contents) == (["purges"], {})
        assert other.read()[0].contents == contents([piece("a", 0, [7])])
        assert 0 < namespace.redis.ttl(namespace.keys.purges) <= 3600
        with pytest.raises(NamespaceUnknown):
            administration(namespace).purge(namespace.keys)


@pytest.mark.parametrize("purged", [TimeRange(), TimeRange(0, 2_000)], ids=["all", "some time"])
def test_a_purge_takes_indexes_along_that_nobody_uses_any_more(namespace, tmp_path, purged):
    other = Namespace(namespace.connection.settings)
    settings = WarmIndexSettings(directory=tmp_path / "index", base_tokens=50)
    for each in (namespace, other):
        each.append(piece("d", 0, range(100)))
        fold(each)
        index = WarmIndex(namespace.open, settings)
        index.follow(each.keys.namespace)
        assert until(lambda index=index: index.stats().builds == 1 and index.stats().tokens >= 100)
        assert index.close(20)
    left = {path.name for path in settings.directory.glob("*-*") if path.is_dir()}
    assert len(left) == 2
    administration(namespace, index_directory=settings.directory).acting_for("me").purge(namespace.keys, purged)
    left = [path.name for path in settings.directory.iterdir() if path.is_dir()]
    assert [name.partition("-")[0] for name in left] == [index_name(other.keys)]


def test_followers_forget_what_is_purged_and_follow_what_comes_after(namespace):
    documents = Documents()
    follower = Follower(namespace.open, FollowerSettings(poll_s=0.01, idle_poll_s=0.02))
    namespace.append(piece("a", 0, [1, 2, 3]))
    fold(namespace)
    namespace.append(piece("a", 3, [4]))
    follower.follow(namespace.keys.namespace, documents)
    try:
        assert until(lambda: documents.contents == contents([piece("a", 0, [1, 2, 3, 4])]))
        administration(namespace).purge(namespace.keys)
        assert until(lambda: documents.contents == {})
        namespace.append(piece("b", 0, [5]))
        assert until(lambda: documents.contents == contents([piece("b", 0, [5])]))
    finally:
        assert follower.close(20)


def test_a_compactor_that_was_at_work_brings_nothing_back(namespace):
    namespace.append(piece("a", 0, [1, 2, 3]))
    before, after = (Compactor(namespace.store, namespace.codec) for _ in range(2))
    prepared = before.prepare()
    before.release()
    token = namespace.store.acquire_lease(after._owner, 30_000)
    epoch = namespace.store.begin_epoch()
    administration(namespace).purge(namespace.keys)
    assert not before.commit(prepared)
    entry, *_ = prepared.manifest.segments
    assert not namespace.store.write_segment(entry.digest, b"anything", 60, token, epoch), "between purge and new data"
    assert keys_of(namespace) == ["purges"]
    namespace.append(piece("b", 0, [4]))
    assert not namespace.store.write_segment(entry.digest, b"anything", 60, token, epoch)
    fold(namespace)
    assert namespace.read()[0].contents == contents([piece("b", 0, [4])])


def test_a_publisher_drops_what_it_still_held_of_the_purged_time(namespace):
    name, part = namespace.keys.namespace, piece("a", 0, range(100))
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=60, entry_tokens=16_384))
    namespace.append(piece("b", 0, [1]))
    publisher.publish(name, part.document_id, 0, part.token_ids)
    administration(namespace).purge(namespace.keys)
    assert until(
        lambda: (
            int(time.time() - 0.1) > PurgedTimes.decode(namespace.redis.get(namespace.keys.purges)).ranges[0].until_s
        )
    )
    publisher.publish(name, part.document_id, 100, [7, 8, 9])
    assert publisher.close(20)
    assert (publisher.counters.purged_tokens, publisher.counters.written_tokens) == (100, 3)
    assert namespace.read()[0].contents == contents([piece("a", 100, [7, 8, 9])])


def test_a_clock_that_is_ahead_lets_nothing_escape_a_purge(namespace, monkeypatch):
    ahead = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    for module in ("log.publisher", "admin.purge"):
        monkeypatch.setattr(f"cache_service.{module}.time", ahead)
    name, part = namespace.keys.namespace, piece("a", 0, range(10))
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=60, entry_tokens=16_384))
    namespace.append(piece("b", 0, [1]))
    publisher.publish(name, part.document_id, 0, part.token_ids)
    administration(namespace).purge(namespace.keys)
    assert PurgedTimes.decode(namespace.redis.get(namespace.keys.purges)).ranges[0].until_s <= time.time() + 2
    assert publisher.close(20)
    assert (publisher.counters.purged_tokens, publisher.counters.written_tokens) == (10, 0)


def test_a_purge_whose_note_is_lost_lets_nothing_back_in(namespace):
    name, part = namespace.keys.namespace, piece("a", 0, range(200))
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=0.01, entry_tokens=100))
    publisher.publish(name, part.document_id, 0, part.token_ids[:10])
    assert until(lambda: publisher.counters.written_tokens == 10)
    with paused(publisher):
        for begin in range(10, 200, 10):  # more than one entry holds
            publisher.publish(name, part.document_id, begin, part.token_ids[begin : begin + 10])
        administration(namespace).purge(namespace.keys)
        namespace.redis.delete(namespace.keys.purges)
        time.sleep(1.1)  # younger ones would be kept
    assert until(lambda: publisher.counters.purged_tokens == 190)
    publisher.publish(name, part.document_id, 200, [7, 8, 9])
    assert publisher.close(20)
    assert publisher.counters.written_tokens == 10 + 3
    assert namespace.read()[0].contents == contents([piece("a", 200, [7, 8, 9])])


@contextmanager
def paused(publisher):
    """Whatever is published meanwhile waits."""
    opened = publisher._write
    publisher._write = lambda taken: taken
    try:
        yield
    finally:
        publisher._write = opened


def test_a_publisher_goes_on_when_a_purge_is_forgotten(namespace):
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=0.01))
    namespace.redis.set(namespace.keys.purges, PurgedTimes((TimeRange(0, 5),)).encode())
    for row in range(2):
        publisher.publish(namespace.keys.namespace, piece("a", 0, [1]).document_id, row, [row])
        assert until(lambda row=row: publisher.counters.written_tokens == row + 1)
        namespace.redis.delete(namespace.keys.purges)
    assert publisher.close(20)
    assert publisher.counters.purged_tokens == publisher.counters.refused_tokens == 0


@ON_ONE_SERVER
@given(
    times=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    folds_at=st.sets(st.integers(0, 11)),
    since_s=st.integers(0, 30),
    length_s=st.integers(0, 30),
)
def test_a_purge_of_some_time_takes_what_was_learnt_then_and_nothing_else(
    shared_server, times, folds_at, since_s, length_s
):
    namespace = Namespace(shared_server.settings)
    with closing(namespace.connection):
        given_pieces = [piece(f"d{row}", 0, [row] * 5, time_s) for row, time_s in enumerate(times)]
        for row, part in enumerate(given_pieces):
            namespace.append(part)
            if row in folds_at:
                fold(namespace, segment_tokens=12, generation_tokens=20, max_generations=100)
        namespace.redis.set(namespace.keys.key("soft2:log"), "sums of all times")
        purged = TimeRange(since_s, since_s + length_s)
        documents = Documents()
        reader = namespace.reader(documents)
        while reader.step():
            pass
        epoch = namespace.store.read_manifest().epoch
        result = administration(namespace).purge(namespace.keys, purged)
        kept = [part for part in given_pieces if not purged.covers(part.time_s)]
        assert result.tokens == 5 * (len(given_pieces) - len(kept))
        assert namespace.read()[0].contents == contents(kept)
        assert namespace.store.read_manifest().epoch != epoch
        while reader.step():
            pass
        assert (documents.contents, documents.num_resets) == (contents(kept), 1)
        assert "soft2:log" not in keys_of(namespace)
        checked = administration(namespace).verify(namespace.keys)
        assert (checked.problems, checked.unused_segments, checked.tokens) == ((), 0, 5 * len(kept))
        namespace.append(piece("later", 0, [9], 40))
        fold(namespace)
        assert namespace.read()[0].contents == contents([*kept, piece("later", 0, [9], 40)])


def test_what_cannot_be_read_is_not_purged_by_its_time(namespace):
    encrypted = Namespace(namespace.connection.settings, namespace.keys.namespace, RING)
    for step in (lambda: None, lambda: fold(encrypted)):
        encrypted.append(piece("a", 0, [1]))
        step()
        with pytest.raises(NamespaceUnread, match="purge all of it"):
            administration(namespace).purge(namespace.keys, TimeRange(0, 10))
        assert encrypted.read()[0].num_tokens == 1
    administration(namespace).purge(namespace.keys)
    assert keys_of(namespace) == ["purges"]


@pytest.mark.parametrize("times", [TimeRange(), TimeRange(0, 10)], ids=["all", "some"])
def test_of_two_purges_at_once_the_later_goes_on(namespace, times):
    namespace.append(piece("a", 0, [1], 5))

    class Overtaken(AdminStore):
        def note_purge(self, purged, keep_s):
            self.seize_lease("another", 60_000)
            return super().note_purge(purged, keep_s)

    purge = Purge(Overtaken(namespace.connection, namespace.keys), namespace.codec)
    with pytest.raises(NamespaceBusy):
        purge.everything() if times.is_all else purge.learnt_in(times)
    assert namespace.read()[0].num_tokens == 1
    assert namespace.redis.get(namespace.keys.lease) == b"another", "it is not released for somebody else"


def test_of_many_purges_at_once_one_at_least_is_done_and_the_others_say_why(shared_server):
    namespace = Namespace(shared_server.settings)
    connections = [Connection(shared_server.settings) for _ in range(4)]
    told = []

    def purge(connection):
        try:
            told.append(CacheAdministration(connection).purge(namespace.keys).keys > 0)
        except (NamespaceBusy, NamespaceUnknown) as error:
            told.append(str(error))

    try:
        for _ in range(5):
            told.clear()
            namespace.append(piece("a", 0, [1]))
            threads = [threading.Thread(target=purge, args=(connection,)) for connection in connections]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(told) == len(threads)
            assert True in told
            assert keys_of(namespace) == ["purges"]
    finally:
        for connection in [*connections, namespace.connection]:
            connection.close()


def test_a_purge_that_another_overtakes_at_its_note_is_noted_all_the_same(namespace):
    """Every try finds that somebody has just noted another one, but for the last."""
    admin, other = AdminStore(namespace.connection, namespace.keys), Connection(namespace.connection.settings)
    noted = iter(range(1, 4))

    class Overtaken(AdminStore):
        def _noted_purges(self, client):
            found = super()._noted_purges(client)
            if (second := next(noted, None)) is not None:
                AdminStore(other, self.keys).note_purge(TimeRange(second, second), 60)
            return found

    found = Overtaken(namespace.connection, namespace.keys).note_purge(TimeRange(10, 20), 60)
    other.close()
    assert [purged.since_s for purged in found.ranges] == [1, 2, 3, 10]
    assert admin.note_purge(TimeRange(30, 30), 60).ranges[:4] == found.ranges


def test_a_full_server_can_be_purged(tmp_path):
    with EmbeddedServer(tmp_path, extra=("maxmemory-policy noeviction",)) as server:
        namespace = Namespace(server.settings)
        rng = np.random.default_rng(0)
        for row in range(40):
            namespace.append(piece(f"{row}", 0, rng.integers(0, 2**31 - 1, 4096)))
        fold(namespace, segment_tokens=40_000)
        for row in range(40):
            namespace.append(piece(f"{row}", 1, rng.integers(0, 2**31 - 1, 4096)))
        used = namespace.redis.info("memory")["used_memory"]
        namespace.redis.config_set("maxmemory", used - 500_000)
        with pytest.raises(StoreRefused):
            namespace.append(piece("more", 0, [1]))
        assert administration(namespace).purge(namespace.keys).keys > 3
        assert keys_of(namespace) == ["purges"]
        namespace.append(piece("more", 0, [1]))
        assert namespace.read()[0].num_tokens == 1
        namespace.connection.close()


@pytest.mark.parametrize("kind", ["epoch", "log", "manifest", "lease", "fence", "purges", "earnings", "segment:x"])
@pytest.mark.parametrize("puts", ["a set", "garbage"])
def test_a_namespace_with_something_else_in_place_of_a_key_can_be_purged(namespace, kind, puts):
    namespace.append(piece("a", 0, [1]))
    fold(namespace)
    key = namespace.keys.key(kind)
    namespace.redis.delete(key)
    if puts == "a set":
        namespace.redis.sadd(key, "x")
    else:
        namespace.redis.set(key, b"garbage \xff")
    administration(namespace).purge(namespace.keys)
    assert keys_of(namespace) == ["purges"]
    namespace.append(piece("b", 0, [2]))
    assert namespace.read()[0].num_tokens == 1


def test_list_and_stats(namespace):
    admin = administration(namespace)
    with pytest.raises(NamespaceUnknown, match="no namespace"):
        admin.stats(namespace.keys)
    namespace.append(piece("a", 0, [1, 2, 3], 1_000), piece("a", 10, [4], 3_000))
    fold(namespace)
    namespace.append(piece("b", 0, [5, 6], 2_000))
    ledger = EarningsLedger(lambda name: AdminStore(namespace.connection, StoreKeys(FINGERPRINT, name)), flush_s=3600)
    for earnings in (Earnings(10, 5, 20, 15, 40, 10, 8), Earnings(0, 0, 5, 5, proposed_better=4, right_better=3)):
        ledger.add(namespace.keys.namespace, earnings)
    ledger.add("no name for a namespace", Earnings(1))
    ledger.flush()
    assert ledger.close(20)
    assert ledger.dropped == 1
    (summary,) = [found for found in admin.namespaces() if found.namespace == namespace.keys.namespace]
    assert summary.memory_bytes > 0
    assert 0 < summary.expires_in_s <= 7 * 24 * 3600
    assert admin.find(namespace.keys.namespace) == [namespace.keys]
    with pytest.raises(NamespaceUnknown, match="of model 'other'"):
        admin.find(namespace.keys.namespace, "other")
    stats = admin.stats(namespace.keys)
    assert (stats.documents, stats.phrases, stats.tokens) == (2, 3, 6)
    assert (stats.segments, stats.generations, stats.manifest_version, stats.log_entries) == (1, 1, 1, 2)
    assert (stats.first_s, stats.last_s, stats.unread) == (1_000, 3_000, 0)
    assert (stats.earnings.hit_rate, stats.earnings.tokens_per_round) == (0.5, 20 / 25)
    assert stats.earnings.shares_right == {"as expected": 0.25, "worse": 0.0, "better": 0.75}


def test_earnings_wait_for_a_server_that_is_away(tmp_path):
    with EmbeddedServer(tmp_path) as server:
        namespace = Namespace(server.settings, "a")
        admin = AdminStore(namespace.connection, namespace.keys)
        ledger = EarningsLedger(lambda _: admin, flush_s=0.01)
        kill(server)
        ledger.add("a", Earnings(1, 1, 2, 3))
        ledger.flush()
        ledger.add("a", Earnings(1, 0, 5, 0))
        server.restart()
        assert until(lambda: admin.read_earnings() == Earnings(2, 1, 7, 3))
        assert ledger.close(20)
        assert ledger.dropped == 0


def test_earnings_that_have_to_wait_hold_up_no_others_for_long(namespace):
    away = AdminStore(Connection(ConnectionSettings("redis://127.0.0.1:1")), namespace.keys)
    here = AdminStore(namespace.connection, namespace.keys)
    asked = []

    def open_namespace(name):
        asked.append(name)
        return here if name == "here" else away

    ledger = EarningsLedger(open_namespace, flush_s=3600)
    assert until(lambda: ledger._turns._due["flush"] > 0)
    for name in ("away", "here"):
        ledger.add(name, Earnings(1, 0, 5, 0))
    ledger.flush()
    assert asked == ["away"]
    ledger.flush()
    assert asked == ["away", "here", "away"]
    assert here.read_earnings() == Earnings(1, 0, 5, 0)
    assert ledger.close(20)
    assert ledger.dropped == 0


def test_a_namespace_of_bookkeeping_alone_is_none(namespace):
    namespace.store.begin_epoch()
    assert not Compactor(namespace.store, namespace.codec).fold()
    assert "fence" in keys_of(namespace)
    assert namespace.keys.namespace not in [found.namespace for found in administration(namespace).namespaces()]


def test_compact_folds_what_is_there_unless_somebody_else_does(namespace):
    admin = administration(namespace)
    for row in range(5):
        namespace.append(piece("a", row, [row]))
    other = Compactor(namespace.store, namespace.codec)
    other.prepare()
    assert admin.compact(namespace.keys).is_busy
    other.release()
    result = admin.compact(namespace.keys)
    assert (result.is_busy, result.folds, result.folded_entries) == (False, 1, 5)
    assert namespace.read()[1].segments == 1


def test_verify_names_every_damaged_object(namespace):
    admin = administration(namespace)
    for row in range(4):
        namespace.append(piece(f"d{row}", 0, [row] * 30))
        fold(namespace, segment_tokens=30)
    namespace.append(piece("last", 0, [1]))
    checked = admin.verify(namespace.keys)
    assert checked.problems == ()
    assert (checked.objects, checked.tokens) == (1 + 4 + 3, 4 * 30 + 2 * 30 + 1), (
        "entries of the last folds are in the log, too"
    )
    digests = [kind for kind in keys_of(namespace) if kind.startswith("segment:")]
    assert len(digests) == 4
    redis, key = namespace.redis, namespace.keys.key
    redis.setrange(key(digests[0]), 40, b"x")
    redis.delete(key(digests[1]))
    redis.append(key(digests[2]), b"more")
    redis.persist(key(digests[3]))
    redis.set(key("segment:" + "0" * 64), b"garbage", ex=60)
    redis.xadd(key("log"), {b"e": b"garbage"})
    problems = {problem.kind: problem.detail for problem in admin.verify(namespace.keys).problems}
    assert problems.keys() == {*digests, "segment:" + "0" * 64, "log"}
    assert "other bytes" in problems[digests[0]]
    assert problems[digests[1]] == "it is missing"
    assert "the manifest says" in problems[digests[2]]
    assert problems[digests[3]] == "it never expires"
    redis.hset(key("manifest"), "body", b"garbage")
    assert "manifest" in {problem.kind for problem in admin.verify(namespace.keys).problems}


def test_actions_are_told_with_who_did_them_and_how_they_ended(namespace, tmp_path):
    audit = AuditLog(tmp_path / "new" / "audit.jsonl", clock=lambda: 0.0)
    admin = administration(namespace, audit=audit).acting_for("somebody")
    admin.import_documents(namespace.keys, [document(77_777)])
    admin.export(namespace.keys)
    admin.purge(namespace.keys, TimeRange(5, 6))
    with pytest.raises(NamespaceUnknown):
        admin.export(Namespace(namespace.connection.settings, "absent").keys)
    text = audit.path.read_text()
    assert "77777" not in text
    assert audit.path.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["actor"] for line in lines} == {"somebody"}
    assert {line["time"] for line in lines} == {"1970-01-01T00:00:00.000+00:00"}
    assert [(line["action"], line["outcome"]) for line in lines] == [
        (action, outcome) for action in ("import", "export", "purge") for outcome in ("begun", "done")
    ] + [("export", "begun"), ("export", "failed")]
    assert lines[1]["tokens"] == 1
    assert (lines[4]["since_s"], lines[4]["until_s"]) == (5, 6)
    assert "NamespaceUnknown" in lines[-1]["reason"]


def test_nothing_is_done_that_cannot_be_told(namespace, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditError, match="cannot be written"):
        AuditLog(tmp_path / "file" / "audit.jsonl")


def test_an_administrator_hears_of_an_outage(tmp_path):
    with EmbeddedServer(tmp_path) as server:
        namespace = Namespace(server.settings, "a")
    with pytest.raises(StoreUnavailable):
        administration(namespace).namespaces()

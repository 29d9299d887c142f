"""Log, segments and readers on real servers: what is appended is what is read, whatever was folded, lost or forged.

Covers `cache_service.log.fenced_fold` and `cache_service.log.payload` with both payloads.
"""

import itertools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from cache_service.counts.soft_compactor import SoftCompactor
from cache_service.errors import StoreRefused
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.manifest import Manifest
from cache_service.log.compactor import Compactor, CompactorSettings, CompactorThread
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.follower import Follower, FollowerSettings
from cache_service.log.publisher import Publisher, PublisherSettings
from cache_service.store.embedded_server import EmbeddedServer
from paceline_testing.cache_stores import Documents, Namespace, catch_up, contents, piece, until

RING = KeyRing({1: b"1" * 32})


def compactor(namespace, clock=lambda: 1_000.0, **limits):
    return Compactor(namespace.store, namespace.codec, CompactorSettings(limits=FoldLimits(**limits)), clock)


def fold_all(compactor):
    while compactor.fold():
        pass


def append_each(namespace, pieces, folding=None):
    """Each as an entry of its own, and folded before the next one if there is a compactor."""
    for part in pieces:
        namespace.append(part)
        if folding is not None:
            fold_all(folding)


def random_pieces(seed, count, documents=5):
    rng = np.random.default_rng(seed)
    ends = dict.fromkeys(range(documents), 0)
    made = []
    for _ in range(count):
        document, length = int(rng.integers(documents)), int(rng.integers(1, 40))
        made.append(piece(f"{seed}-{document}", ends[document], rng.integers(0, 50_000, length)))
        ends[document] += length
    return made


@pytest.mark.parametrize("ring", [None, RING], ids=["plain", "encrypted"])
def test_what_is_published_is_followed_and_survives_folding(shared_server, ring):
    namespace = Namespace(shared_server.settings, ring=ring)
    documents = Documents()
    follower = Follower(namespace.open, FollowerSettings(poll_s=0.01, idle_poll_s=0.02))
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=0.01, entry_tokens=64))
    folding = CompactorThread(namespace.open, CompactorSettings(fold_every_s=0.02))
    try:
        follower.follow(namespace.keys.namespace, documents)
        compacting = folding.compact(namespace.keys.namespace)
        given = random_pieces(1, 200)
        for part in given:
            publisher.publish(namespace.keys.namespace, part.document_id, part.offset, part.token_ids)
        assert publisher.close(20)
        assert until(lambda: documents.contents == contents(given))
        assert until(lambda: compacting.counters.folds > 0)
    finally:
        assert follower.close(10)
        assert folding.close(10)
    assert publisher.counters.written_tokens == publisher.counters.published_tokens == documents.num_tokens
    late, counters = namespace.read()
    assert late.contents == contents(given)
    assert counters.segments > 0
    assert not counters.corrupt_segments + counters.corrupt_entries + counters.missing_segments


def test_a_warm_start_is_a_full_replay(namespace):
    given = random_pieces(2, 120)
    append_each(namespace, given[:40])
    replayed, _ = namespace.read()
    assert replayed.contents == contents(given[:40])
    folding = compactor(namespace, segment_tokens=300)
    append_each(namespace, given[40:], folding)
    warm, counters = namespace.read()
    assert warm.contents == contents(given)
    assert counters.segments > 3
    assert counters.entries < 10, "the log has been trimmed"
    cold, counters = namespace.read(warm_tokens=0)
    assert counters.segments == 0
    assert cold.num_tokens < warm.num_tokens


def test_data_survive_a_restart_of_the_server(engine, tmp_path):
    given = random_pieces(3, 30)
    with EmbeddedServer(tmp_path, engine) as server:
        namespace = Namespace(server.settings, "tenant")
        append_each(namespace, given[:20])
        fold_all(compactor(namespace))
        append_each(namespace, given[20:])
    with EmbeddedServer(tmp_path, engine) as server:
        documents, counters = Namespace(server.settings, "tenant").read()
    assert documents.contents == contents(given)
    assert counters.segments == 1


@pytest.mark.parametrize("goes_on", [False, True])
def test_restored_old_data_are_noticed(namespace, goes_on):
    """The epoch is the old one; the reader's place in the log is not there."""
    documents = Documents()
    reader = namespace.reader(documents)
    namespace.append(piece("a", 0, [1]))
    backup = namespace.redis.dump(namespace.keys.log)
    namespace.append(piece("a", 1, [2]))
    catch_up(reader)
    namespace.redis.restore(namespace.keys.log, 0, backup, replace=True)
    given = [piece("a", 0, [1])]
    if goes_on:
        given.append(piece("b", 0, [3]))
        time.sleep(0.002)  # ids are milliseconds: within one, the lost entry's id would come again
        namespace.append(given[-1])
    catch_up(reader)
    assert (documents.num_resets, documents.contents) == (1, contents(given))


def test_a_restored_old_manifest_is_noticed_by_readers_and_compactors(namespace):
    documents = Documents()
    reader, folding = namespace.reader(documents), compactor(namespace)
    namespace.append(piece("a", 0, [1]))
    fold_all(folding)
    backup = namespace.redis.dump(namespace.keys.manifest)
    namespace.append(piece("a", 1, [2]))
    fold_all(folding)
    catch_up(reader)
    namespace.redis.restore(namespace.keys.manifest, 0, backup, replace=True)
    catch_up(reader)
    assert documents.num_resets == 1
    assert documents.contents == contents([piece("a", 0, [1, 2])]), "the log still has the rest"
    namespace.append(piece("a", 2, [3]))
    fold_all(folding)
    assert namespace.read()[0].contents == contents([piece("a", 0, [1, 2, 3])])


def test_a_reader_that_is_overtaken_while_it_starts_begins_again(namespace):
    """Between its manifest and its first look at the log, the log is trimmed past it."""
    documents = Documents()
    reader, folding = namespace.reader(documents), compactor(namespace)
    given = random_pieces(9, 12)
    for row, part in enumerate(given):
        namespace.append(part)
        fold_all(folding)
        if row == 3:
            reader.step()
    catch_up(reader)
    assert documents.contents == contents(given)


def test_a_slow_reader_of_a_trimmed_log_begins_again_and_misses_nothing(namespace):
    documents = Documents()
    reader, folding = namespace.reader(documents), compactor(namespace)
    given = random_pieces(5, 30)
    append_each(namespace, given[:4])
    catch_up(reader)
    append_each(namespace, given[4:], folding)
    assert folding.counters.trimmed_entries > 10
    catch_up(reader)
    assert documents.num_resets == 1
    assert documents.contents == contents(given)


def test_a_reader_that_keeps_up_is_never_reset_by_folds(namespace):
    documents = Documents()
    reader, folding = namespace.reader(documents), compactor(namespace)
    for part in random_pieces(6, 30):
        namespace.append(part)
        fold_all(folding)
        catch_up(reader)
    assert documents.num_resets == 0
    assert folding.counters.trimmed_entries > 20


def test_a_log_that_overflows_loses_its_oldest_entries_only(shared_server):
    namespace = Namespace(shared_server.settings, max_log_entries=1)
    documents = Documents()
    reader = namespace.reader(documents)
    given = random_pieces(7, 400)
    append_each(namespace, given[:3])
    catch_up(reader)
    append_each(namespace, given[3:])
    catch_up(reader)
    assert documents.num_resets == 1
    assert 0 < documents.num_tokens < sum(len(part.token_ids) for part in given)
    namespace.append(piece("last", 0, [1]))
    catch_up(reader)
    assert documents.num_resets == 1


def test_old_generations_are_dropped_whole_in_redis_and_in_readers(namespace):
    documents = Documents()
    reader = namespace.reader(documents)
    folding = compactor(namespace, generation_tokens=10, max_generations=3)
    for number in range(6):
        namespace.append(piece(f"d{number}", 0, range(10)))
        fold_all(folding)
        catch_up(reader)
    kept = contents([piece(f"d{number}", 0, range(10)) for number in (4, 5)])
    assert namespace.read()[0].contents == kept
    assert (documents.contents, documents.num_resets) == (kept, 0)
    assert folding.counters.dropped_generations == 4
    sleeper = Documents()
    asleep = namespace.reader(sleeper)
    catch_up(asleep)
    append_each(namespace, [piece(f"d{number}", 0, range(10)) for number in range(6, 12)], folding)
    catch_up(asleep)
    assert sleeper.num_resets == 1
    assert sleeper.contents == contents([piece(f"d{number}", 0, range(10)) for number in (10, 11)])


def test_what_was_said_twice_outlives_its_generation_once(namespace):
    """How often and how lately something was said both count: said again in its next life, it stays on."""
    folding = compactor(namespace, generation_tokens=40, max_generations=2)
    name = itertools.count()

    def say(*texts):
        for text in texts:
            namespace.append(piece(f"d{next(name)}", 0, text))
        fold_all(folding)
        return sorted(tuple(tokens) for tokens in namespace.read()[0].contents.values())

    often, once = tuple(range(10)), tuple(range(100, 110))
    assert say(often, often, once, once[::-1]) == sorted([often, often, once, once[::-1]])
    others = [tuple(range(1000 + 10 * n, 1010 + 10 * n)) for n in range(12)]
    say(*others[:4])
    kept = say(*others[4:8])
    assert kept.count(often) == 1
    assert once not in kept
    say(*others[8:])
    assert often not in say(*(text[::-1] for text in others[:4]))


def test_damaged_entries_and_segments_are_left_out(namespace):
    given = [piece(f"d{number}", 0, range(number, number + 100)) for number in range(4)]
    folding = compactor(namespace, segment_tokens=100)
    append_each(namespace, given[:3], folding)
    namespace.append(given[3])
    for bad in (b"", b"garbage", b"PCLC\1\1\0\0" + bytes(100)):
        namespace.redis.xadd(namespace.keys.log, {b"e": bad})
    namespace.redis.xadd(namespace.keys.log, {b"other": b"field"})
    manifest = Manifest.decode(namespace.codec, namespace.store.read_manifest().frame)
    digests = [entry.digest for entry in manifest.segments]
    assert len(digests) == 3
    namespace.redis.setrange(namespace.keys.segment(digests[0]), 30, b"x")
    namespace.redis.delete(namespace.keys.segment(digests[1]))
    documents, counters = namespace.read()
    assert documents.contents == contents(given[2:])
    assert (counters.corrupt_segments, counters.missing_segments, counters.corrupt_entries) == (1, 1, 4)
    fold_all(folding)
    assert folding.counters.corrupt_entries == 4
    assert namespace.read()[0].contents == contents(given[2:])


def test_a_segment_grown_far_beyond_its_size_is_not_fetched_whole(namespace):
    folding = compactor(namespace)
    namespace.append(piece("a", 0, [1]))
    fold_all(folding)
    manifest = Manifest.decode(namespace.codec, namespace.store.read_manifest().frame)
    (entry,) = manifest.segments
    namespace.redis.setrange(namespace.keys.segment(entry.digest), 50_000_000, b"x")
    assert len(namespace.store.read_segment(entry.digest, entry.num_bytes)) == entry.num_bytes + 1
    assert namespace.read()[1].corrupt_segments == 1


@pytest.mark.parametrize("body", [b"garbage", b"", b"x" * 6_000_000])
def test_a_damaged_manifest_is_read_as_none_and_replaced(namespace, body):
    folding, documents = compactor(namespace), Documents()
    reader = namespace.reader(documents)
    namespace.append(piece("a", 0, [1]))
    fold_all(folding)
    catch_up(reader)
    namespace.redis.hset(namespace.keys.manifest, "body", body)
    namespace.append(piece("b", 0, [2]))
    late = namespace.read()[0]
    assert late.contents == contents([piece("a", 0, [1]), piece("b", 0, [2])]), "the log has not been trimmed yet"
    fold_all(folding)
    assert namespace.read()[0].contents == late.contents
    catch_up(reader)
    assert documents.contents == late.contents


def test_keys_of_another_type_are_refused_by_the_server(namespace):
    namespace.redis.set(namespace.keys.log, "text")
    namespace.redis.set(namespace.keys.manifest, "text")
    for call in (lambda: namespace.append(piece("a", 0, [1])), namespace.read, compactor(namespace).fold):
        with pytest.raises(StoreRefused):
            call()


def test_without_its_key_a_namespace_is_empty(shared_server):
    written = Namespace(shared_server.settings, ring=RING)
    written.append(piece("a", 0, [1]))
    fold_all(compactor(written))
    written.append(piece("b", 0, [2]))
    for ring in (None, KeyRing({2: b"2" * 32})):
        documents, counters = Namespace(shared_server.settings, written.keys.namespace, ring).read()
        assert documents.contents == {}
        assert (counters.corrupt_entries, counters.corrupt_manifests) == (2, 1)


def with_keys(namespace, *key_ids):
    ring = KeyRing({key_id: bytes([key_id]) * 32 for key_id in key_ids}) if key_ids else None
    return Namespace(namespace.connection.settings, namespace.keys.namespace, ring)


def test_keys_are_changed_without_loss_and_an_erased_key_takes_its_data_along(namespace):
    old, both, new = with_keys(namespace, 1), with_keys(namespace, 1, 2), with_keys(namespace, 2)
    old.append(piece("a", 0, [1]))
    fold_all(folding := compactor(old))
    folding.release()
    both.append(piece("b", 0, [2]))
    for behind in (old, namespace):
        fold_all(folding := compactor(behind))
        assert (folding.counters.folds, folding.counters.left_folds) == (0, 1), "it leaves what it cannot read"
        folding.release()
    assert both.read()[0].contents == contents([piece("a", 0, [1]), piece("b", 0, [2])])
    fold_all(folding := compactor(both, segment_tokens=1))
    folding.release()
    new.append(piece("c", 0, [3]))
    documents, counters = new.read()
    assert documents.contents == contents([piece("b", 0, [2]), piece("c", 0, [3])])
    assert counters.corrupt_segments == 1
    fold_all(compactor(new))
    assert new.read()[0].contents == documents.contents


@pytest.mark.parametrize("is_folded", [False, True], ids=["log", "manifest"])
def test_a_compactor_that_cannot_read_what_there_is_keeps_nobody_from_it(namespace, is_folded):
    old, new = with_keys(namespace, 1), with_keys(namespace, 1, 2)
    new.append(piece("a", 0, [1]))
    if is_folded:
        fold_all(folding := compactor(new))
        folding.release()
        new.append(piece("b", 0, [2]))
    behind, ahead = compactor(old), compactor(new)
    for _ in range(2):
        fold_all(behind)
    fold_all(ahead)
    assert (behind.counters.left_folds, ahead.counters.folds) == (2, 1)


def test_a_manifest_of_an_erased_key_is_replaced(namespace):
    old, new = with_keys(namespace, 1), with_keys(namespace, 2)
    old.append(piece("a", 0, [1]))
    fold_all(folding := compactor(old))
    folding.release()
    new.append(piece("b", 0, [2]))
    fold_all(compactor(new))
    documents, counters = new.read()
    assert documents.contents == contents([piece("b", 0, [2])])
    assert counters.corrupt_manifests == 0


def test_a_listener_that_fails_is_logged_and_told_the_rest(namespace, caplog):
    class Failing(Documents):
        def entry(self, entry_id, pieces):
            super().entry(entry_id, pieces)
            raise RuntimeError

    documents = Failing()
    reader = namespace.reader(documents)
    namespace.append(piece("a", 0, [1]))
    namespace.append(piece("a", 1, [2]))
    catch_up(reader)
    assert documents.contents == contents([piece("a", 0, [1, 2])])
    assert caplog.text.count("a listener of namespace") == 2


def test_only_the_holder_of_the_lease_folds(namespace):
    first, second = compactor(namespace), compactor(namespace)
    namespace.append(piece("a", 0, [1]))
    fold = first.prepare()
    assert second.prepare() is None
    assert first.commit(fold)
    first.release()
    namespace.append(piece("a", 1, [2]))
    assert second.prepare().manifest.fencing_token > fold.manifest.fencing_token


def test_a_lease_that_was_granted_to_another_ends_the_right_to_write_at_once(namespace):
    namespace.append(piece("a", 0, [1]))
    first, second = compactor(namespace), compactor(namespace)
    late = first.prepare()
    first.release()
    early = second.prepare()
    assert not first.commit(late), "though nothing has been written in between"
    assert second.commit(early)


def test_the_log_is_trimmed_on_behalf_of_the_present_manifest_only(namespace):
    ids = [namespace.append(piece("a", row, [row])) for row in range(3)]
    fold_all(compactor(namespace))
    assert (namespace.store.trim_log(0, ids[2]), namespace.store.trim_log(2, ids[2])) == (0, 0)
    assert namespace.store.trim_log(1, ids[2]) == 2


PAUSED_COMPACTOR = """
import os, signal, sys
from cache_service.log.compactor import Compactor, CompactorSettings
from cache_service.store.connection import ConnectionSettings
from paceline_testing.cache_stores import Namespace
url, password, name = sys.argv[1:4]
namespace = Namespace(ConnectionSettings(url, password=password), name)
compactor = Compactor(namespace.store, namespace.codec, CompactorSettings(lease_s=0.05))
fold = compactor.prepare()
print(fold.manifest.fencing_token, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print(compactor.commit(fold), flush=True)
"""


def test_a_compactor_that_was_paused_past_its_lease_changes_nothing(namespace, shared_server):
    given = random_pieces(8, 20)
    append_each(namespace, given[:10])
    settings = shared_server.settings
    command = [sys.executable, "-c", PAUSED_COMPACTOR, settings.url, settings.password, namespace.keys.namespace]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as paused:
        try:
            token = int(paused.stdout.readline())
            other = compactor(namespace)
            assert until(lambda: other.fold() or other.counters.folds), "its lease runs out"
            append_each(namespace, given[10:])
            fold_all(other)
            before = namespace.store.read_manifest()
        finally:
            os.kill(paused.pid, signal.SIGCONT)
        assert paused.stdout.readline() == "False\n"
    after = namespace.store.read_manifest()
    assert after == before
    assert Manifest.decode(namespace.codec, after.frame).fencing_token > token
    assert namespace.read()[0].contents == contents(given)


def test_a_fold_of_a_data_set_that_is_gone_is_refused(namespace):
    folding = compactor(namespace)
    namespace.append(piece("a", 0, [1]))
    fold = folding.prepare()
    namespace.redis.set(namespace.keys.epoch, "another")
    assert not folding.commit(fold)
    assert namespace.store.read_manifest().version == 0


def test_a_fold_that_was_prepared_twice_is_written_once(namespace):
    folding = compactor(namespace)
    namespace.append(piece("a", 0, [1, 2]))
    first, second = folding.prepare(), folding.prepare()
    assert first.frame == second.frame, "the same pieces make the same segments"
    assert folding.commit(first)
    assert not folding.commit(second)
    assert namespace.read()[0].contents == contents([piece("a", 0, [1, 2])])


def test_nothing_lives_for_ever(namespace):
    namespace.append(piece("a", 0, [1]))
    folding = compactor(namespace, segment_tokens=100)
    fold_all(folding)
    namespace.append(piece("b", 0, [2]))
    fold = folding.prepare()
    (entry,), (retired,) = fold.manifest.segments, fold.replaces.segments
    assert folding.commit(fold)
    redis = namespace.redis
    assert redis.ttl(namespace.keys.segment(entry.digest)) > 600
    assert 0 < redis.ttl(namespace.keys.segment(retired.digest)) <= 600
    lives = {key: redis.ttl(key) for key in namespace.names()}
    assert len(lives) == 7
    assert min(lives.values()) > 0, lives


def test_a_compactor_keeps_no_key_of_a_namespace_that_has_expired(namespace):
    folding, counts = compactor(namespace), SoftCompactor(namespace.store, namespace.codec, 3)
    fold_all(folding)
    fold_all(counts)
    assert namespace.names() == []
    namespace.append(piece("a", 0, [1]))
    fold_all(folding)
    fold_all(counts)
    assert namespace.redis.delete(*namespace.names()) >= 4  # as if its time were over
    fold_all(folding)
    fold_all(counts)
    assert namespace.names() == []
    namespace.append(piece("a", 1, [2]))
    fold_all(folding)
    assert folding.counters.folds == 2


def test_a_fence_that_was_lost_goes_on_after_the_last_token(namespace):
    for row in range(3):
        folding = compactor(namespace)
        namespace.append(piece("a", row, [row]))
        fold_all(folding)
        folding.release()
    namespace.redis.delete(namespace.keys.fence)
    folding = compactor(namespace)
    namespace.append(piece("a", 3, [3]))
    assert folding.prepare().manifest.fencing_token == 4
    namespace.redis.delete(namespace.keys.fence)
    fold_all(folding)
    assert folding.counters.folds == 1
    assert namespace.read()[0].contents == contents([piece("a", 0, range(4))])

"""What a process knows of the shared cache, on real servers: all that is there, nothing else, and nobody waits.

Covers also `cache_service.index.index_edition`.
"""

import gc
import os
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from actors.drafters.contract import DraftContext
from actors.drafters.registry import create_drafter
from actors.messages import SamplingParams
from cache_service.automata.suffix_automaton import Cursor
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.index.index_files import IndexFiles
from cache_service.index.warm_index import WarmIndex
from cache_service.log.compactor import Compactor, CompactorSettings
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.follower import FollowerSettings
from cache_service.log.publisher import Publisher, PublisherSettings
from paceline_testing.cache_stores import Namespace, fold_all, piece, until

BASE = 64  # tokens that make a base in these tests
FOLLOWER = FollowerSettings(poll_s=0.005, idle_poll_s=0.02, unwanted_poll_s=0.02, retry_s=0.02, max_retry_s=0.1)


def index_of(namespace, directory, **options):
    options = {"base_tokens": BASE, "follower": FOLLOWER, "stay_s": 0.0} | options
    return WarmIndex(namespace.open, WarmIndexSettings(directory=directory, **options))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "index"


@pytest.fixture
def open_index(directory):
    """Opens indexes and closes them."""
    opened = []

    def open_one(namespace, **options):
        opened.append(index_of(namespace, options.pop("directory", directory), **options))
        return opened[-1]

    yield open_one
    for index in opened:
        assert index.close(20)


def compactor(namespace, clock=lambda: 1_000.0, **limits):
    return Compactor(namespace.store, namespace.codec, CompactorSettings(limits=FoldLimits(**limits)), clock)


def knows(index, name, *words):
    """Whether a namespace's base or tail holds each of these texts whole."""
    automata = index.automata(name)
    if automata is None:
        return False
    side = automata.tail.enter()
    try:
        return all(
            any(
                automaton is not None and automaton.advance(Cursor(), np.array(word, np.int32)).length == len(word)
                for automaton in (automata.base, side.automaton)
            )
            for word in words
        )
    finally:
        automata.tail.leave(side)


def files_in(directory):
    return sorted(name for name in os.listdir(directory) if not name.startswith("lock-"))


def purge(namespace):
    namespace.redis.delete(*namespace.names())


def document(seed, size=40):
    """Tokens that no other document has, each once."""
    return list(range(seed * 1000, seed * 1000 + size))


def drafts(drafter, tokens, namespace="", seq_id=1, **fields):
    array = np.array(tokens, np.int32)
    drafter.forget(seq_id)
    (tree,) = drafter.propose(
        [DraftContext(seq_id, array, 0, len(tokens), 16, SamplingParams(seed=0), namespace, **fields)]
    )
    assert tree.is_valid(1 << 22)
    paths = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_what_one_process_publishes_another_drafts(namespace, open_index):
    name = namespace.keys.namespace
    drafter = create_drafter("cache", index=open_index(namespace), floor=0.0)
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=0.01))
    first, second = document(1), document(2)
    for begin in range(0, 40, 4):  # two answers at once, a few tokens at a time
        for text, document_id in ((first, b"1" * 16), (second, b"2" * 16)):
            publisher.publish(name, document_id, begin, text[begin : begin + 4])
        time.sleep(0.003)
    assert publisher.close(20)
    assert until(lambda: drafts(drafter, first[:3], name)[-1:] == [tuple(first[3:19])])
    assert drafts(drafter, second[10:14], name)[-1] == tuple(second[14:30])
    assert drafts(drafter, first[-4:], name) == []
    assert drafts(drafter, [first[3], second[4]], name) == []


def test_a_warm_start_maps_what_another_has_built(namespace, directory, open_index):
    name = namespace.keys.namespace
    documents = [document(seed) for seed in range(6)]
    for row, text in enumerate(documents):
        namespace.append(piece(f"d{row}", 0, text))
    fold_all(compactor(namespace))
    namespace.append(piece("late", 0, document(99)))
    first = open_index(namespace)
    first.follow(name)
    assert until(lambda: knows(first, name, *documents, document(99)))
    assert (first.stats().builds, first.stats().maps) == (1, 0)
    assert first.stats().mapped_bytes > 0
    assert len(first.automata(name).base) == sum(map(len, documents)) + len(documents)
    second = open_index(namespace)
    second.follow(name)
    assert until(lambda: knows(second, name, *documents, document(99)))
    stats = second.stats()
    assert (stats.builds, stats.maps, stats.segments) == (0, 1, 0)
    assert (stats.namespaces, stats.warm_ratio, stats.damaged) == (1, 1.0, 0)
    assert len(files_in(directory)) == 1


MAPS = """
import os, sys, time
from pathlib import Path
from cache_service.store.connection import ConnectionSettings
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.index.warm_index import WarmIndex
from paceline_testing.cache_stores import Namespace, until
url, password, name, directory = sys.argv[1:5]
namespace = Namespace(ConnectionSettings(url, password=password), name)
index = WarmIndex(namespace.open, WarmIndexSettings(directory=Path(directory), base_tokens=64))
index.follow(name)
assert until(lambda: index.automata(name).base is not None)
stats = index.stats()
print(stats.builds, stats.maps, sum("arrays.bin" in line for line in open("/proc/self/maps")))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc")
def test_two_processes_share_one_mapped_file(namespace, shared_server, directory, open_index):
    name = namespace.keys.namespace
    namespace.append(piece("d", 0, document(1, 500)))
    fold_all(compactor(namespace))
    index = open_index(namespace)
    index.follow(name)
    assert until(lambda: knows(index, name, document(1, 500)))
    address = shared_server.settings
    command = [sys.executable, "-c", MAPS, address.url, address.password, name, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0 1 1\n"), done.stderr
    (path,) = directory.glob("*-*/arrays.bin")
    with open("/proc/self/maps") as maps:
        assert sum(str(path) in line for line in maps) == 1
    assert knows(index, name, document(1, 500)), "the other's end changes nothing"


def test_lookups_go_on_while_an_index_is_built(namespace, directory, open_index):
    """Another process is at the build, for as long as it likes; meanwhile drafts come from what there is."""
    name = namespace.keys.namespace
    old = [document(seed) for seed in range(3)]
    for row, text in enumerate(old):
        namespace.append(piece(f"d{row}", 0, text))
    folding = compactor(namespace)
    fold_all(folding)
    index = open_index(namespace)
    drafter = create_drafter("cache", index=index, floor=0.0)
    drafts(drafter, old[0][:2], name)
    assert until(lambda: knows(index, name, *old))
    base = index.automata(name).base
    new = [document(seed) for seed in range(3, 6)]
    with IndexFiles(directory).claim(index._followed[name].live.name) as is_ours:
        assert is_ours
        for row, text in enumerate(new):
            namespace.append(piece(f"n{row}", 0, text))
        assert until(lambda: knows(index, name, *new))
        fold_all(folding)
        assert until(lambda: index._followed[name].successor is not None)
        for text in old + new:
            assert drafts(drafter, text[:3], name)[-1] == tuple(text[3:19])
        assert index.automata(name).base is base
        assert index.stats().builds == 1
    assert until(lambda: index.automata(name).base is not base)
    assert knows(index, name, *old, *new)
    assert len(index.automata(name).tail) == 0, "all of it has been folded"
    assert len(files_in(directory)) == 1
    for text in old + new:
        assert drafts(drafter, text[:3], name)[-1] == tuple(text[3:19])


def test_a_purge_leaves_nothing_behind(namespace, directory, open_index):
    name = namespace.keys.namespace
    texts = [document(seed) for seed in range(4)]
    for row, text in enumerate(texts):
        namespace.append(piece(f"d{row}", 0, text))
        if row == 2:
            fold_all(compactor(namespace))
    index = open_index(namespace)
    drafter = create_drafter("cache", index=index)
    drafts(drafter, texts[0][:3], name)
    assert until(lambda: knows(index, name, *texts))
    assert len(files_in(directory)) == 1
    purge(namespace)
    assert until(lambda: files_in(directory) == [])
    for text in texts:
        assert drafts(drafter, text[:3], name) == []
    assert (index.stats().tokens, index.stats().resets) == (0, 1)
    namespace.append(piece("new", 0, document(9)))
    assert until(lambda: knows(index, name, document(9)))
    assert not knows(index, name, texts[0][:2])


def test_a_purge_in_the_middle_of_a_build_leaves_nothing_behind(namespace, directory, open_index):
    name = namespace.keys.namespace
    namespace.append(piece("d", 0, document(1, 200)))
    fold_all(compactor(namespace))
    index = open_index(namespace)
    drafts(create_drafter("cache", index=index), [1, 2], name)
    with IndexFiles(directory).claim(index._followed[name].live.name):
        assert until(lambda: index.stats().segments == 1)
        purge(namespace)
        assert until(lambda: index.stats().resets == 1)
    namespace.append(piece("new", 0, document(9)))
    assert until(lambda: knows(index, name, document(9)))
    assert not knows(index, name, document(1)[:2])
    assert files_in(directory) == []


@example(steps=[*["append"] * 2, *["new generation", "append"] * 2, "fold", "go on", "append"])  # goes on behind a base
@given(
    steps=st.lists(
        st.sampled_from(["append", "append", "go on", "fold", "new generation", "purge"]), min_size=4, max_size=12
    )
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_an_index_holds_the_live_documents_and_nothing_else(machine_server, tmp_path_factory, steps):
    """Whatever happens to a namespace, in the end drafts are what followed in documents that are alive."""
    namespace = Namespace(machine_server.settings)
    name, now_s = namespace.keys.namespace, [1_000]
    limits = {"generation_s": 100, "max_generations": 2, "segment_tokens": 100}
    folding = compactor(namespace, lambda: now_s[0], **limits)
    directory = tmp_path_factory.mktemp("indexes")
    index = index_of(namespace, directory)
    drafter = create_drafter("cache", index=index, floor=0.0)
    generations, dead, number = [[]], [], 0

    def append():
        nonlocal number
        number += 1
        generations[-1].append(document(number, 30))
        namespace.append(piece(f"{number}", 0, generations[-1][-1], now_s[0]))

    try:
        index.follow(name)
        for step in steps:
            if step == "append":
                append()
            elif step == "go on" and generations[-1]:
                more = document(number, 45)[30:]
                namespace.append(piece(f"{number}", 30, more, now_s[0]))
                generations[-1][-1] = document(number, 45)
            elif step == "fold":
                fold_all(folding)
            elif step == "new generation":
                append()
                fold_all(folding)
                now_s[0] += 100
                append()
                fold_all(folding)  # and closes the generation, which is old
                generations.append([])
                dead += [text for texts in generations[:-2] for text in texts]
                generations = generations[-2:]
            elif step == "purge":
                dead += [text for texts in generations for text in texts]
                generations = [[]]
                if namespace.redis.exists(namespace.keys.epoch):
                    purge(namespace)
        alive = [text for texts in generations for text in texts]

        def is_right(index, parts):
            return knows(index, name, *parts) and not any(knows(index, name, text[:2]) for text in dead)

        # Where the beginning of a document is in a base already, its tail has what follows as a text of its own.
        parts = [part for text in alive for part in (text[:30], text[30:]) if part]
        assert until(lambda: is_right(index, parts)), index.stats()
        for text in alive + dead:
            for at in range(2, len(text), 7):
                for path in drafts(drafter, text[:at], name):
                    assert any(text[at : at + len(path)] == list(path) for text in alive)
        assert len(files_in(directory)) <= 1
        fold_all(folding)
        successor = index_of(namespace, directory)
        try:
            successor.follow(name)
            assert until(lambda: is_right(successor, alive)), successor.stats()
        finally:
            assert successor.close(20)
    finally:
        assert index.close(20)
        namespace.connection.close()


def test_namespaces_are_read_by_those_who_may(namespace, open_index):
    mine, other = namespace.keys.namespace, f"{namespace.keys.namespace}-other"
    shared = document(5)
    theirs = Namespace(namespace.connection.settings, other)
    namespace.append(piece("d", 0, [*shared[:5], *document(1, 6)]))
    theirs.append(piece("d", 0, [*shared[:5], *document(2, 6)]))
    index = open_index(namespace)
    drafter = create_drafter("cache", index=index)
    drafts(drafter, shared[:3], mine, readable=(other,))
    assert until(lambda: knows(index, mine, document(1, 6)) and knows(index, other, document(2, 6)))
    assert drafts(drafter, shared[:5], mine)[0] == (1000,)
    assert not any(2000 in path for path in drafts(drafter, shared[:5], mine))
    assert {(1000,), (2000,)} <= set(drafts(drafter, shared[:5], mine, readable=(other,)))
    assert drafts(drafter, shared[:5], mine, readable=(other,), reads_cache=False) == []
    assert drafts(drafter, shared[:5], "") == []


def test_the_least_recently_used_namespace_gives_way(namespace, open_index):
    index = open_index(namespace, max_namespaces=2)
    names = [f"{namespace.keys.namespace}-{row}" for row in range(3)]
    for name in names[:2]:
        index.follow(name)
    index.follow(names[0])
    index.follow(names[2])
    assert [index.automata(name) is not None for name in names] == [True, False, True]
    assert index.stats().evictions == 1
    busy = open_index(namespace, max_namespaces=1, stay_s=60.0)
    for name in names:
        busy.follow(name)
    assert [busy.automata(name) is not None for name in names] == [True, False, False]
    busy.follow("no / name")
    assert busy.stats().refusals == 3


def test_a_tenant_with_ever_new_namespaces_pushes_out_its_own_however_busy_it_is(namespace, open_index):
    owner = namespace.keys.namespace
    namespace.append(piece("d", 0, document(1)))
    index = open_index(namespace, max_namespaces=4, stay_s=0.0)
    index.follow(owner)
    assert until(lambda: knows(index, owner, document(1)))
    for salt in range(200):
        index.follow(f"restless{owner}-{salt}")
    assert index.stats().evictions == 197
    assert knows(index, owner, document(1))
    busy = open_index(namespace, max_namespaces=4, stay_s=60.0)
    for salt in range(200):
        busy.follow(f"restless{owner}-{salt}")
    assert busy.stats().refusals == 196
    busy.follow(owner)
    assert until(lambda: knows(busy, owner, document(1)))


def test_more_tokens_than_the_budget_make_the_least_recently_used_give_way(namespace, open_index):
    names = [f"{namespace.keys.namespace}-{row}" for row in range(2)]
    for name in names:
        Namespace(namespace.connection.settings, name).append(piece("d", 0, document(1, 100)))
    index = open_index(namespace, index_tokens=150)
    for name in names:
        index.follow(name)
    assert until(lambda: index.stats().evictions == 1)
    assert index.automata(names[0]) is None
    assert until(lambda: knows(index, names[1], document(1, 100)))


def test_the_budget_holds_where_the_owner_with_most_is_busy_with_all_it_has(namespace, open_index):
    busy, idle = f"{namespace.keys.namespace}-busy", f"other{namespace.keys.namespace}"
    for name, count in ((busy, 120), (idle, 60)):
        Namespace(namespace.connection.settings, name).append(piece("d", 0, document(1, count)))
    index = open_index(namespace, index_tokens=150, stay_s=600.0)
    for name in (busy, idle):
        index.follow(name)
    assert until(lambda: index.stats().tokens >= 180)
    assert index.stats().evictions == 0, "both have just been used"
    index._followed[idle].used -= 1000.0
    assert until(lambda: index.stats().evictions == 1)
    assert index.automata(idle) is None
    assert knows(index, busy, document(1, 120))


def test_a_log_that_nobody_folds_is_held_in_part(namespace, open_index):
    name = namespace.keys.namespace
    index = open_index(namespace, namespace_tokens=2 * BASE)
    index.follow(name)
    for row in range(10):
        namespace.append(piece(f"d{row}", 0, document(row)))
    assert until(lambda: knows(index, name, document(9)))
    assert index.stats().overflows == 3
    assert index.stats().tokens <= 2 * BASE


def test_an_index_outlives_its_server(server, directory):
    namespace = Namespace(server.settings, "tenant")
    namespace.append(piece("d", 0, document(1, 200)))
    fold_all(compactor(namespace))
    index = index_of(namespace, directory)
    drafter = create_drafter("cache", index=index, floor=0.0)
    drafts(drafter, [1, 2], "tenant")
    assert until(lambda: knows(index, "tenant", document(1, 200)))
    server.stop()
    index.follow("another")
    assert until(lambda: index.stats().lag_s > 0.1)
    assert drafts(drafter, document(1)[:3], "tenant")[-1] == tuple(document(1)[3:19])
    assert drafts(drafter, document(1)[:3], "another") == []
    assert index.close(20)
    assert index.automata("tenant") is None
    index.follow("tenant")
    assert index.automata("tenant") is None


@pytest.mark.parametrize("damage", ["cut", "changed", "no header"])
def test_a_damaged_file_is_replaced(namespace, directory, open_index, damage):
    name = namespace.keys.namespace
    namespace.append(piece("d", 0, document(1, 200)))
    fold_all(compactor(namespace))
    first = open_index(namespace)
    first.follow(name)
    assert until(lambda: knows(first, name, document(1, 200)))
    assert first.close(20)
    (path,) = directory.glob("*-*/arrays.bin")
    if damage == "no header":
        (path.parent / "header.json").unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    second = open_index(namespace)
    second.follow(name)
    assert until(lambda: knows(second, name, document(1, 200)))
    assert (second.stats().builds, second.stats().maps) == (1, 0)
    assert len(files_in(directory)) == 1


def test_a_directory_that_others_may_enter_is_not_used(namespace, tmp_path, open_index):
    name = namespace.keys.namespace
    namespace.append(piece("d", 0, document(1, 200)))
    fold_all(compactor(namespace))
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    link, own = tmp_path / "link", tmp_path / "own"
    own.mkdir(mode=0o700)
    link.symlink_to(own)
    for directory in (open_to_all, link, None):
        index = open_index(namespace, directory=directory)
        index.follow(name)
        assert until(lambda index=index: knows(index, name, document(1, 200)))
        assert index.stats().mapped_bytes == 0
        assert index.stats().memory_bytes > 0
    assert os.listdir(open_to_all) == os.listdir(own) == []


def test_an_index_that_was_replaced_does_not_wait_for_the_garbage_collector(namespace, open_index):
    index, name = open_index(namespace), namespace.keys.namespace
    namespace.append(piece("a", 0, document(1)))
    index.follow(name)
    assert until(lambda: knows(index, name, document(1)))
    gc.disable()
    try:
        gone = weakref.ref(index._followed[name].live)
        assert index.close(20)
        assert until(lambda: gone() is None)
    finally:
        gc.enable()


def test_files_that_nobody_uses_go_in_time(directory):
    files = IndexFiles(directory)
    used, unused = directory / f"{'a' * 32}-{'b' * 32}", directory / f"{'c' * 32}-{'d' * 32}"
    for path in (used, unused, directory / ".building-left", directory / "mine"):
        path.mkdir()
        os.utime(path, (1_000, 1_000))
    files.touch("a" * 32, "b" * 32)
    files.sweep(600)
    assert sorted(os.listdir(directory)) == sorted([used.name, "mine"])
    files.keep("a" * 32, "b" * 32)
    assert used.is_dir()
    files.keep("a" * 32, "e" * 32)
    assert os.listdir(directory) == ["mine"]

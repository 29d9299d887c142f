"""Two or three clusters that exchange through an object store which loses, tears, delays and repeats objects."""

import copy
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_service.errors import CacheError, FormatError, ObjectStoreError, StoreRefused
from cache_service.formats import frame as frame_module
from cache_service.formats.documents import Piece, RecordKind, content_id, document_id_of
from cache_service.formats.frame import FrameCodec
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.namespaces import PUBLIC
from cache_service.formats.purged_times import LAST_S, PurgedTimes, TimeRange
from cache_service.formats.segment import (
    MAX_SEGMENT_BYTES,
    MAX_SEGMENT_TOKENS,
    SegmentEntry,
    decode_segment,
    encode_segment,
)
from cache_service.formats.store_keys import StoreKeys
from cache_service.promotion.promotion_gate import nothing_blocked
from cache_service.regions.exchange import LISTING, RegionExchange
from cache_service.regions.local_store import Opened, Own
from cache_service.regions.plan import (
    RegionTerms,
    accepted,
    check_clock,
    covers,
    joined,
    newest_within,
    next_generation,
)
from cache_service.regions.records import (
    MAX_CLUSTERS,
    MAX_LISTED,
    MAX_PURGED_LABELS,
    MAX_PURGED_RANGES,
    MAX_RANGES,
    PUBLIC_LABEL,
    Listing,
    RegionsState,
    group_label,
)

FINGERPRINT = "model"
GROUP, OTHER = group_label("research"), group_label("sales")
KEEP_S = 10_000
_PER_SEGMENT = 3
_serials = itertools.count()


def own_namespace(label):
    return label.replace(":", "-")


NS = own_namespace(GROUP)


def codec_of(namespace, ring=None):
    return FrameCodec(StoreKeys(FINGERPRINT, namespace), ring)


class Clock:
    def __init__(self):
        self.now_s = 1_000


class MemoryLocal:
    """A cluster's Redis. `own_pieces` are documents by namespace, a few of which are a segment."""

    def __init__(self, name, clock, ahead_s=0):
        self.name, self.clock, self.ahead_s = name, clock, ahead_s
        self.own_pieces = {}  # namespace -> pieces
        self.epochs = {}
        self.notes = {}
        self.state = None
        self.imports = {}  # namespace -> refs
        self.frames = {}
        self.leads = True
        self.is_unreadable = False
        self.resigned = 0

    def time_s(self):
        return self.clock.now_s + self.ahead_s

    # what tests do

    def learn(self, namespace, text, time_s=None):
        tokens = np.array(list(text.encode()), np.int32)
        one = Piece(document_id_of(text), 0, tokens, RecordKind.OUTPUT, self.time_s() if time_s is None else time_s)
        self.own_pieces.setdefault(namespace, []).append(one)

    def purge(self, namespace, since_s=0):
        """As `Purge` does with the namespace and with what is imported beside it."""
        purged = TimeRange(since_s, self.time_s() + 1)
        self.notes[namespace] = self.notes.get(namespace, PurgedTimes()).and_also(purged)
        kept = [piece for piece in self.own_pieces.get(namespace, []) if not purged.covers(piece.time_s)]
        self.own_pieces[namespace] = kept
        self.epochs[namespace] = next(_serials)
        self.epochs[f"{namespace} imported"] = next(_serials)
        self.imports.pop(namespace, None)

    def imported(self, namespace):
        """Texts that can be drafted from."""
        found = []
        for ref in self.imports.get(namespace, ()):
            pieces = decode_segment(codec_of(namespace), ref.digest, self.frames[namespace, ref.digest]).pieces()
            found += [bytes(piece.token_ids.tolist()).decode() for piece in pieces]
        return sorted(found)

    # what the exchange does

    def lead(self):
        return self.leads

    def resign(self):
        self.resigned += 1

    def now_ms(self):
        return 1000 * self.time_s()

    def load(self):
        if self.is_unreadable:
            raise FormatError("newer", "of a later key")
        return copy.deepcopy(self.state) or RegionsState("epoch", 0, 0)

    def save(self, state):
        codec = codec_of("regions")
        self.state = RegionsState.decode(codec, state.encode(codec))
        return self.state

    def own(self, namespace):
        return Own(str(self.epochs.get(namespace)), tuple(ref for ref, _ in self._segments(namespace)))

    def read(self, namespace, ref):
        return next((pieces for known, pieces in self._segments(namespace) if known == ref), None)

    def open(self, namespace):
        return Opened(str(self.epochs.get(f"{namespace} imported")), self.notes.get(namespace, PurgedTimes()))

    def put(self, namespace, epoch, pieces, max_bytes):
        self._require(namespace, epoch)
        entry, frame = encode_segment(codec_of(namespace), pieces)
        if len(frame) > max_bytes:
            return None
        self.frames[namespace, entry.digest] = frame
        return entry

    def replace(self, namespace, epoch, refs):
        self._require(namespace, epoch)
        self.imports[namespace] = tuple(refs)

    def lost(self, namespace, refs):
        return {ref.digest for ref in refs if (namespace, ref.digest) not in self.frames}

    def _segments(self, namespace):
        assert not namespace.startswith("private"), "a private namespace was read"
        pieces = self.own_pieces.get(namespace, [])
        batches = [pieces[begin : begin + _PER_SEGMENT] for begin in range(0, len(pieces), _PER_SEGMENT)]
        return [(encode_segment(codec_of(namespace), batch)[0], batch) for batch in batches]

    def _require(self, namespace, epoch):
        if epoch != str(self.epochs.get(f"{namespace} imported")):
            raise StoreRefused("purged")


class MemoryObjects:
    """One store; each cluster's view of it may be away."""

    def __init__(self):
        self.folders = {}
        self.is_away = False
        self.broken = set()  # objects that can be neither read nor deleted
        self.reads = []
        self.writes = []  # every version of every object that ever was

    def clusters(self):
        self._check()
        return sorted(self.folders)

    def sizes(self, cluster):
        self._check()
        return {name: len(data) for name, data in self.folders.get(cluster, {}).items()}

    def read(self, cluster, name, max_bytes):
        self._check(cluster, name)
        self.reads.append((cluster, name))
        data = self.folders.get(cluster, {}).get(name)
        return None if data is None else data[: max_bytes + 1]

    def write(self, cluster, name, data):
        self._check()
        self.folders.setdefault(cluster, {})[name] = data
        self.writes.append((cluster, name, data))

    def delete(self, cluster, name):
        self._check(cluster, name)
        self.folders[cluster].pop(name, None)

    def _check(self, *named):
        if self.is_away or named in self.broken:
            raise ObjectStoreError("away")

    def put(self, listing, ring=None):
        """As another cluster would."""
        self.folders.setdefault(listing.cluster, {})[LISTING] = listing.encode(codec_of("regions", ring))


def terms(labels=(PUBLIC_LABEL, GROUP), min_tenants=5, blocks=nothing_blocked, rules=""):
    spaces = {label: PUBLIC if label == PUBLIC_LABEL else own_namespace(label) for label in labels}
    return RegionTerms(spaces, min_tenants, 16, blocks, rules)


class World:
    def __init__(self, names=("asia", "europe"), ring=None, max_bytes=2**20, ahead_s=()):
        self.clock, self.objects, self.max_bytes, self.ring = Clock(), MemoryObjects(), max_bytes, ring
        skews = dict(zip(names, ahead_s, strict=False))
        self.local = {name: MemoryLocal(name, self.clock, skews.get(name, 0)) for name in names}
        self.terms = dict.fromkeys(names, terms())
        self.exchange = {}
        for name in names:
            self.restart(name)

    def restart(self, name):
        """Another process leads."""
        self.exchange[name] = RegionExchange(
            self.local[name], self.objects, codec_of("regions", self.ring), name, self.max_bytes, KEEP_S
        )

    def turn(self, name):
        self.clock.now_s += 1
        try:
            self.exchange[name].turn(self.terms[name])
        except CacheError:
            return False
        return True

    def settle(self):
        self.clock.now_s += 5
        for _ in range(2):
            for name in self.local:
                assert self.turn(name)


def test_what_is_shared_in_one_cluster_is_drafted_from_in_the_other_and_goes_no_further():
    world = World(("asia", "europe", "us"))
    world.local["asia"].learn(NS, "of a group")
    world.local["asia"].learn(PUBLIC, "public")
    world.local["asia"].learn("private-t1", "secret")
    world.settle()
    for name in ("europe", "us"):
        assert world.local[name].imported(NS) == ["of a group"]
        assert world.local[name].imported(PUBLIC) == ["public"]
    assert world.local["asia"].imported(NS) == world.local["asia"].imported(PUBLIC) == []
    assert {name: len(folder) for name, folder in world.objects.folders.items()} == {"asia": 3, "europe": 1, "us": 1}
    assert not any(b"secret" in data for _, _, data in world.objects.writes)
    gauges = world.exchange["europe"].gauges
    assert (gauges.clusters, gauges.segments) == (2, 2)
    assert gauges.lag_s <= 3


def test_a_public_phrase_has_the_same_id_in_all_clusters():
    world = World()
    world.local["asia"].learn(PUBLIC, "said by many")
    world.settle()
    (ref,) = world.local["europe"].imports[PUBLIC]
    (piece,) = decode_segment(codec_of(PUBLIC), ref.digest, world.local["europe"].frames[PUBLIC, ref.digest]).pieces()
    assert piece.document_id == content_id(piece.token_ids) != document_id_of("said by many")


def test_only_groups_and_promises_of_both_sides_are_shared():
    world = World()
    world.local["asia"].learn(own_namespace(OTHER), "of sales")
    world.local["asia"].learn(NS, "of research")
    world.local["asia"].learn(PUBLIC, "said by five")
    world.terms["asia"] = terms((PUBLIC_LABEL, GROUP, OTHER), min_tenants=5)
    world.terms["europe"] = terms((PUBLIC_LABEL, OTHER), min_tenants=20)
    world.settle()
    europe = world.local["europe"]
    assert (europe.imported(PUBLIC), europe.imported(NS), europe.imported(own_namespace(OTHER))) == (
        [],
        [],
        ["of sales"],
    )
    world.terms["europe"] = terms((PUBLIC_LABEL, GROUP), min_tenants=5)
    world.settle()
    assert (europe.imported(PUBLIC), europe.imported(NS)) == (["said by five"], ["of research"])
    assert europe.imported(own_namespace(OTHER)) == []


def test_what_may_not_be_public_here_is_left_out_and_a_new_rule_holds_for_what_is_there():
    world = World()
    world.local["asia"].learn(PUBLIC, "project hush")
    world.local["asia"].learn(PUBLIC, "harmless")
    world.local["asia"].learn(PUBLIC, "longer than a phrase may be")
    world.settle()
    assert world.local["europe"].imported(PUBLIC) == ["harmless", "project hush"]
    hush = lambda ids: np.full(len(ids), bytes(ids.tolist()).startswith(b"project"))  # noqa: E731
    world.terms["europe"] = terms(blocks=hush, rules="hush")
    world.settle()
    assert world.local["europe"].imported(PUBLIC) == ["harmless"]


def test_a_purge_reaches_the_copies_and_nothing_comes_back_by_old_objects():
    world = World()
    world.local["asia"].learn(NS, "to be forgotten")
    world.settle()
    old = copy.deepcopy(world.objects.folders["asia"])
    world.local["asia"].purge(NS)
    world.settle()
    assert world.local["europe"].imported(NS) == []
    assert list(world.objects.folders["asia"]) == [LISTING]
    world.objects.folders["asia"] = old  # an old version of everything appears again
    world.restart("europe")
    assert world.turn("europe")
    assert world.local["europe"].imported(NS) == []


@pytest.mark.parametrize("ahead_s", [(0, 0), (600, 0), (0, 600)])
def test_a_purge_of_imports_lasts_though_the_origin_still_has_them(ahead_s):
    world = World(ahead_s=ahead_s)
    world.local["asia"].learn(NS, "before")
    world.settle()
    world.local["europe"].purge(NS)
    assert world.local["europe"].imported(NS) == []
    world.settle()
    assert world.local["europe"].imported(NS) == []
    world.local["europe"].notes = {}  # notes live for an hour
    world.local["europe"].state = None  # and its Redis is lost: its own listing tells
    world.clock.now_s += 700
    world.local["asia"].learn(NS, "after")
    world.settle()
    assert world.local["europe"].imported(NS) == ["after"]
    assert world.local["asia"].own_pieces[NS]  # it is its origin's


def test_a_purge_during_an_exchange_has_it_refused():
    world = World()
    world.local["asia"].learn(NS, "to be forgotten")
    asia, write = world.local["asia"], world.objects.write

    def purge_then_write(cluster, name, data):
        write(cluster, name, data)
        world.objects.write = write
        asia.purge(NS)

    world.objects.write = purge_then_write
    assert not world.turn("asia")  # its listing has not been written
    assert LISTING not in world.objects.folders["asia"]
    world.settle()
    assert world.local["europe"].imported(NS) == []
    assert list(world.objects.folders["asia"]) == [LISTING]


def test_budgets_hold_and_the_oldest_goes_first():
    world = World(max_bytes=3 * 180)
    for number in range(20):
        world.local["asia"].learn(NS, f"text {number:02}", time_s=number)
    world.settle()
    found = world.local["europe"].imported(NS)
    assert found == [f"text {number:02}" for number in range(20 - len(found), 20)]
    assert 1 <= len(found) < 20
    assert world.exchange["europe"].gauges.bytes <= world.max_bytes
    assert sum(map(len, world.objects.folders["asia"].values())) <= world.max_bytes + 2000  # and the listing


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("torn", [True, False])
def test_a_torn_or_lost_object_is_written_anew(torn, restarts):
    world = World()
    world.local["asia"].learn(NS, "a text")
    assert world.turn("asia")
    folder = world.objects.folders["asia"]
    (digest,) = set(folder) - {LISTING}
    whole = folder.pop(digest)
    if torn:
        folder[digest] = whole[:-1]
    assert world.turn("europe")
    counters = world.exchange["europe"].counters
    assert (counters.rejected_objects, counters.missing_segments) == ((1, 0) if torn else (0, 1))
    assert world.local["europe"].imported(NS) == []
    if restarts:
        world.restart("asia")
    world.settle()
    assert world.local["europe"].imported(NS) == ["a text"]


def test_a_text_from_the_future_of_its_clusters_clock_stays_there():
    world = World()
    world.local["asia"].learn(NS, "now")
    world.local["asia"].learn(NS, "from the future", time_s=world.clock.now_s + 1000)
    world.settle()
    assert world.local["europe"].imported(NS) == ["now"]


def test_a_cluster_that_is_silent_for_long_is_dropped_and_a_missing_listing_alone_is_not():
    world = World()
    world.local["asia"].learn(NS, "old news")
    world.settle()
    del world.objects.folders["asia"][LISTING]
    assert world.turn("europe")
    assert world.local["europe"].imported(NS) == ["old news"]
    world.clock.now_s += KEEP_S
    assert world.turn("europe")
    assert world.local["europe"].imported(NS) == []


def test_objects_are_sealed_where_the_caches_are():
    ring = KeyRing({1: bytes(32)})
    world = World(ring=ring)
    text = "a text that would be seen in a plain object " * 3
    world.local["asia"].learn(NS, text)
    world.settle()
    assert world.local["europe"].imported(NS) == [text]
    assert not any(b"research" in data or b"plain object" in data for _, _, data in world.objects.writes)
    world.ring = KeyRing({1: b"x" * 32})
    world.local["europe"].state = None
    world.restart("europe")
    world.turn("europe")
    assert world.exchange["europe"].counters.rejected_objects > 0


def test_keys_may_be_replaced_one_cluster_after_the_other():
    old, both, new = (KeyRing({number: bytes([number]) * 32 for number in numbers}) for numbers in ([1], [1, 2], [2]))
    world = World(ring=old)
    world.local["asia"].learn(NS, "a text")
    world.settle()
    for ring, names in ((both, ("asia",)), (both, ("europe",)), (new, ("europe", "asia"))):
        world.ring = ring
        for name in names:
            world.restart(name)
            assert world.turn("asia")
            assert world.turn("europe")
            assert world.local["europe"].imported(NS) == ["a text"]
    assert world.exchange["europe"].counters.rejected_objects == 0
    assert list(world.objects.folders["asia"]) == [
        LISTING,
        *(ref.digest for ref in world.local["asia"].state.own.shares[GROUP]),
    ]


def test_a_state_that_this_process_cannot_read_is_left_to_another_process():
    world = World()
    world.local["asia"].is_unreadable = True
    assert not world.turn("asia")
    assert (world.local["asia"].resigned, world.objects.writes) == (1, [])


@pytest.mark.parametrize("fault", ["broken", "newer"])
def test_without_its_own_listing_a_cluster_that_lost_its_redis_writes_nothing(fault):
    world = World(ring=KeyRing({1: bytes(32)}))
    world.local["asia"].learn(NS, "before")
    world.settle()
    world.local["europe"].purge(NS)
    world.settle()
    world.local["europe"].state, world.local["europe"].notes = None, {}
    kept = world.objects.folders["europe"][LISTING]
    if fault == "broken":
        world.objects.broken = {("europe", LISTING)}
    else:
        world.objects.put(Listing(cluster="europe", generation=1, time_s=1, min_tenants=5), KeyRing({2: bytes(32)}))
    assert not world.turn("europe")
    assert world.local["europe"].state is None
    world.objects.broken, world.objects.folders["europe"][LISTING] = set(), kept
    world.settle()
    assert world.local["europe"].imported(NS) == []


@pytest.mark.parametrize("is_listing", [True, False])
def test_an_object_that_cannot_be_read_hides_no_other(is_listing):
    world = World(("asia", "bad", "europe"))
    for name in ("asia", "bad"):
        for number in range(4 * _PER_SEGMENT):
            world.local[name].learn(NS, f"{name} {number}")
        assert world.turn(name)
    names = [LISTING] if is_listing else sorted(set(world.objects.folders["bad"]) - {LISTING})
    world.objects.broken = {("bad", name) for name in names}
    assert not world.turn("europe")  # it is told
    assert world.local["europe"].imported(NS) == sorted(f"asia {number}" for number in range(4 * _PER_SEGMENT))
    world.objects.broken = {("bad", names[0])}
    world.turn("europe")
    assert len(world.local["europe"].imported(NS)) == 4 * _PER_SEGMENT + (0 if is_listing else 3 * _PER_SEGMENT)


def test_an_object_that_cannot_be_deleted_keeps_no_other_and_what_a_crash_left_goes():
    world = World()
    assert world.turn("asia")
    stale = {f"{number:064x}": b"old" for number in range(2)} | {f"{9:064x}.part": b"torn"}
    world.objects.folders["asia"] |= stale
    world.objects.broken = {("asia", f"{0:064x}")}
    assert not world.turn("asia")
    assert set(world.objects.folders["asia"]) == {LISTING, f"{0:064x}"}


def entry(number, time_s=1):
    return SegmentEntry(f"{number:064x}", MAX_SEGMENT_TOKENS, MAX_SEGMENT_BYTES, time_s, time_s)


FORGED = {
    "time": {"time_s": 2**32 - 1},
    "generation": {"generation": 2**53},
    "labels": {"shares": {f"group:{number}": () for number in range(MAX_LISTED + 1)}},
    "label": {"shares": {"group:../../etc": (entry(1),)}},
    "segments": {"shares": {GROUP: (entry(1),) * (MAX_LISTED + 1)}},
    "times": {"shares": {GROUP: (entry(1, 2**53),)}},
    "purged labels": {"purged": {f"group:{number}": () for number in range(MAX_PURGED_LABELS + 1)}},
    "purged ranges": {"purged": {GROUP: ((0, 1),) * (MAX_PURGED_RANGES + 1)}},
}


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED)
def test_a_forged_listing_is_rejected_and_harms_no_other_cluster(fields):
    world = World()
    world.local["asia"].learn(NS, "a text")
    honest = {"cluster": "evil", "generation": 1, "time_s": world.clock.now_s, "min_tenants": 5}
    world.objects.put(Listing(**honest | fields))
    world.settle()
    assert world.exchange["europe"].counters.rejected_objects > 0
    assert list(world.local["europe"].state.listings) == ["asia"]
    assert world.local["europe"].imported(NS) == ["a text"]


def test_a_segment_that_is_packed_tighter_than_any_cluster_does_passes_by_no_budget(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 4, 20_000, np.int32)
    world = World()
    ref, frame = encode_segment(codec_of("regions"), [Piece(bytes(16), 0, tokens, RecordKind.OUTPUT, 1_000)])
    monkeypatch.setattr(frame_module, "_COMPRESSION_LEVEL", -5_000)  # as little as it packs the worst that is crafted
    forged = Listing(cluster="evil", generation=1, time_s=1_000, min_tenants=5, shares={GROUP: (ref,)})
    world.objects.put(forged)
    world.objects.folders["evil"][ref.digest] = frame
    assert world.turn("europe")
    assert world.turn("europe")
    assert world.local["europe"].frames == {}
    assert world.exchange["europe"].counters.rejected_objects == 1  # it is not read again


def test_what_is_remembered_of_the_worst_clusters_fits_into_one_record():
    names = [f"{number:032d}" for number in range(MAX_CLUSTERS)]
    groups = [f"group:{number:063d}" for number in range(MAX_LISTED)]
    numbers = itertools.count()
    listings = {
        name: Listing(
            cluster=name,
            generation=2**53,
            time_s=LAST_S,
            min_tenants=2**53,
            shares={group: (entry(next(numbers), LAST_S),) for group in groups},
        )
        for name in names
    }
    held = {
        f"{place:032x}": {ref.digest: ref for listing in listings.values() for ref in [listing.shares[group][0]]}
        for place, group in enumerate(groups)
    }
    ranges = MAX_PURGED_RANGES // MAX_PURGED_LABELS
    purged = {f"group:{number:063d}": ((LAST_S, LAST_S),) * ranges for number in range(MAX_PURGED_LABELS)}
    state = RegionsState("e" * 32, 1, 1, own=listings[names[0]], listings=listings, held=held, purged=purged)
    for listing in listings.values():
        listing.check()
    assert RegionsState.decode(codec_of("regions"), state.encode(codec_of("regions"))) == state


def test_any_number_of_folders_costs_a_bounded_number_of_reads_and_hides_no_cluster():
    world = World(("asia", "zulu"))
    world.local["zulu"].learn(NS, "a text")
    world.objects.folders |= {f"c{number}": {LISTING: b"junk"} for number in range(50)}
    for _ in range(40):
        world.turn("zulu")
        world.objects.reads.clear()
        world.turn("asia")
        assert len(world.objects.reads) <= 2 * MAX_CLUSTERS + 2
    assert world.local["asia"].imported(NS) == ["a text"]


def test_new_clusters_displace_none_that_is_known():
    found = [Listing(cluster=f"a{number}", generation=1, time_s=9, min_tenants=5) for number in range(99)]
    known = Listing(cluster="zulu", generation=1, time_s=9, min_tenants=5)
    result = accepted({"zulu": known}, found, "europe", 10, KEEP_S)
    assert "zulu" in result
    assert len(result) == MAX_CLUSTERS


def test_a_generation_made_with_a_wrong_clock_is_followed_by_ones_that_others_accept():
    wrong = Listing(cluster="asia", generation=2**52, time_s=9, min_tenants=5)
    numbers = [next_generation(wrong, now_ms) for now_ms in (1_000_000, 1_060_000)]
    assert numbers == sorted(set(numbers))
    check_clock(msgspec.structs.replace(wrong, generation=numbers[0]), 1_000)
    assert next_generation(msgspec.structs.replace(wrong, generation=7_000), 7_000) == 7_001


def test_another_clusters_listing_under_a_foreign_name_is_rejected():
    world = World(("asia", "europe", "us"))
    world.local["asia"].learn(NS, "mine")
    world.settle()
    world.objects.folders["us"][LISTING] = world.objects.folders["asia"][LISTING]
    world.turn("europe")
    assert world.exchange["europe"].counters.rejected_objects == 1


def test_a_process_that_does_not_lead_does_nothing():
    world = World()
    world.local["asia"].leads = False
    world.local["asia"].learn(NS, "text")
    world.settle()
    assert "asia" not in world.objects.folders


CLUSTERS = ("asia", "europe", "us")
_cluster = st.sampled_from(CLUSTERS)
_action = st.one_of(
    st.tuples(st.just("turn"), _cluster),
    st.tuples(st.just("learn"), _cluster, st.sampled_from([NS, PUBLIC, "private-t1"])),
    st.tuples(st.just("purge"), _cluster),
    st.tuples(st.just("restart"), _cluster),
    st.tuples(st.just("lose"), _cluster, st.integers(0, 9)),
    st.tuples(st.just("tear"), _cluster, st.integers(0, 9)),
    st.tuples(st.just("replay"), _cluster, st.integers(0, 99)),
    st.tuples(st.just("outage"), _cluster),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(_action, max_size=40))
def test_clusters_converge_whatever_happens_to_objects(actions):
    world, purged = World(CLUSTERS), {name: set() for name in CLUSTERS}
    learnt = {name: set() for name in CLUSTERS}
    for kind, name, *rest in [*actions]:
        local, folder = world.local[name], world.objects.folders.get(name, {})
        if kind == "turn":
            world.turn(name)
        elif kind == "learn":
            text = f"{rest[0]} {next(_serials)}"
            local.learn(rest[0], text)
            if rest[0] == NS:
                learnt[name].add(text)
        elif kind == "purge":
            world.clock.now_s += 2
            purged[name] |= set().union(*learnt.values())
            local.purge(NS)
            learnt[name] = set()
            assert local.imported(NS) == []
            world.clock.now_s += 2
        elif kind == "restart":
            world.restart(name)
        elif kind == "outage":
            world.objects.is_away = True
            world.turn(name)
            world.objects.is_away = False
        elif kind == "replay" and world.objects.writes:
            cluster, old, data = world.objects.writes[rest[0] % len(world.objects.writes)]
            world.objects.folders.setdefault(cluster, {})[old] = data
        elif folder:
            victim = sorted(folder)[rest[0] % len(folder)]
            if kind == "lose":
                del folder[victim]
            else:
                folder[victim] = folder[victim][: len(folder[victim]) // 2]
        for one in CLUSTERS:
            assert not purged[one] & set(world.local[one].imported(NS)), "it came back after a purge"
    world.settle()
    for name in CLUSTERS:
        others = set().union(*(learnt[other] for other in CLUSTERS if other != name))
        assert set(world.local[name].imported(NS)) == others - purged[name]
    assert not any(b"private" in data for _, _, data in world.objects.writes)
    listed = {
        (name, ref.digest) for name in CLUSTERS for refs in world.local[name].state.own.shares.values() for ref in refs
    }
    stored = {(name, digest) for name in CLUSTERS for digest in world.objects.folders[name] if digest != LISTING}
    assert stored == listed
    for cluster, old, data in world.objects.writes[:: len(world.objects.writes) // 8 + 1]:  # old ones appear again
        world.objects.folders[cluster][old] = data
        assert world.turn(next(name for name in CLUSTERS if name != cluster))
    for name in CLUSTERS:
        others = set().union(*(learnt[other] for other in CLUSTERS if other != name))
        assert set(world.local[name].imported(NS)) <= others - purged[name]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), max_size=80), st.integers(0, 330))
def test_joined_ranges_cover_all_that_was_purged(pairs, time_s):
    ranges = [(since, since + length) for since, length in pairs]
    result = joined(ranges)
    assert len(result) <= MAX_RANGES
    assert list(result) == sorted(result)
    if any(since <= time_s <= until for since, until in ranges):
        assert covers(result, time_s)


def test_generations_only_grow():
    one = Listing(cluster="asia", generation=5, time_s=9, min_tenants=5)
    older = Listing(cluster="asia", generation=4, time_s=9, min_tenants=5)
    assert accepted({"asia": one}, [older], "europe", 10, KEEP_S) == {"asia": one}
    assert accepted({}, [older, one, older], "europe", 10, KEEP_S) == {"asia": one}
    assert accepted({}, [one], "asia", 10, KEEP_S) == {}


def test_nothing_is_chosen_beyond_the_budget():
    refs = [encode_segment(codec_of("a"), [Piece(bytes(16), 0, np.array([n], np.int32), 0, n)])[0] for n in range(5)]
    assert newest_within({"a": refs}, 0) == {"a": ()}
    assert newest_within({"a": refs}, 2**20) == {"a": tuple(refs)}
    assert newest_within({"a": refs[:2], "b": refs[2:]}, refs[4].num_bytes + 1)["b"] == (refs[4],)

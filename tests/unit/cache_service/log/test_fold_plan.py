"""Decisions of the shared cache that need no server: back-off, folds, resets, addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cache_service.errors import FormatError, SettingError
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Generation, Manifest
from cache_service.formats.segment import MAX_SEGMENT_BYTES, MAX_SEGMENT_TOKENS, SegmentEntry
from cache_service.formats.store_keys import StoreKeys
from cache_service.formats.stream_id import parse_id
from cache_service.log.compactor import CompactorSettings
from cache_service.log.fold_plan import FoldLimits, after_fold, num_absorbed
from cache_service.log.folded_log_reader import Place, reset_reason
from cache_service.log.follower import FollowerSettings
from cache_service.log.log_reader import ReaderSettings, newest_segments
from cache_service.log.publisher import PublisherSettings
from cache_service.log.tenant_share import share_of
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.connection import ConnectionSettings, parse_url
from cache_service.store.store import LogView


def entry(num_tokens, num_bytes=1):
    return SegmentEntry(f"{num_tokens:064x}", num_tokens, num_bytes, 0, 0)


def test_the_breaker_opens_after_three_failures_and_doubles_its_pauses():
    breaker = CircuitBreaker()
    pauses = []
    now = 100.0
    for _ in range(10):
        breaker.failed(now)
        pauses.append(breaker.wait_s(now))
        now += pauses[-1]
    assert pauses == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert breaker.num_opened == 1
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.wait_s(now) == 0


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=300))
def test_merged_segments_stay_few_and_tokens_are_rewritten_seldom(arrivals):
    sizes, written = [], 0
    for num_new in arrivals:
        kept = len(sizes) - num_absorbed(sizes, num_new)
        sizes = [*sizes[:kept], sum(sizes[kept:]) + num_new]
        written += sizes[-1]
    total = sum(arrivals)
    assert sum(sizes) == total
    assert len(sizes) <= total.bit_length() + 1
    assert written <= 3 * total * total.bit_length()


def test_a_full_segment_is_left_alone():
    assert num_absorbed([50, 90], 60, 100) == 0
    assert num_absorbed([50, 40], 60, 100) == 1


def test_a_generation_closes_when_full_or_old_and_the_oldest_goes_whole():
    limits = FoldLimits(generation_tokens=100, generation_s=50, max_generations=2)
    young = (Generation(0, 10, (entry(5),)),)
    assert [g.number for g in after_fold(young, [entry(99)], 20, limits)] == [0]
    assert [g.number for g in after_fold(young, [entry(100)], 20, limits)] == [0, 1]
    assert [g.number for g in after_fold(young, [entry(6)], 60, limits)] == [0, 1]
    two = (Generation(0, 10, (entry(5),)), Generation(1, 20))
    assert [g.number for g in after_fold(two, [entry(100)], 21, limits)] == [1, 2]
    assert after_fold(two, [entry(7)], 90, limits)[-1].started_s == 90, "the time without segments does not count"


def test_the_byte_budget_drops_the_oldest_generations():
    limits = FoldLimits(max_bytes=10, max_generations=9)
    three = tuple(Generation(number, 0, (entry(1, 4),)) for number in range(3))
    assert [g.number for g in after_fold(three, [entry(1, 1)], 1, limits)] == [0, 1, 2]
    assert [g.number for g in after_fold(three, [entry(1, 2)], 1, limits)] == [0, 1, 2, 3]
    assert [g.number for g in after_fold(three, [entry(1, 4)], 1, limits)] == [1, 2, 3]
    assert [g.number for g in after_fold(three, [entry(1, 99)], 1, limits)] == [3]


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(1, 1000), st.integers(2, 6), st.integers(1, 5)
)
def test_the_namespaces_of_a_tenant_never_hold_more_than_it_may_together(arrivals, max_bytes, most, num_namespaces):
    """Each takes its share, and what it holds of it is the newest."""
    limits = share_of(FoldLimits(max_generations=most), max_bytes, num_namespaces)
    assert (limits.max_bytes == 1) or limits.max_bytes * num_namespaces <= max_bytes
    generations = (Generation(0, 0),)
    for now_s, num_bytes in enumerate(arrivals):
        generations = after_fold(generations, [*generations[-1].segments, entry(now_s + 1, num_bytes)], now_s, limits)
        held = [segment for generation in generations for segment in generation.segments]
        assert sum(segment.num_bytes for segment in held) <= limits.max_bytes
        assert [segment.num_tokens for segment in held] == list(range(now_s + 2 - len(held), now_s + 2))


def test_a_tenant_without_a_limit_that_matters_has_the_budgets_of_all():
    assert share_of(FoldLimits(), 2**40, 1) == FoldLimits()


def test_there_are_never_more_segments_than_a_manifest_holds():
    limits = FoldLimits(generation_tokens=2**40, generation_s=2**32, max_generations=1000, max_bytes=2**40)
    generations = (Generation(0, 0),)
    added = [SegmentEntry("f" * 64, MAX_SEGMENT_TOKENS, MAX_SEGMENT_BYTES, 2**32 - 1, 2**32 - 1)] * 1000
    for now_s in range(40):
        generations = after_fold(generations, [*generations[-1].segments, *added], now_s, limits)
    assert sum(len(generation.segments) for generation in generations) > 10_000
    Manifest("e", 40, 1, generations=generations).encode(FrameCodec(StoreKeys("fp", "ns")))


MANIFEST = Manifest(
    "e",
    4,
    1,
    folded_id="7-0",
    generations=(Generation(2, 0, (entry(10), entry(20))), Generation(3, 0, (entry(5),))),
    folded_generation=2,
)


def test_a_warm_start_takes_the_newest_segments_oldest_first():
    assert (newest_segments(MANIFEST, 25), newest_segments(MANIFEST, 4)) == ([entry(20), entry(5)], [])
    assert len(newest_segments(MANIFEST, 100)) == 3


@pytest.mark.parametrize(
    ("version", "anchored", "view", "reason"),
    [
        (4, True, LogView("e", 4, [("7-0", b""), ("8-0", b"")]), None),
        (4, True, LogView("e", 5, [("7-0", b"")]), None),
        (4, True, LogView("f", 4, [("7-0", b"")]), "epoch"),
        (4, True, LogView(None, 0, []), "epoch"),
        (4, True, LogView("e", 3, [("7-0", b"")]), "went back"),
        (4, True, LogView("e", 4, [("9-0", b"")]), "gap"),
        (4, True, LogView("e", 4, []), "gap"),
        (4, False, LogView("e", 4, [("9-0", b"")]), None),
        (4, False, LogView("e", 4, []), None),
        (4, False, LogView("e", 5, [("9-0", b"")]), "moved on"),
        (4, False, LogView("e", 5, [("7-0", b"")]), None),
    ],
)
def test_when_a_reader_begins_again(version, anchored, view, reason):
    assert reset_reason(Place("e", version, "7-0", is_anchored=anchored), view) == reason


def test_all_keys_of_a_namespace_share_one_hash_tag():
    keys = StoreKeys("fp", "ns")
    assert keys.log == "sd:{fp:ns}:log"
    assert {keys.epoch, keys.log, keys.manifest, keys.lease, keys.fence, keys.segment("a")} == {
        f"sd:{{fp:ns}}:{kind}" for kind in ("epoch", "log", "manifest", "lease", "fence", "segment:a")
    }


@pytest.mark.parametrize("name", ["", "a b", "a}b", "a:b", "x" * 129, "ä"])
def test_a_namespace_cannot_reach_out_of_its_keys(name):
    with pytest.raises(SettingError, match="namespace"):
        StoreKeys("fp", name)


@pytest.mark.parametrize("text", ["", "1", "1-", "-1-0", "1-0-0", "x-0", "1-0\n", "1" * 30 + "-0"])
def test_what_is_no_stream_id_is_refused(text):
    with pytest.raises(FormatError):
        parse_id(text)


@pytest.mark.parametrize(
    ("url", "hosts", "mode", "tls"),
    [
        ("redis://cache", (("cache", 6379),), "single", False),
        ("redis://u:p%40@cache:1/3", (("cache", 1),), "single", False),
        ("rediss://[::1]:7000/0", (("::1", 7000),), "single", True),
        ("redis+sentinel://a,b:2/main/1", (("a", 26379), ("b", 2)), "sentinel", False),
        ("rediss+cluster://a:1,b:2", (("a", 1), ("b", 2)), "cluster", True),
    ],
)
def test_addresses(url, hosts, mode, tls):
    address = parse_url(url)
    assert (address.hosts, address.mode, address.tls) == (hosts, mode, tls)
    if "@" in url:
        assert (address.username, address.password, address.database) == ("u", "p@", 3)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://u:secret@cache",
        "redis://u:secret@",
        "redis://u:secret@cache:0",
        "redis://u:secret@cache:99999",
        "redis://u:secret@cache/x",
        "redis://u:secret@cache/1/2",
        "redis://u:secret@a,b",
        "redis://u:secret@cache?db=1",
        "redis://cache?password=secret",
        "redis+sentinel://u:secret@a",
        f"redis://u:secret@{'a' * 64}",
        "redis://u:secret@a..b:1",
        "redis+cluster://u:secret@a/1",
        "redis://u:/secret@cache",
        "redis://u:a@b/secret@cache",
        "redis:u:secret@cache",
        "u:a//secret@cache",
    ],
)
def test_a_bad_address_is_named_without_its_password(url):
    with pytest.raises(SettingError, match="url") as raised:
        ConnectionSettings(url)
    assert "secret" not in str(raised.value) + repr(raised.value)


def test_settings_show_no_password():
    settings = ConnectionSettings("redis://u:secret@cache", password="secret", sentinel_password="secret")
    assert "secret" not in repr(settings) + str(settings) + repr(settings.address)
    assert str(settings) == "single cache:6379"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ConnectionSettings("redis://a", read_timeout_s=0), "read_timeout_s"),
        (lambda: ConnectionSettings("redis://a", num_retries=9), "num_retries"),
        (lambda: ConnectionSettings("redis://a", max_connections=0), "max_connections"),
        (lambda: PublisherSettings(entry_tokens=10**6), "entry_tokens"),
        (lambda: ReaderSettings(read_entries=0), "read_entries"),
        (lambda: FollowerSettings(poll_s=0), "poll_s"),
        (lambda: CompactorSettings(lease_s=0), "lease_s"),
        (lambda: FoldLimits(max_generations=1), "max_generations"),
    ],
)
def test_a_setting_out_of_bounds_is_named(make, field):
    with pytest.raises((SettingError, ValidationError), match=field):
        make()


def test_tls_files_must_exist_and_belong_to_a_tls_address(tmp_path):
    with pytest.raises(SettingError, match="ca_file"):
        ConnectionSettings("redis://a", ca_file=tmp_path / "ca.pem")
    with pytest.raises(SettingError, match="ca_file"):
        ConnectionSettings("rediss://a", ca_file=tmp_path / "ca.pem")
    (tmp_path / "cert.pem").touch()
    with pytest.raises(SettingError, match="key_file"):
        ConnectionSettings("rediss://a", certificate_file=tmp_path / "cert.pem")

"""Whose record a round goes by."""

from cluster.router.traffic import TrafficRecords


def test_a_namespace_has_its_own_record_and_rounds_of_several_have_one_together():
    records = TrafficRecords()
    a, b, mixed = records.of("a"), records.of(["b", "b"]), records.of("ab")
    assert len({id(a), id(b), id(mixed)}) == 3
    assert records.of(["a", "a"]) is a
    assert records.of(["c", "b"]) is mixed
    assert records.of([]) is mixed
    assert a.draft_wait is not b.draft_wait


def test_the_namespace_that_was_used_least_recently_is_forgotten_first():
    records = TrafficRecords()
    found = {number: records.of([str(number)]) for number in range(64)}
    assert records.of(["0"]) is found[0]
    records.of(["new"])
    assert records.of(["0"]) is found[0]
    assert records.of(["1"]) is not found[1]

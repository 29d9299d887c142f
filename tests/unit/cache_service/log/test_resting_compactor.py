"""When compactors come to their turns: less often where there is nothing to fold, or where others fold."""

from types import SimpleNamespace
from weakref import WeakSet

from cache_service.errors import StoreUnavailable
from cache_service.log.compactor import Compactor, CompactorSettings


def compactor(folds, **options):
    """Whose turns fold or not, as is said."""
    released = []
    store = SimpleNamespace(keys="n", release_lease=released.append, released=released)
    made = Compactor(store, None, CompactorSettings(fold_every_s=10.0), **options)
    left = iter(folds)

    def fold():
        outcome = next(left)
        if outcome == "fault":
            raise StoreUnavailable("away")
        made.counters.folds += outcome in ("all", "part")
        return outcome == "part"

    made.fold = fold
    return made


def test_turns_come_seldom_while_there_is_nothing_to_fold_and_as_usual_after_a_write():
    one = compactor(["all", "part", "all", "none", "none", "fault", "none", "none", "none", "all"])
    assert [one.turn() for _ in range(9)] == [10, 0, 10, 20, 40, 80, 160, 320, 320]
    assert one.rests
    one.wake()
    assert not one.rests
    assert one.turn() == 10


def test_where_another_one_folds_writes_do_not_make_turns_more_frequent():
    asked = []
    store = SimpleNamespace(keys="n", read_epoch=lambda: "e", acquire_lease=lambda *owner: asked.append(owner))
    one = Compactor(store, None, CompactorSettings(fold_every_s=10.0))
    assert [one.turn() for _ in range(4)] == [20, 40, 80, 80]
    assert len(asked) == 4
    assert not one.rests


def test_of_several_namespaces_that_a_process_folds_one_is_released_now_and_then():
    folding = WeakSet()
    one, other = (compactor(["all"] * 201, folding=folding) for _ in range(2))
    assert [one.turn() for _ in range(100)] == [10] * 100, "a single one is kept"
    folding.add(other)  # its turn might release its own lease
    pauses = [one.turn() for _ in range(100)]
    assert set(pauses) == {10, 20}
    assert len(one._store.released) == pauses.count(20)
    assert 5 <= pauses.count(20) <= 50  # 25 are expected, the standard deviation is 4.3


def test_a_namespace_without_new_entries_is_no_reason_to_release_another():
    folding = WeakSet()
    one, other = compactor(["all"] * 100, folding=folding), compactor(["all", "none"], folding=folding)
    other.turn()
    other.turn()
    assert [one.turn() for _ in range(100)] == [10] * 100

"""A namespace that nobody writes to is folded ever more seldom."""

from types import SimpleNamespace

from cache_service.errors import StoreUnavailable
from cache_service.log.compactor import Compactor, CompactorSettings


def compactor(folds):
    """Whose turns fold or not, as is said."""
    made = Compactor.__new__(Compactor)
    made.__init__(SimpleNamespace(keys="n"), None, CompactorSettings(fold_every_s=10.0))
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

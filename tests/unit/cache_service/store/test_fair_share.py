"""One tenant that asks under ever new salts pushes out what it has learnt itself, and nobody else's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.contract import MAX_CONTEXT, DraftContext, VerifiedRows
from actors.drafters.registry import create_drafter
from actors.lookahead.shares import SharesByNamespace
from actors.messages import SamplingParams
from cache_service.formats.namespaces import OPEN, PUBLIC, named, namespace_of, namespace_of_salt, owner_of, salted
from cache_service.store.fair_share import first_to_give_way
from cluster.router.calibration import SourceCalibration
from cluster.router.traffic import TrafficRecords

KEY = bytes(32)
HOME = namespace_of(KEY, "home")
SALTED = [namespace_of(KEY, "restless", f"salt {number}") for number in range(1000)]
OPTIONS = {
    "soft_ngram": {"budget_bytes": 1 << 20, "table_bytes": 1 << 17},
    "token_recycling": {},
    "ngram_table": {"budget_bytes": 1 << 20, "max_ngrams": 1 << 12},
}


def test_all_parts_of_an_owner_have_it():
    for owner in (HOME, OPEN, PUBLIC):
        assert owner_of(owner) == owner
        assert owner_of(salted(KEY, owner, "s")) == owner
        assert owner_of(named(owner, "a-name")) == owner
        assert owner_of(named(salted(KEY, owner, "s"), "a-name")) == owner
    assert owner_of(namespace_of_salt(KEY, "one")) == owner_of(namespace_of_salt(KEY, "another"))
    assert namespace_of_salt(KEY, "one") != namespace_of_salt(KEY, "another")
    assert owner_of("") == ""


@given(st.lists(st.sampled_from([f"{owner}-{part}" for owner in "abc" for part in range(4)]), min_size=2, unique=True))
def test_the_oldest_of_the_owner_with_most_goes_and_the_newest_of_all_never(names):
    sizes = {name: 1 + 2 * int(name[-1]) for name in names}
    gone = first_to_give_way(names, sizes.__getitem__)
    held = {owner: sum(size for name, size in sizes.items() if name[0] == owner) for owner in "abc"}
    others = names[:-1]
    most = max(held[name[0]] for name in others)
    assert gone == next(name for name in others if held[name[0]] == most)


def test_whoever_is_alone_gives_way_by_last_use_as_ever():
    assert first_to_give_way(["a-1", "a-2", "a"]) == "a-1"
    assert first_to_give_way(["a", "b", "c"]) == "a"
    assert first_to_give_way(["a", "b", "c"], num_spared=0) == "a"
    with pytest.raises(ValueError, match="empty"):
        first_to_give_way(["a"])


def rows_of(namespace):
    """After 1, 2 comes 3, the target is sure."""
    contexts = np.array([[-1] * (MAX_CONTEXT - 2) + [1, 2]], np.int32)
    return VerifiedRows(namespace, contexts, np.array([[3, 4]], np.int32), np.array([[0.9, 0.05]], np.float32))


def drafted(drafter, namespace):
    context = DraftContext(1, np.array([1, 2], np.int32), 2, 2, 4, SamplingParams(seed=0), namespace)
    tokens = drafter.propose([context])[0].token_ids.tolist()
    drafter.forget(1)
    return tokens


@pytest.mark.parametrize("name", OPTIONS)
def test_a_drafter_keeps_what_it_learnt_of_another_tenant(name):
    drafter = create_drafter(name, **OPTIONS[name])
    drafter.remember(rows_of(HOME))
    before = drafted(drafter, HOME)
    assert before
    for namespace in SALTED:
        drafter.remember(rows_of(namespace))
    assert (drafted(drafter, HOME), drafted(drafter, SALTED[-1])) == (before, before)
    drafter.remember(rows_of(SALTED[-1]))
    assert drafted(drafter, SALTED[0]) == []


def test_the_planner_keeps_what_it_learnt_of_another_tenant():
    calibration, traffic, shares = SourceCalibration(1, 4), TrafficRecords(), SharesByNamespace(list)
    group, record, share = calibration.group(HOME), traffic.of([HOME]), shares.of(HOME)
    calibration.by_sources.observe(3 * group, np.full(100, 0.9), np.zeros(100, bool))
    calibration.end_round([HOME])
    known = calibration.by_sources.curves["level"][3 * group].tolist()
    for namespace in SALTED:
        calibration.group(namespace)
        traffic.of([namespace])
        shares.of(namespace)
    assert calibration.group(HOME) == group
    assert calibration.by_sources.curves["level"][3 * group].tolist() == known
    assert traffic.of([HOME]) is record
    assert shares.of(HOME) is share


def test_the_namespaces_of_one_round_have_different_curves_whoever_they_belong_to():
    calibration = SourceCalibration(1, 8, max_namespaces=2)
    for name in ("b-1", "b-2"):
        calibration.group(name)
    for begin in range(0, 40, 3):  # rounds of eight, each with some that were in the round before
        names = SALTED[begin : begin + 8]
        groups = [calibration.group(name) for name in names]
        assert len(set(groups)) == 8
        assert [calibration.group(name) for name in names] == groups

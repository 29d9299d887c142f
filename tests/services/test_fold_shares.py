"""Routers that write to the same namespaces share their folds, and one that is lost is replaced."""

import time

import numpy as np

from cache_service.formats.documents import Piece
from cache_service.formats.entry_codec import encode_entry
from cache_service.log.compactor import CompactorSettings, CompactorThread
from paceline_testing.cache_stores import Namespace

SETTINGS = CompactorSettings(lease_s=0.6, fold_every_s=0.1)
NUM_NAMESPACES = 8


def write(namespaces, seconds, is_done):
    """An entry for each namespace twice in the time between folds, until `is_done`. Returns whether it was."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until and not is_done():
        for namespace in namespaces:
            tokens = np.arange(number, number + 16, dtype=np.int32)
            namespace.store.append([encode_entry(namespace.codec, [Piece(bytes(16), number, tokens, time_s=1)])], 1000)
        number += 16
        time.sleep(SETTINGS.fold_every_s / 2)
    return is_done()


def test_routers_share_the_folds_of_namespaces_and_one_that_is_lost_is_replaced(shared_server):
    namespaces = [Namespace(shared_server.settings) for _ in range(NUM_NAMESPACES)]
    by_name = {each.keys.namespace: each for each in namespaces}
    for each in namespaces:
        each.store.begin_epoch()
    routers = [CompactorThread(lambda name: by_name[name].open(), SETTINGS) for _ in range(4)]
    compactors = []

    def folds():
        return [[each.counters.folds for each in own] for own in compactors]

    try:
        compactors.append([routers[0].compact(name) for name in by_name])
        assert write(namespaces, 30, lambda: all(folds()[0])), "the first router has all leases"
        compactors += [[router.compact(name) for name in by_name] for router in routers[1:]]
        assert write(namespaces, 60, lambda: all(sum(own) >= 8 for own in folds())), folds()
        lost = max(range(4), key=lambda router: sum(folds()[router]))
        assert routers[lost].close(10)
        before = np.sum(folds(), axis=0)
        assert write(namespaces, 60, lambda: (np.sum(folds(), axis=0) > before).all()), "nobody folds for the lost one"
    finally:
        for router in routers:
            router.close(10)
        for each in namespaces:
            each.connection.close()

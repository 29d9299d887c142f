"""SplitMix64 against its published sequence, and its forms against each other."""

import numpy as np

from cache_service.splitmix64 import STEP, finalize, finalize_uint64, signed


def test_the_generator_with_seed_0_begins_as_published():
    assert [finalize(step * STEP) for step in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_all_forms_give_the_same_bits():
    for value in np.random.default_rng(0).integers(0, 2**64, 100, np.uint64):
        assert int(finalize_uint64(value)) == finalize(int(value))
        assert signed(finalize(int(value))) % 2**64 == finalize(int(value))

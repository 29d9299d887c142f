"""What processes with an event loop ask of Python."""

from __future__ import annotations

import gc
import sys

import pytest

from cluster.interpreter import put_event_loop_first


@pytest.fixture
def _settings_stay():
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


@pytest.mark.usefixtures("_settings_stay")
def test_threads_give_way_soon_and_what_is_loaded_is_not_looked_through_again():
    loaded = [[] for _ in range(1000)]
    put_event_loop_first()
    assert sys.getswitchinterval() <= 1e-4
    assert gc.get_freeze_count() > len(loaded)
    assert not any(one is loaded for one in gc.get_objects())

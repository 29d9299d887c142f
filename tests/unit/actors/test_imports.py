import gc

import pytest

from actors.imports import collecting_no_garbage


def fail() -> None:
    with collecting_no_garbage(), collecting_no_garbage():
        assert not gc.isenabled()
        raise ImportError


def test_garbage_is_collected_again_after_imports_that_fail_or_are_nested():
    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()


def test_a_process_that_collects_none_goes_on_so():
    gc.disable()
    try:
        with collecting_no_garbage():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()

"""Compiled kernels have a place on a machine that lets nothing be written but temporary files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.workers.kernel_cache import prepare_kernel_cache, private_directory

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """Sources and home below a file, where nobody can make a directory, not even root."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr("actors.workers.kernel_cache.__file__", str(file / "cluster" / "kernel_cache.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(file / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")  # so that it is put back, whatever happens to it
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_where_nothing_can_be_written_there_is_a_private_directory_and_the_next_start_finds_it(nowhere):
    prepare_kernel_cache()
    directory = Path(os.environ["NUMBA_CACHE_DIR"])
    assert directory.parent == nowhere
    assert directory.stat().st_mode & 0o777 == 0o700
    del os.environ["NUMBA_CACHE_DIR"]
    prepare_kernel_cache()
    assert os.environ["NUMBA_CACHE_DIR"] == str(directory)


def test_numba_compiles_into_it(nowhere):
    prepare_kernel_cache()
    module = nowhere / "kernel.py"
    module.write_text("from numba import njit\n\n@njit(cache=True)\ndef double(x):\n    return 2 * x\n\ndouble(3)\n")
    subprocess.run([sys.executable, str(module)], check=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert list(Path(os.environ["NUMBA_CACHE_DIR"]).rglob("kernel.double-*.nbi"))


def test_a_name_that_others_have_taken_is_not_used(tmp_path):
    taken = tmp_path / f"paceline-kernels-{os.geteuid()}"
    taken.mkdir(mode=0o777)
    taken.chmod(0o777)
    found = private_directory(tmp_path)
    assert found != taken
    assert found.stat().st_mode & 0o777 == 0o700
    taken.rmdir()
    taken.symlink_to(tmp_path)
    assert private_directory(tmp_path) not in (taken, tmp_path)


def test_what_is_set_or_can_be_written_is_left_alone(nowhere, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prepare_kernel_cache()
    assert "NUMBA_CACHE_DIR" not in os.environ
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/elsewhere")
    prepare_kernel_cache()
    assert os.environ["NUMBA_CACHE_DIR"] == "/elsewhere"

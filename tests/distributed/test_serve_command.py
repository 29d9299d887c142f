"""`paceline serve` as a process: however it is told to stop, it ends itself and everything that it has started."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.cli.serve import _report_build, _start_building_drafter
from paceline_testing.deployed import wait_for
from paceline_testing.scraped import value_of
from paceline_testing.served_command import assert_ends, serving, wait_for_line
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [f"{word} and {word}, then again {word}" for word in ("oak", "elm", "ash")]
NEW_TOKENS = 100


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_nothing_is_left_of_a_server_that_has_answered_and_gets_ctrl_c(model_dir):
    options = ("target.device=cpu", "target.kv_cache_tokens=8192", "gateway.replicas=1")
    with serving(model_dir, *options) as (server, http_port):
        started = wait_for_line(server, "ready")
        body = {"prompt": PROMPTS[0], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{http_port}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert_listen_on_loopback_alone(started)
        os.kill(server.pid, signal.SIGINT)
        assert_ends(server, started)


@pytest.mark.slow
@pytest.mark.timeout(900)  # two starts of Ray, which others on the machine may slow down
def test_what_was_generated_before_a_restart_is_drafted_after_it_and_the_answer_is_the_same(tmp_path):
    """The first server ends by Ctrl-C, the second by SIGTERM to its process group."""
    model = save_tiny_model(tmp_path / "model", "llama", 5, layers=4, hidden_size=96, heads=6, kv_heads=3)
    with serving_from_cache(model, tmp_path) as (server, started, client):
        texts, rounds_before, _ = ask(client)
        wait_for(lambda: metric(client, "paceline_cache_written_tokens_total") >= len(PROMPTS) * NEW_TOKENS, "a write")
        scaled = scale_from_another_terminal("target", "--groups", "1", "--address", ray_address(started))
        assert scaled == "target groups: 1 running, 1 wanted\n"
        os.kill(server.pid, signal.SIGINT)
        assert_ends(server, started)
    with serving_from_cache(model, tmp_path) as (server, started, client):
        wait_for(lambda: metric(client, "paceline_cache_index_tokens") >= len(PROMPTS) * NEW_TOKENS, "the index")
        again, rounds_after, accepted = ask(client)
        assert again == texts
        assert accepted > len(PROMPTS) * NEW_TOKENS / 2
        assert rounds_after < rounds_before / 2
        assert metric(client, "paceline_spec_decode_num_accepted_tokens_total", source="cache") == accepted
        os.killpg(server.pid, signal.SIGTERM)
        assert_ends(server, started)


@contextlib.contextmanager
def serving_from_cache(
    model: Path, home: Path
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], httpx.Client]]:
    """A server that is ready and drafts from the cache that it keeps in `home`, and the processes it has started."""
    options = ["device=cpu", "exact=bitwise", "kv_cache_tokens=8192", "health_timeout_s=60"]
    settings = [*map("target.{}".format, options), "speculation.drafters=[cache]"]
    with serving(model, *settings, home=home) as (server, http_port):
        wait_for_line(server, f"cache   {home / 'cache'}, a server of its own")
        started = wait_for_line(server, "ready")
        with httpx.Client(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as client:
            yield server, started, client


def ask(client: httpx.Client) -> tuple[list[str], int, int]:
    """What is said to PROMPTS, the rounds it took, and the tokens accepted from the cache."""
    texts, rounds, accepted = [], 0, 0
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json={**body, "speculation": {"stats": True}})
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
        stats = answer.json()["speculation"]
        rounds += stats["rounds"]
        accepted += stats["accepted_tokens"].get("cache", 0)
    return texts, rounds, accepted


def ray_address(started: list[psutil.Process]) -> str:
    """Where the server's own Ray listens; other tests may have one on this machine at the same time."""
    (raylet,) = [process for process in started if process.is_running() and process.name() == "raylet"]
    (address,) = [word for word in raylet.cmdline() if word.startswith("--gcs-address=")]
    return address.removeprefix("--gcs-address=")


def scale_from_another_terminal(*arguments: str) -> str:
    """What `paceline scale` prints, without the variables that the server has set for its own Ray."""
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_ADDRESS"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    command = [str(Path(sys.executable).with_name("paceline")), "scale", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    return value_of(client.get("/metrics").text, name, **labels)


def assert_listen_on_loopback_alone(started: list[psutil.Process]) -> None:
    listeners = {process.name(): addresses for process in started if (addresses := listening(process))}
    # Serve binds one port of each replica to all interfaces, whatever is configured; Ray's token guards it.
    open_to_all = {name for name, addresses in listeners.items() if not all(map(is_loopback, addresses))}
    assert all(name.startswith("ray::ServeReplica") for name in open_to_all), listeners
    assert {"gcs_server", "raylet"} <= set(listeners)


def listening(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return []


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_ctrl_c_during_the_start_is_no_traceback_and_leaves_nothing_behind(model_dir, seconds):
    """Seconds that the process itself has computed: on a busy machine it may still be Python alone after as much time,
    which then says so with a traceback and ends with status 1."""
    with serving(model_dir) as (server, _):
        process = psutil.Process(server.pid)
        while sum(process.cpu_times()[:2]) < seconds:
            time.sleep(0.01)
        os.killpg(server.pid, signal.SIGINT)
        time.sleep(0.1)  # a process that is being forked is there by now
        started = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        printed, _ = server.communicate(timeout=90)
        assert server.returncode in (0, 130, -signal.SIGINT)
        assert "Traceback" not in printed
        assert "KeyboardInterrupt" not in printed
        _, left = psutil.wait_procs(started, timeout=15)
        assert not left
        with pytest.raises(ProcessLookupError):
            os.killpg(server.pid, 0)


def test_the_builder_of_the_drafter_ends_with_a_server_that_is_killed(model_dir, tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cluster.cli.serve import _start_building_drafter\n"
        "print(_start_building_drafter(sys.argv[1], Path(sys.argv[2])).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(model_dir), str(tmp_path / "progress")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        builder = psutil.Process(int(parent.stdout.readline()))
        time.sleep(1.0)  # the build takes longer, at the least
        assert builder.is_running()
        assert builder.nice() >= 10
        parent.kill()
        _, left = psutil.wait_procs([builder], timeout=10)
        for process in left:
            process.kill()
        assert not left


@pytest.mark.slow  # the build gives way to all others; what is told of its failure, the next test shows, too
def test_a_drafter_that_cannot_be_built_is_told_with_the_log_that_says_why(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    builder = _start_building_drafter(str(tmp_path / "absent"), tmp_path / "progress")
    told = _report_build(builder, tmp_path / "drafter", tmp_path / "progress", threading.Event())
    told.join(timeout=240)  # the build has only the time that others leave
    out, err = capfd.readouterr()
    log = tmp_path / "drafter-build.log"
    assert (out, err) == ("", f"draft   {tmp_path / 'drafter'} could not be built (exit status 2); see {log}\n")
    assert "absent" in log.read_text()


@pytest.mark.parametrize(
    ("build", "is_stopping", "out", "err"),
    [
        ("true", False, "draft   drafter is built\n", ""),
        ("false", False, "", "draft   drafter could not be built (exit status 1); see drafter-build.log\n"),
        ("false", True, "", ""),
    ],
)
def test_the_end_of_a_build_is_told_unless_the_server_ends(build, is_stopping, out, err, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    stop = threading.Event()
    if is_stopping:
        stop.set()
    with subprocess.Popen([build]) as builder:
        _report_build(builder, tmp_path / "drafter", tmp_path / "progress", stop).join(timeout=60)
    assert tuple(text.replace(f"{tmp_path}/", "") for text in capfd.readouterr()) == (out, err)

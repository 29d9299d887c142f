"""Draft workers come under load and go after it, or as many are there as was said by hand, and run the model that was
said: no request is lost, no text changes, nothing else is restarted.

Covers `cluster.cli.scale`, `cluster.cli.model_change`, `actors.workers.registered_draft`.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import ray
from ray.exceptions import RayError

from actors.workers.directory_actor import find_directory
from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from cluster.ray_names import APPLICATION, DIRECTORY
from paceline_testing.deployed import deployed, scale, wait_for
from paceline_testing.ray_processes import ray_processes
from paceline_testing.right_drafts import EAGER_SCALING, target_and_right_draft
from paceline_testing.scraped import value_of

# Elsewhere on Ray: groups come and go by hand (test_target_groups.py), draft workers change their model
# (test_cluster.py). Their number changes here alone.
pytestmark = pytest.mark.slow

PATIENCE_S = 200.0  # two processes are started

MASK = 3  # a byte that no text here has
PROMPTS = [f"{word} and {word}" for word in ("oak", "elm", "ash")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target, draft = target_and_right_draft(tmp_path_factory.mktemp("models"))
    other = shutil.copytree(draft, draft.with_name("other"))  # a parallel one: its mask tokens are seldom right
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"pard_token": MASK, "spd_type": "pard"}))
    return target, draft, other


@pytest.fixture(scope="module")
def url(ray_here, ports, models):
    config = ClusterConfig.model_validate(
        {
            "target": {
                "model": str(models[0]),
                "device": "cpu",
                "exact": "bitwise",
                "kv_cache_tokens": 8192,
            },
            "draft": {
                "model": str(models[1]),
                "workers": 1,
                "max_workers": 3,
                "branch": 1,
                "device": "cpu",
                "kv_cache_tokens": 8192,
                "deadline_ms": 10_000,
            },
            "autoscaling": EAGER_SCALING,
            "speculation": {"drafters": ["draft_model"]},
            "gateway": ports,
            "cache": {"url": "none"},
        }
    )
    with deployed(config) as url:
        yield url


def metric(url: str, name: str) -> float:
    return value_of(httpx.get(f"{url}/metrics", timeout=30).text, name)


def accepted_drafts(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return value_of(text, "paceline_spec_decode_num_accepted_tokens_total", source="draft_model")


def other_processes() -> set[int]:
    """Everything of the cluster that is no draft worker."""
    replicas = [f"ServeReplica:{APPLICATION}:{name}" for name in ("TargetGroup", "Router", "Gateway")]
    return {process for title in (*replicas, "TargetRank") for process in ray_processes(title)}


@pytest.fixture(scope="module")
def wanted(models):
    """The texts of one process without drafts."""
    oracle = LocalEngine(str(models[0]), drafters=("none",), device="cpu", exact="bitwise", kv_cache_tokens=8192)
    return [answer.text for answer in oracle.generate(PROMPTS, max_new_tokens=80, ignore_eos=True)]


class Load:
    """Clients that ask until they are told to stop, and compare what they get. In a `with` block."""

    def __init__(self, url: str, wanted: list[str]) -> None:
        self._url, self._wanted = url, wanted
        self._pool = ThreadPoolExecutor(8)
        self._clients: list[Future[None]] = []
        self._flags: list[threading.Event] = []
        self.num_served = 0

    def add(self, index: int, **options: object) -> threading.Event:
        """A client of a prompt. It asks until the event is cleared."""
        goes_on = threading.Event()
        goes_on.set()
        self._flags.append(goes_on)
        self._clients.append(self._pool.submit(self._ask, index, goes_on, options))
        return goes_on

    def _ask(self, index: int, goes_on: threading.Event, options: dict[str, object]) -> None:
        body = {"prompt": PROMPTS[index], "max_tokens": 80, "temperature": 0, "ignore_eos": True, **options}
        while goes_on.is_set():
            answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == self._wanted[index]
            self.num_served += 1
            time.sleep(1.0)  # any load is reason enough, and the workers that come need the machine

    def wait_for_answers(self, number: int) -> None:
        before = self.num_served
        wait_for(lambda: self.num_served > before + number, f"{number} answers")

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        for flag in self._flags:
            flag.clear()
        with self._pool:
            for client in self._clients:
                client.result()


def test_one_to_three_workers_and_back_under_load_loses_no_request_and_changes_no_text(url, wanted):
    wait_for(lambda: metric(url, "paceline_draft_workers") == 1, "the first worker")
    before = other_processes()
    assert len(before) >= 4
    with Load(url, wanted) as load:
        busy = [load.add(index) for index in range(len(PROMPTS))]
        load.add(0, speculation={"enabled": False})
        wait_for(lambda: metric(url, "paceline_draft_workers") == 3, "three workers", PATIENCE_S)
        load.wait_for_answers(10)  # all three have drafted
        for client in busy:  # what goes on asks for no drafts
            client.clear()
        wait_for(lambda: metric(url, "paceline_draft_workers") == 1, "the end of two workers", PATIENCE_S)
    assert metric(url, "paceline_late_drafts_total") == 0
    assert metric(url, "paceline_request_resumed_total") == 0
    assert other_processes() == before


def held_workers() -> int | None:
    """What the directory knows; None while it is being restarted."""
    try:
        return int(ray.get(find_directory(DIRECTORY).draft_demand.remote()).held)
    except RayError:
        return None


def served_models() -> list[str]:
    workers = ray.get(find_directory(DIRECTORY).workers.remote("draft"))
    return sorted(Path(worker.model).name for worker in workers)


def change_models(other: Path) -> None:
    """Two workers under load: to another model, and to what is none."""
    processes = ray_processes("ServeReplica:paceline:DraftPool")
    patience = ("--wait-s", str(PATIENCE_S))
    done = scale("draft", "--model", str(other), *patience)
    assert done.stderr == ""
    assert done.stdout == f"draft workers: the model from now on is {other}\ndraft workers: 2 run it\n"
    assert served_models() == ["other", "other"]
    done = scale("draft", "--model", "/not/there", *patience)
    assert done.returncode == 2
    assert "keep the model that they have: " in done.stderr
    assert "/not/there" in done.stderr
    assert served_models() == ["other", "other"]
    assert ray_processes("ServeReplica:paceline:DraftPool") == processes


def test_by_hand_there_are_as_many_and_they_run_what_was_said_until_it_is_taken_back(url, wanted, models):
    before = other_processes()
    with Load(url, wanted) as load:
        load.add(0, speculation={"enabled": False})  # by themselves there would be one
        done = scale("draft", "--workers", "2", "--wait-s", str(PATIENCE_S))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "draft workers: 1 running, 2 wanted\ndraft workers: 2 running\n"
        wait_for(lambda: metric(url, "paceline_draft_workers") == 2, "two workers")
        ray.kill(find_directory(DIRECTORY), no_restart=False)
        load.add(1)  # would have three of them
        wait_for(lambda: held_workers() == 2, "the directory, which still knows it")
        load.wait_for_answers(4)
        wait_for(lambda: metric(url, "paceline_draft_workers") == 2, "both workers, still")
        change_models(models[2])
        accepted = accepted_drafts(url)
        load.wait_for_answers(2)
        wait_for(lambda: accepted_drafts(url) > accepted, "drafts of the parallel model")
    done = scale("draft", "--workers", "auto", "--model", "auto")
    assert done.stdout == (
        "draft workers: 2 running, from now on as the load asks for\n"
        "draft workers: the model from now on is that of the configuration\n"
    )
    wait_for(lambda: metric(url, "paceline_draft_workers") == 1, "the end of the other worker", PATIENCE_S)
    wait_for(lambda: served_models() == ["draft"], "the model of the configuration")
    assert metric(url, "paceline_request_resumed_total") == 0
    assert other_processes() == before

"""Draft workers come under load and go after it: no request is lost, no text changes, nothing else is restarted."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from cluster.serve import APPLICATION
from paceline_testing.deployed import deployed, wait_for
from paceline_testing.ray_processes import ray_processes
from paceline_testing.right_drafts import EAGER_SCALING, target_and_right_draft
from paceline_testing.scraped import value_of

PATIENCE_S = 200.0  # two processes are started
PROMPTS = [f"{word} and {word}" for word in ("oak", "elm", "ash")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return target_and_right_draft(tmp_path_factory.mktemp("models"))


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


def other_processes() -> set[int]:
    """Everything of the cluster that is no draft worker."""
    replicas = [f"ServeReplica:{APPLICATION}:{name}" for name in ("TargetGroup", "Router", "Gateway")]
    return {process for title in (*replicas, "TargetRank") for process in ray_processes(title)}


def test_one_to_three_workers_and_back_under_load_loses_no_request_and_changes_no_text(url, models):
    oracle = LocalEngine(str(models[0]), drafters=("none",), device="cpu", exact="bitwise", kv_cache_tokens=8192)
    wanted = [answer.text for answer in oracle.generate(PROMPTS, max_new_tokens=80, ignore_eos=True)]
    wait_for(lambda: metric(url, "paceline_draft_workers") == 1, "the first worker")
    before = other_processes()
    assert len(before) >= 4
    busy, light = threading.Event(), threading.Event()
    busy.set()
    light.set()
    served: list[int] = []

    def keep_asking(index: int, while_set: threading.Event, options: dict) -> None:
        body = {"prompt": PROMPTS[index], "max_tokens": 80, "temperature": 0, "ignore_eos": True, **options}
        while while_set.is_set():
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == wanted[index]
            served.append(index)
            time.sleep(1.0)  # any load is reason enough, and the workers that come need the machine

    with ThreadPoolExecutor(8) as pool:
        try:
            loads = [pool.submit(keep_asking, index, busy, {}) for index in range(len(PROMPTS))]
            loads.append(pool.submit(keep_asking, 0, light, {"speculation": {"enabled": False}}))
            wait_for(lambda: metric(url, "paceline_draft_workers") == 3, "three workers", PATIENCE_S)
            num_served = len(served)
            wait_for(lambda: len(served) > num_served + 10, "answers that all three have drafted")
            busy.clear()  # what goes on asks for no drafts
            wait_for(lambda: metric(url, "paceline_draft_workers") == 1, "the end of two workers", PATIENCE_S)
        finally:
            busy.clear()
            light.clear()
        for load in loads:
            load.result()
    assert metric(url, "paceline_late_drafts_total") == 0
    assert metric(url, "paceline_request_resumed_total") == 0
    assert other_processes() == before

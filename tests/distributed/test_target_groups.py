"""Target groups come under load and go after it, or by hand, routers and groups die meanwhile: no request is lost and
no text changes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from cluster.ray_names import APPLICATION
from paceline_testing.ascii_model import speak_ascii
from paceline_testing.deployed import deployed, scale, wait_for
from paceline_testing.panels import everything_asked, names_in
from paceline_testing.ray_processes import ray_processes
from paceline_testing.scraped import value_of
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [f"{word} and {word}, then again {word}" for word in ("oak", "elm", "ash", "fir", "yew", "box")]
TOKENS = 60
STREAMED = 240  # tokens of streams during which something dies
BEGUN_WITHIN_S = 120.0


class Cluster:
    """A running cluster as its clients see it."""

    def __init__(self, url: str, wanted: list[str]) -> None:
        self.url = url
        self.wanted = wanted  # what a process of its own says to each prompt
        self.is_busy = threading.Event()
        self.served: list[int] = []
        self._pool = ThreadPoolExecutor(16)
        self._loads: list[Future[None]] = []

    def page(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=30).text

    def num_groups(self) -> float:
        return value_of(self.page(), "paceline_target_connected")

    def keep_busy(self) -> None:
        self.is_busy.set()
        self._loads = [self._pool.submit(self._keep_asking, index) for index in range(len(PROMPTS))]

    def let_go(self) -> None:
        """Raises what a request of the load has met with."""
        self.is_busy.clear()
        for load in self._loads:
            load.result()

    def stream_all(self, then: Callable[[], None]) -> None:
        """All prompts at once; when all streams have begun, `then`. Each must be what a process of its own says."""
        begun = [threading.Event() for _ in PROMPTS]
        streams = [self._pool.submit(self._stream, index, one) for index, one in enumerate(begun)]
        assert all(one.wait(BEGUN_WITHIN_S) for one in begun)
        then()
        assert [stream.result() for stream in streams] == self.wanted

    def _keep_asking(self, index: int) -> None:
        body = {"prompt": PROMPTS[index], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        with httpx.Client(timeout=240) as client:
            while self.is_busy.is_set():
                answer = client.post(f"{self.url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == self.wanted[index][:TOKENS]
                self.served.append(index)

    def _stream(self, index: int, begun: threading.Event) -> str:
        body = {"prompt": PROMPTS[index], "max_tokens": STREAMED, "temperature": 0, "ignore_eos": True, "stream": True}
        text = ""
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=240) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    begun.set()
        return text


@pytest.fixture(scope="module")
def cluster(ray_here, ports, tmp_path_factory):
    """One target group and load that is too much for it."""
    model = save_tiny_model(tmp_path_factory.mktemp("target"), "llama", 5, layers=4, hidden_size=96, max_positions=1024)
    speak_ascii(model)
    engine = LocalEngine(str(model), drafters=("none",), device="cpu", exact="bitwise", kv_cache_tokens=8192)
    wanted = [answer.text for answer in engine.generate(PROMPTS, max_new_tokens=STREAMED, ignore_eos=True)]
    config = ClusterConfig.model_validate(
        {
            "target": {
                "model": str(model),
                "device": "cpu",
                "exact": "bitwise",
                "kv_cache_tokens": 8192,
                "max_groups": 2,
            },
            "draft": {"model": "none"},
            "autoscaling": {
                "target_queue_s": 0.01,
                "look_back_s": 2.0,
                "upscale_delay_s": 0.0,
                "downscale_delay_s": 1.0,
            },
            "speculation": {"drafters": ["none"]},
            "router": {"max_running": 2},
            "gateway": {**ports, "replicas": 2},
            "cache": {"url": "none"},
        }
    )
    with deployed(config) as url:
        one = Cluster(url, wanted)
        yield one
        one.is_busy.clear()


@pytest.fixture(scope="module")
def two_groups(cluster):
    """The same with the second group that its load has brought."""
    wait_for(
        lambda: httpx.get(f"{cluster.url}/readyz", timeout=30).json()["detail"].startswith("1 of 2 routers ready"),
        "the router that stands by",
    )
    cluster.keep_busy()
    wait_for(lambda: cluster.num_groups() == 2, "the second group")
    return cluster


@pytest.fixture(scope="module")
def held_groups(two_groups):
    """Both are held by hand, and the load is over."""
    done = scale("target", "--groups", "2")
    assert done.stdout == "target groups: 2 running, 2 wanted\n"
    two_groups.let_go()
    return two_groups


def test_both_groups_serve_each_through_a_router_of_its_own(two_groups):
    # Who does not answer soon, as on a busy machine, is left out of a page.
    def ids(label: str, page: str) -> set[str]:
        return {value for found, value in labels_of(page) if found == label}

    def emitted() -> dict[str, float]:
        page = two_groups.page()
        routers = ids("router", page)
        return {router: value_of(page, "paceline_emitted_tokens_total", router=router) for router in routers}

    def have_worked() -> bool:
        now = emitted()
        return len(now) == 2 and all(tokens > before.get(router, 0.0) + 100 for router, tokens in now.items())

    before = emitted()
    wait_for(have_worked, "work for both")
    wait_for(lambda: len(ids("gateway", two_groups.page())) == 2, "the metrics of both gateways")
    num_served = len(two_groups.served)
    wait_for(
        lambda: value_of(two_groups.page(), "paceline_request_success_total") >= num_served, "the count of all answers"
    )
    page = two_groups.page()
    names = {name for asked in everything_asked() for name, _ in asked.series}
    missing = {name for name in names - names_in(page).keys() if f"# HELP {name} " not in page}
    assert {name for name in missing if not name.startswith("paceline_cache_")} == set()


def labels_of(page: str) -> set[tuple[str, str]]:
    found = set()
    for line in page.splitlines():
        for label in ("router", "gateway"):
            if f'{label}="' in line:
                found.add((label, line.partition(f'{label}="')[2].partition('"')[0]))
    return found


def test_conversations_come_back_to_the_router_that_has_their_prefix(held_groups):
    """Four conversations take turns at two gateways, so that neither sees all of them: nearly all of each prompt that
    can be is taken from the prefix cache. A router chosen by chance has it half of the time."""
    prompts = [f"{number} " + word * 60 for number, word in enumerate(("oak ", "elm ", "ash ", "fir "))]
    shares: list[float] = []  # of each turn's prompts, from the cache
    with httpx.Client(timeout=240) as client:
        while len(shares) < 4 or (min(shares[-3:]) < 0.9 and len(shares) < 25):
            cached = possible = 0
            for index, prompt in enumerate(prompts):
                body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                answer = client.post(f"{held_groups.url}/v1/completions", json=body).json()
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                possible += len(prompt) - 20
                prompts[index] = prompt + answer["choices"][0]["text"] + " and on"
            shares.append(cached / possible)
            time.sleep(0.6)  # a person reads; routers tell more than once
    assert min(shares[-3:]) >= 0.9, shares


def test_all_answers_of_one_request_come(held_groups):
    """Each is a call of its own, routed at the same time as the others."""
    body = {"prompt": "one of many", "max_tokens": 8, "n": 6, "temperature": 1.0}
    answer = httpx.post(f"{held_groups.url}/v1/completions", json=body, timeout=60)
    assert len(answer.json()["choices"]) == 6


@pytest.mark.slow  # the same with one router is in test_cluster.py, with the router alone in test_gateway_serve.py
def test_streams_of_a_router_that_is_killed_go_on_through_the_other(held_groups):
    routers = ray_processes(f"ServeReplica:{APPLICATION}:Router")
    assert len(routers) == 2
    held_groups.stream_all(lambda: os.kill(routers[0], signal.SIGKILL))
    wait_for(lambda: held_groups.num_groups() == 2, "a router for the group that is left")


def test_streams_on_a_group_that_is_killed_go_on_with_the_other(held_groups):
    ranks = ray_processes("TargetRank")
    assert len(ranks) == 2
    held_groups.stream_all(lambda: os.kill(ranks[0], signal.SIGKILL))
    wait_for(lambda: len(set(ray_processes("TargetRank")) - {ranks[0]}) == 2, "another group")
    wait_for(lambda: held_groups.num_groups() == 2, "its readiness")


def test_by_hand_a_group_goes_and_no_stream_breaks(held_groups):
    def one_group() -> None:
        done = scale("target", "--groups", "1", "--wait-s", "200")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "target groups: 2 running, 1 wanted\ntarget groups: 1 running\n"

    held_groups.stream_all(one_group)
    wait_for(lambda: len(ray_processes("TargetRank")) == 1, "the end of its process")
    held_groups.stream_all(lambda: None)
    assert value_of(held_groups.page(), "paceline_request_failure_total") == 0


@pytest.mark.slow  # the second group has come under load before
def test_after_that_the_second_group_comes_and_goes_with_the_load_and_no_request_is_lost(held_groups):
    held_groups.keep_busy()
    num_served = len(held_groups.served)
    wait_for(lambda: len(held_groups.served) > num_served + 10, "answers of the group that is left")
    assert held_groups.num_groups() == 1  # the load would have two
    done = scale("target", "--groups", "auto")
    assert done.stdout == "target groups: 1 running, from now on as the load asks for\n"
    wait_for(lambda: held_groups.num_groups() == 2, "the second group")
    held_groups.let_go()
    wait_for(lambda: held_groups.num_groups() == 1, "the end of the second group")
    wait_for(lambda: len(ray_processes("TargetRank")) == 1, "the end of its process")
    held_groups.stream_all(lambda: None)
    assert value_of(held_groups.page(), "paceline_request_failure_total") == 0

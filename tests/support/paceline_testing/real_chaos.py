"""A real cluster on one Ray. Its processes and its cache server are killed and stopped, its groups come and go: what
becomes of the requests of those who stay."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import httpx
import psutil

from actors.workers.directory_actor import get_or_create_directory
from cache_service.store.embedded_server import EmbeddedServer
from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from cluster.ray_names import APPLICATION, DIRECTORY
from paceline_testing.cache_stores import kill
from paceline_testing.deployed import deployed, scale, wait_for
from paceline_testing.ray_processes import ray_processes
from paceline_testing.scraped import value_of
from paceline_testing.served_load import Client, Load, Manner, Question, Record
from paceline_testing.toy_overlay import toy_models

_WORDS = ("oak", "elm", "ash", "fir", "yew", "box", "bay", "fig")
_SEED = 11
_STREAM_TOKENS, _UNARY_TOKENS = 480, 60
_KV_TOKENS = 8192
_GATEWAYS = 2
_DRAFT_WORKERS = 2
# One of five reads slowly, one leaves.
_MANNERS = (Manner(), Manner(pause_s=0.1), Manner(), Manner(num_parts=7), Manner())

_LOOK_AGAIN_S = 2.0
_MEMORY_TURNS = 10  # of looks, from one measurement of memory to the next
_UNSEEN_S = 8.0  # for which a fault may not show yet
# From the end of one fault to the next: a draft worker that starts takes time that groups need.
_REST_S = {"gateway": 15.0, "draft worker": 10.0, "cache server": 10.0, "directory": 10.0, "relay": 10.0}
_AT_ONCE = 0.25  # share of the faults that come together with the one before
_MEAN_PAUSE_S = 4.0  # before the others
_LONGEST_STOP_S = 12.0  # also of the cache's server after its end
_WHOLE_WITHIN_S = 600.0

_RESUMED = re.compile(r'^paceline_request_resumed_total\{gateway="(\w+)"\} (\S+)', re.MULTILINE)

_ASK_AGAIN = "the same call may be sent again"

# How the processes of each part are called, see `ray_processes`.
_TITLES = {
    "rank": "TargetRank",
    "group": f"ServeReplica:{APPLICATION}:TargetGroup",
    "router": f"ServeReplica:{APPLICATION}:Router",
    "gateway": f"ServeReplica:{APPLICATION}:Gateway",
    "draft worker": f"ServeReplica:{APPLICATION}:DraftPool",
    "directory": "DirectoryActor",
    "relay": "RelayActor",
}
_OF_A_GROUP = ("rank", "group", "router")  # without it the group serves nobody

Outcome = Literal["right", "left", "refused", "ended with its gateway", "failed"]


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    at: float  # of `time.monotonic`
    seconds: float = 0.0  # that it lasts; 0: it is an end


@dataclass(slots=True)
class Chaos:
    """One run."""

    began: float
    seconds: float
    records: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    num_resumed: int = 0  # streams that went on elsewhere, at least: a killed gateway takes its last count with it
    most_bytes: int = 0  # of memory in the cluster's processes together
    num_cached: int = 0  # draft tokens from the shared cache that were verified, by the routers that are left
    left_over: list[str] = field(default_factory=list)  # what was not as it should be in the end

    def outcome(self, record: Record) -> Outcome:
        if record.error is None:
            return "left" if record.has_left else "right"
        has_begun = len(record.gaps_s) > 1
        if not has_begun and ("AssertionError: 429" in record.error or "RESOURCE_EXHAUSTED" in record.error):
            return "refused"
        return "ended with its gateway" if self._ended_with_gateway(record) else "failed"

    def _ended_with_gateway(self, record: Record) -> bool:
        """Answers of a killed gateway end with an error that says so, and may be asked for again. Slow readers come to
        it late."""
        kills = [fault.at for fault in self.faults if fault.kind == "kill gateway"]
        unseen_s = _UNSEEN_S + len(record.gaps_s) * record.manner.pause_s
        return _ASK_AGAIN in (record.error or "") and any(
            record.started <= at <= record.ended <= at + unseen_s for at in kills
        )

    @property
    def whole_streams(self) -> list[Record]:
        """Those that were read as they came, to their end."""
        return [
            record
            for record in self.records
            if "stream" in record.kind and not record.manner.pause_s and self.outcome(record) == "right"
        ]

    @property
    def failures(self) -> list[Record]:
        return self.with_outcome("failed")

    def with_outcome(self, outcome: Outcome) -> list[Record]:
        return [record for record in self.records if self.outcome(record) == outcome]

    def during(self, began: float, ended: float) -> list[Fault]:
        """What happened between the times, or shortly before."""
        return [
            fault
            for fault in self.faults
            if fault.at <= ended and max(fault.at + fault.seconds, fault.at + _UNSEEN_S) >= began
        ]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the cluster has last shown of itself."""

    at: float
    num_ready: int  # routers, each with a target group
    num_gateways: int


class _Watch:
    """Looks at a cluster in a thread of its own until it is closed."""

    def __init__(self, url: str, chaos: Chaos) -> None:
        self.last = _Seen(0.0, 0, 0)
        self._url = url
        self._chaos = chaos
        self._resumed: dict[str, float] = {}  # by gateway
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> None:
        began = time.monotonic()
        page = httpx.get(f"{self._url}/metrics", timeout=20).text
        resumed = {gateway: float(count) for gateway, count in _RESUMED.findall(page)}
        self._resumed |= resumed
        self._chaos.num_resumed = int(sum(self._resumed.values()))
        detail = httpx.get(f"{self._url}/readyz", timeout=20).json()["detail"]
        found = re.match(r"(\d+) of \d+ routers ready", detail)
        self.last = _Seen(began, int(found[1]) if found else 0, len(resumed))

    def _look_on(self) -> None:
        turn = 0
        while not self._over.wait(_LOOK_AGAIN_S):
            if turn % _MEMORY_TURNS == 0:
                self._chaos.most_bytes = max(self._chaos.most_bytes, _memory_bytes())
            turn += 1
            with suppress(httpx.HTTPError, ValueError, KeyError):
                self.look()


class _Faults:
    """Causes faults by chance, never so many that fewer than a third of the groups serve."""

    def __init__(self, groups: int, cache: EmbeddedServer, watch: _Watch, chaos: Chaos, drawn: random.Random) -> None:
        self._groups = groups
        self._wanted = groups
        self._cache = cache
        self._watch = watch
        self._chaos = chaos
        self._drawn = drawn
        self._going_on: list[tuple[threading.Timer, Callable[[], None]]] = []
        self._scaler = ThreadPoolExecutor(1)
        self._scaling: Future[None] | None = None

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                kinds = self._possible()
                if kinds:
                    self._cause(self._drawn.choice(kinds))
                if not kinds or self._drawn.random() > _AT_ONCE:
                    time.sleep(self._drawn.expovariate(1 / _MEAN_PAUSE_S))
        finally:
            self.end()

    def end(self) -> None:
        """What is stopped goes on, and all groups come back."""
        for timer, go_on in self._going_on:
            timer.cancel()
            timer.join()
            go_on()
        if self._scaling is not None:
            self._scaling.result()
        _scale_to(self._groups)

    def _possible(self) -> list[str]:
        """Kinds of faults that leave enough alive."""
        kinds = [
            f"{how} {part}"
            for part in ("draft worker", "cache server", "directory", "relay")
            if self._has_rested(part)
            for how in ("kill", "stop")
        ]
        if self._num_spare() >= 1:
            kinds += ["kill rank", "kill group", "kill router", "stop rank", "stop router"]
        if self._may_scale():
            kinds.append("scale")
        if self._are_gateways_whole():
            kinds += ["kill gateway", "stop gateway"]
        return kinds

    def _may_scale(self) -> bool:
        is_free = self._scaling is None or self._scaling.done()
        return is_free and (self._wanted < self._groups or self._num_spare() >= 1)

    def _num_spare(self) -> int:
        """Groups that may go, by what was seen and by what may not show yet."""
        seen = self._watch.last
        unseen = sum(_is_of_a_group(fault.kind) and fault.at > seen.at - _UNSEEN_S for fault in self._chaos.faults)
        return min(seen.num_ready, self._wanted) - unseen - max(1, self._groups // 3)

    def _are_gateways_whole(self) -> bool:
        seen = self._watch.last
        return self._has_rested("gateway") and seen.at > self._last("gateway") and seen.num_gateways == _GATEWAYS

    def _has_rested(self, part: str) -> bool:
        return time.monotonic() > self._last(part) + _REST_S[part]

    def _last(self, part: str) -> float:
        """When the last fault of the part was over."""
        return max((fault.at + fault.seconds for fault in self._chaos.faults if fault.kind.endswith(part)), default=0.0)

    def _cause(self, kind: str) -> None:
        if kind == "scale":
            self._scale()
            return
        how, _, part = kind.partition(" ")
        is_cache = part == "cache server"
        found = [self._cache.pid] if is_cache else ray_processes(_TITLES[part])
        if not found:
            return
        process = psutil.Process(self._drawn.choice(found))
        seconds = self._drawn.uniform(1.0, _LONGEST_STOP_S) if how == "stop" or is_cache else 0.0
        self._chaos.faults.append(Fault(kind, time.monotonic(), seconds))
        if how == "stop":
            _send(process, signal.SIGSTOP)
        elif is_cache:
            kill(self._cache)
        else:
            _send(process, signal.SIGKILL)
        if seconds:
            go_on = self._cache.restart if how == "kill" else partial(_send, process, signal.SIGCONT)
            timer = threading.Timer(seconds, go_on)
            timer.start()
            self._going_on.append((timer, go_on))

    def _scale(self) -> None:
        """To fewer groups if there are all, else to all."""
        is_down = self._wanted == self._groups
        self._wanted = self._groups - self._drawn.randint(1, max(1, self._num_spare())) if is_down else self._groups
        self._chaos.faults.append(Fault("scale down" if is_down else "scale up", time.monotonic()))
        self._scaling = self._scaler.submit(_scale_to, self._wanted)


def _is_of_a_group(kind: str) -> bool:
    return kind.partition(" ")[2] in _OF_A_GROUP


def _scale_to(groups: int) -> None:
    done = scale("target", "--groups", str(groups))
    assert done.returncode == 0, done.stderr


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _memory_bytes() -> int:
    """Of this process's children, each page once."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def run_chaos(directory: Path, ports: dict[str, int], groups: int, seconds: float, seed: int) -> Chaos:
    """On the Ray of this process. directory: for models and the cache's server; ports: of the gateway."""
    target, draft = toy_models(directory)
    asked = _questions(target)
    with EmbeddedServer(directory / "cache") as cache, _cluster(target, draft, cache, ports, groups) as client:
        chaos = Chaos(time.monotonic(), seconds)
        watch = _Watch(client.url, chaos)
        try:
            _wait_until_whole(watch, groups)
            with Load(client, _clients(groups), asked, _MANNERS) as load:
                load.wait_for_answers()
                chaos.began = time.monotonic()
                _Faults(groups, cache, watch, chaos, random.Random(seed)).run(seconds)
            chaos.records = load.records
            _wait_until_whole(watch, groups)
            page = httpx.get(f"{client.url}/metrics", timeout=30).text
            chaos.num_cached = int(value_of(page, "paceline_spec_decode_num_draft_tokens_total", source="cache"))
            chaos.left_over = _left_over(client)
        finally:
            watch.close()
    return chaos


def _clients(groups: int) -> dict[str, int]:
    few = max(1, groups // 2)
    return {"HTTP stream": groups, "HTTP chat stream": few, "gRPC stream": few, "HTTP": 1, "gRPC": 1}


def _questions(target: Path) -> dict[str, Sequence[Question]]:
    """For each kind of request, greedy and sampled, with the answers of one process without drafts."""
    engine = LocalEngine(str(target), drafters=("none",), device="cpu", exact="bitwise", kv_cache_tokens=_KV_TOKENS)
    prompts = [f"{word} and {word}, then again {word}" for word in _WORDS]

    def ask(is_chat: bool) -> list[Question]:
        given = [[{"role": "user", "content": prompt}] for prompt in prompts] if is_chat else prompts
        return [
            Question(prompt, _STREAM_TOKENS, answer.text, temperature, _SEED + index)
            for temperature in (0.0, 0.9)
            for index, (prompt, answer) in enumerate(
                zip(
                    prompts,
                    engine.generate(
                        given, max_new_tokens=_STREAM_TOKENS, ignore_eos=True, temperature=temperature, seed=_SEED
                    ),
                    strict=True,
                )
            )
        ]

    streams = ask(is_chat=False)
    unary = [
        Question(one.prompt, _UNARY_TOKENS, one.answer[:_UNARY_TOKENS], one.temperature, one.seed) for one in streams
    ]
    return {
        "HTTP stream": streams,
        "HTTP chat stream": ask(is_chat=True),
        "gRPC stream": streams,
        "HTTP": unary,
        "gRPC": unary,
    }


@contextmanager
def _cluster(target: Path, draft: Path, cache: EmbeddedServer, ports: dict[str, int], groups: int) -> Iterator[Client]:
    """Groups by hand, a router for each. The directory has relays, as if its callers were many."""
    get_or_create_directory(DIRECTORY, lifetime="detached", most_callers=groups)
    model = {"device": "cpu", "kv_cache_tokens": _KV_TOKENS}
    config = ClusterConfig.model_validate(
        {
            "target": {**model, "model": str(target), "served_name": "tiny", "exact": "bitwise", "max_groups": groups},
            "draft": {**model, "model": str(draft), "workers": _DRAFT_WORKERS},
            "gateway": {**ports, "replicas": _GATEWAYS},
            "cache": {"url": cache.url, "password_file": str(cache.password_file)},
        }
    )
    with deployed(config) as url:
        client = Client(url, f"127.0.0.1:{config.gateway.grpc_port}")
        _scale_to(groups)
        yield client
        client.close()


def _wait_until_whole(watch: _Watch, groups: int) -> None:
    since = time.monotonic()

    def is_whole() -> bool:
        seen = watch.last
        return seen.at > since and (seen.num_ready, seen.num_gateways) == (groups, _GATEWAYS)

    wait_for(is_whole, "the whole cluster", _WHOLE_WITHIN_S)


def _left_over(client: Client) -> list[str]:
    """Requests that routers still have though no client waits for one."""

    def still() -> list[str]:
        page = httpx.get(f"{client.url}/metrics", timeout=30).text
        names = ("paceline_sequences_running", "paceline_sequences_waiting")
        return [f"{name} is {value:g}" for name in names if (value := value_of(page, name))]

    with suppress(AssertionError):
        wait_for(lambda: not still(), "the end of all sequences", 30.0)
    return still()

"""The shared cache under constant traffic for long: whether memory, stream, segments, indexes and handles stay level.

    nice taskset -c 0 python tests/soak/soak_cache.py [--minutes 20] [--routers 2] [--json samples.json]

A real server, and routers in processes of their own that share one cache: a toy target's answers, each compared with
what the target answers by itself, and documents beside them, in namespaces that come, are purged, go and expire, while
compactors take turns, generations rotate and indexes are built anew. Everything is sampled every ten seconds; what
grows in the second half by more than its bound is printed, and the exit status is 1. It levels out within some minutes:
shorter runs than ten minutes prove little.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import psutil
from flatness import Bound, Judgement, judge
from soak_router import FINGERPRINT, RouterPlan, namespaces_at

from cache_service.admin.administration import CacheAdministration
from cache_service.errors import NamespaceBusy, NamespaceUnknown
from cache_service.formats.namespaces import OPEN
from cache_service.formats.purged_times import TimeRange
from cache_service.formats.store_keys import StoreKeys
from cache_service.store.admin_store import known_keys
from cache_service.store.connection import Connection, open_client
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cli.table import print_table

MIB = 2**20
SAMPLE_S = 10.0
NAMESPACE_S = 15.0
PURGE_S = 25.0

_HANDLES = Bound(0.0, 2.0)
# By the last part of a series' name; in the half that is judged.
BOUNDS = {
    "rss_mib": Bound(0.03, 4.0),
    "private_mib": Bound(0.03, 4.0),  # without files that are mapped
    "threads": _HANDLES,
    "fds": _HANDLES,
    "used_mib": Bound(0.10, 2.0),
    "keys": Bound(0.10, 10.0),
    "log_entries": Bound(0.10, 50.0),
    "segments": Bound(0.10, 5.0),
    "segment_mib": Bound(0.10, 0.5),
    "index_tokens": Bound(0.10, 10_000.0),
    "index_mib": Bound(0.10, 1.0),
    "files": Bound(0.10, 8.0),  # two an index: so far two of them may differ by the luck of sweeps, once a minute
    "file_mib": Bound(0.10, 2.0),
}
MUST_BE_ZERO = ("wrong", "failed", "drafter_errors", "sink_faults", "overflow_tokens", "faults", "damaged")
TOTALS = ("finished", "emitted_tokens", "rounds", "accepted", "written_tokens", "purged_tokens", "failures", "folds",
          "resets", "builds", "maps", "evictions")  # fmt: skip


class RouterProcess:
    """A router and its last figures."""

    def __init__(self, plan: RouterPlan) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("soak_router.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(plan).decode() + "\n")
        self._child.stdin.flush()
        self.process = psutil.Process(self._child.pid)
        self.figures: dict[str, float] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self._child.poll() is None

    def stop(self) -> int:
        """Its exit status."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            return self._child.wait(60)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.figures = json.loads(line)


class Soak:
    """Server, routers, and what is looked at."""

    def __init__(self, server: EmbeddedServer, routers: list[RouterProcess], directory: Path) -> None:
        self._server = server
        self._routers = routers
        self._directory = directory
        self._connection = Connection(server.settings)
        self._redis = open_client(server.settings)
        self._admin = CacheAdministration(self._connection, index_directory=directory)
        self._processes = {
            "server": psutil.Process(server.pid),
            **{f"router{number}": router.process for number, router in enumerate(routers)},
        }
        self.purges: Counter[str] = Counter()

    def sample(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, process in self._processes.items():
            found |= {
                f"{name}.rss_mib": (memory := process.memory_info()).rss / MIB,
                f"{name}.private_mib": (memory.rss - memory.shared) / MIB,
                f"{name}.threads": process.num_threads(),
                f"{name}.fds": process.num_fds(),
            }
        for number, router in enumerate(self._routers):
            figures = router.figures
            found[f"router{number}.index_tokens"] = figures.get("index_tokens", 0)
            found[f"router{number}.index_mib"] = figures.get("index_bytes", 0) / MIB
        found["server.used_mib"] = self._redis.info("memory")["used_memory"] / MIB
        kinds: Counter[str] = Counter()
        segment_bytes = log_entries = 0
        for keys, kind in known_keys(self._connection):
            if kind == "purges":
                continue  # notes for writers, which stay for an hour
            is_segment = "segment:" in kind
            kinds["segment" if is_segment else "other"] += 1
            if is_segment:
                segment_bytes += self._redis.strlen(keys.key(kind))
            elif kind.rpartition(":")[2] == "log":
                log_entries += self._redis.xlen(keys.key(kind))
        found |= {
            "server.keys": kinds.total(),
            "server.log_entries": log_entries,
            "server.segments": kinds["segment"],
            "server.segment_mib": segment_bytes / MIB,
        }
        files = [
            Path(folder, name)
            for folder, _, names in os.walk(self._directory)
            for name in names
            if not name.startswith("lock-")
        ]  # there are 64 at most
        num_bytes = 0
        for path in files:
            with contextlib.suppress(OSError):  # gone meanwhile
                num_bytes += path.stat().st_size
        found |= {"shm.files": len(files), "shm.file_mib": num_bytes / MIB}
        return found

    def purge(self) -> None:
        """In turn: all of a namespace that comes and goes, and the last seconds of the one that stays."""
        self.purges["tried"] += 1
        try:
            if self.purges["tried"] % 2:
                namespace = namespaces_at(time.time(), NAMESPACE_S)[2]
                self._admin.purge(StoreKeys(FINGERPRINT, namespace))
            else:
                now = int(time.time())
                self._admin.purge(StoreKeys(FINGERPRINT, OPEN), TimeRange(now - 10, now))
            self.purges["done"] += 1
        except (NamespaceUnknown, NamespaceBusy) as error:
            self.purges[type(error).__name__] += 1

    def close(self) -> None:
        self._redis.close()
        self._connection.close()


def watch(soak: Soak, routers: list[RouterProcess], minutes: float) -> tuple[list[float], list[dict[str, float]]]:
    """Sample and purge until the time is over or a router has ended."""
    times: list[float] = []
    samples: list[dict[str, float]] = []
    while not all(router.figures for router in routers):  # first they compile their kernels
        if not all(router.is_running for router in routers):
            return times, samples
        time.sleep(0.2)
    began = time.monotonic()
    next_sample, next_purge = SAMPLE_S, PURGE_S
    while (now := time.monotonic() - began) < 60.0 * minutes and all(router.is_running for router in routers):
        if now >= next_purge:
            next_purge += PURGE_S
            soak.purge()
        if now >= next_sample:
            next_sample += SAMPLE_S
            samples.append(soak.sample())
            times.append(now)
            shown = {name: round(value, 1) for name, value in samples[-1].items()}
            print(f"{now:6.0f} s  {json.dumps(shown)}", file=sys.stderr, flush=True)
        time.sleep(0.2)
    return times, samples


def judged(times: list[float], samples: list[dict[str, float]]) -> list[Judgement]:
    return [
        judge(name, times, [sample[name] for sample in samples], BOUNDS[name.rpartition(".")[2]])
        for name in sorted(samples[0])
    ]


def report(judgements: list[Judgement], routers: list[RouterProcess], purges: Counter[str]) -> list[str]:
    """Print it all; returns what is wrong."""
    rows = [
        [one.name, f"{one.median:,.1f}", f"{one.most:,.1f}", f"{one.growth:+,.1f}", f"{one.allowed:,.1f}",
         "flat" if one.is_flat else "GROWS"]
        for one in judgements
    ]  # fmt: skip
    print_table("Second half", ["series", "median", "most ever", "growth", "allowed", ""], rows, sys.stdout)
    problems = [f"{one.name} grows by {one.growth:,.1f}" for one in judgements if not one.is_flat]
    for number, router in enumerate(routers):
        figures = router.figures
        print(f"router{number}: " + ", ".join(f"{name} {figures.get(name, 0):,.0f}" for name in (*TOTALS, "cpu_s")))
        problems += [
            f"router{number} has {name} {figures[name]:,.0f}" for name in MUST_BE_ZERO if figures.get(name, 0) != 0
        ]
        if not figures.get("folds") or not figures.get("accepted"):
            problems.append(f"router{number} has not folded, or drafted nothing from the cache")
    print(f"purges: {dict(purges)}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--tokens-per-s", type=float, default=150.0, help="of answers, of a router")
    parser.add_argument("--bulk-tokens-per-s", type=float, default=2_000.0, help="of documents, of a router")
    parser.add_argument("--server", type=Path, help="binary of Redis or Valkey; without it, the one that is bundled")
    parser.add_argument("--json", type=Path, help="where to write all samples and the judgement")
    options = parser.parse_args()
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(prefix="paceline-soak-", dir=memory) as shared,
        EmbeddedServer(Path(folder) / "server", options.server) as server,
    ):
        password = server.settings.password or ""
        routers = [
            RouterProcess(
                RouterPlan(server.url, password, shared, number, options.tokens_per_s, options.bulk_tokens_per_s,
                           NAMESPACE_S)
            )
            for number in range(options.routers)
        ]  # fmt: skip
        soak = Soak(server, routers, Path(shared))
        try:
            times, samples = watch(soak, routers, options.minutes)
        finally:
            soak.close()
            statuses = [router.stop() for router in routers]
    if not samples:
        print("nothing was sampled")
        return 1
    judgements = judged(times, samples)
    problems = report(judgements, routers, soak.purges)
    problems += [f"router{number} ended with status {status}" for number, status in enumerate(statuses) if status]
    if options.json is not None:
        saved = {
            "minutes": times[-1] / 60,
            "times": times,
            "samples": samples,
            "judgements": [{**msgspec.to_builtins(one), "is_flat": one.is_flat} for one in judgements],
            "routers": [router.figures for router in routers],
            "purges": dict(soak.purges),
            "problems": problems,
        }
        options.json.write_text(json.dumps(saved) + "\n", encoding="utf-8")
    print("flat" if not problems else "NOT FLAT: " + "; ".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

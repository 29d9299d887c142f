"""What the control plane costs as groups and tenants grow: functions of production in one process, without a network.

    python -m tests.bench.simulate.control_costs [--groups 10 100 1000] [--tenants 100 10000 100000]

directory: one named actor, which every router, target group and draft worker calls once a second, and which says what
has changed; the processors that these calls take there one by one, and as the calls of so many relays, without what Ray
takes. choice: of a router for one request, with Serve's part. registry: one file, to which changes are appended,
and which every gateway reads once and then reads on. page: /metrics of all gateways, or as many routers, which one
gateway asks and joins, and what it costs a process to tell its node instead. news: of a router to a gateway, four times
a second, once a second with its status, and when a gateway comes with all blocks that the router has. promotion: what
one change of the registry costs each router, if all tenants feed the public pool.
"""

from __future__ import annotations

import argparse
import gc
import math
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import psutil

from actors.links.keys import LinkAddress, LinkKeys
from actors.models.source import ModelSource
from actors.workers.demand import DraftDemand
from actors.workers.directory import MOST_CALLERS, Asked, Directory, WorkerEntry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.namespaces import PUBLIC
from cache_service.formats.store_keys import StoreKeys
from cache_service.promotion.promotion_gate import PromotionGate, nothing_blocked
from cache_service.store.connection import Connection, ConnectionSettings
from cache_service.store.store import Store
from cluster.cache.promotion import PromotionSource, PublicPool
from cluster.cli.table import plain_table
from cluster.config import PromotionConfig
from cluster.gateway.observability.metrics import GatewayMetrics, merged
from cluster.gateway.router_client import status_of_all
from cluster.node_metrics import NodeMetrics
from cluster.router.directory_view import DirectoryView
from cluster.routing.heard_statuses import HeardStatuses
from cluster.routing.known_routers import KnownRouters, RoutedPrompt
from cluster.routing.router_load import RouterLoad
from cluster.routing.router_news import RouterNews, decode_news, packed
from cluster.routing.router_status import RouterStatus
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.keys import key_digest, new_key
from cluster.tenants.registry import Policy, Registry, StoredKey, StoredTenant, TenantLimits
from cluster.tenants.registry_file import RegistryFile, write_registry

_WHOLE_ROUTERS = 50
_RELAY_CALLS = 20  # a second, of a relay whose callers are many
_LOAD = RouterLoad(
    num_running=3, num_waiting=0, num_places=32, backlog_tokens=0, token_s=3e-4, round_s=0.01, sequence_s=2e-4,
    answer_rounds=100.0,
)  # fmt: skip


def seconds_of(action: Callable[[], object], least_s: float = 0.5) -> float:
    """Processor time of a call, over many of them."""
    count, began = 0, time.process_time()
    while (spent := time.process_time() - began) < least_s:
        action()
        count += 1
    return spent / count


def directory_row(groups: int) -> list[str]:
    """A group, its router and a draft worker each."""
    directory = Directory(LinkKeys.generate(), ttl_s=1e9)  # nothing expires while it is measured
    keys = LinkKeys.generate()
    entries = []
    for number in range(groups):
        for role in ("target", "draft"):
            address = LinkAddress(f"tcp://10.0.0.1:{20_000 + number % 40_000}", keys.public)
            entries.append(WorkerEntry(role, f"{role}-{number}", address, number, model="model"))  # type: ignore[arg-type]
            directory.heartbeat(entries[-1])
    views = {f"router-{number}": DirectoryView() for number in range(groups)}
    demand = {"draft": DraftDemand(0.1, 0.1, 0.1)}
    drawn, names, asked = random.Random(0), list(views), []
    for _ in range(2):  # then each knows that it has its group
        for router, view in views.items():
            asked.append(Asked(router_id=router, model="model", held=view.target_id, mark=view.mark, drafts=demand))
            view.take(directory.tell(asked[-1]))
    del asked[:groups]
    tell_s = seconds_of(lambda: directory.tell(drawn.choice(asked)))
    beat_s = seconds_of(lambda: directory.heartbeat(drawn.choice(entries)))
    relays = math.ceil(3 * groups / MOST_CALLERS)
    by_relays_s = seconds_of(partial(relayed, directory, entries, asked, 3 * groups // (relays * _RELAY_CALLS)))
    question, changed = len(pickle.dumps(asked[0])), replace(entries[1], is_leaving=True)
    directory.heartbeat(changed)
    answer = len(pickle.dumps(directory.tell(replace(asked[0], mark=views[names[0]].mark))))
    return [
        f"{tell_s * 1e6:,.0f}",
        f"{beat_s * 1e6:,.0f}",
        f"{groups * (tell_s + 2 * beat_s):.3f}",
        f"{relays} x {_RELAY_CALLS * by_relays_s:.3f}",
        f"{groups * question / 1e6:,.2f}",
        f"{answer:,}",
    ]


def relayed(directory: Directory, entries: list[WorkerEntry], asked: list[Asked], size: int) -> None:
    """A relay's call with that many calls of others, of which a third are of routers, as it comes and goes."""
    calls = pickle.loads(pickle.dumps((entries[: 2 * size // 3], asked[: size // 3])))
    pickle.loads(pickle.dumps(directory.relayed("relay-0", *calls)))


def choice_row(groups: int) -> list[str]:
    """For routers that each know a system prompt of 32 blocks and a conversation of 8 more: with a prompt that one of
    them knows, and with prompts that nobody knows and nobody has asked for."""
    known, shared = KnownRouters(random.Random(0)), range(32)
    routers = {f"router-{number}": number for number in range(groups)}
    for router_id, number in routers.items():
        own = [1000 + 8 * number + depth for depth in range(8)]
        blocks = packed([*reversed(own), *reversed(shared)])
        known.hear(
            RouterNews(router_id=router_id, load=_LOAD, num_gateways=1, num_blocks=4096, blocks=blocks, is_whole=True),
            0.0,
        )
    middle = 1000 + 8 * (groups // 2)
    returning = RoutedPrompt(64 * 41, [*shared, *range(middle, middle + 8), 1], 0)
    firsts = count(10**9, 41)
    fresh = (RoutedPrompt(64 * 41, range(first, first + 41), 0) for first in firsts)
    makes = (lambda: returning, partial(next, fresh))
    return [f"{seconds_of(lambda make=make: known.ranks(routers.keys(), make(), 0.0)) * 1e6:,.0f}" for make in makes]


def page_row(processes: int) -> list[str]:
    """Processor time of a gateway for one page, while its streams wait, and the page's size; time of a process for
    telling Ray."""
    metrics = GatewayMetrics()
    text, told = metrics.text(), NodeMetrics(metrics.registry, "gateway", "g")
    pages = {f"{number:016x}": text for number in range(processes)}
    told.tell()
    return [
        f"{1e3 * seconds_of(lambda: merged('gateway', pages)):,.1f}",
        f"{len(merged('gateway', pages)) / 1e6:.2f}",
        f"{1e3 * seconds_of(told.tell):.2f}",
    ]


def news_row(groups: int) -> list[str]:
    """Bytes of a message of news and processor time of a gateway for it, without and with the router's status; time for
    the statuses of so many routers together, once a second."""
    address, status = LinkAddress("tcp://10.0.0.1:20000", LinkKeys.generate().public), RouterStatus(
        ready=True, live=True, detail="12 draft workers", max_model_len=131_072
    )  # fmt: skip
    statuses, cells = HeardStatuses(), []
    statuses.follow({f"{number:016x}": address for number in range(groups)}, groups)
    for told in (None, status):
        known = KnownRouters()
        blocks = packed([random.Random(number).getrandbits(63) for number in range(10)])
        messages = [
            msgspec.msgpack.encode(
                RouterNews(
                    router_id=f"{number:016x}", load=_LOAD, num_gateways=1, num_blocks=4096, blocks=blocks,
                    is_whole=False, status=told,
                )
            )
            for number in range(groups)
        ]  # fmt: skip

        def hear(messages: list[bytes] = messages, known: KnownRouters = known) -> None:
            for message in messages:
                news, now = decode_news(message), time.monotonic()
                known.hear(news, now)
                if news.status is not None:
                    statuses.hear(news.router_id, news.status, now)

        cells += [f"{len(messages[0])}", f"{1e6 * seconds_of(hear) / groups:.1f}"]

    def all_together() -> None:
        heard = statuses.current(0.0)
        assert heard is not None
        status_of_all(heard)

    answer = pickle.dumps(msgspec.structs.replace(status, told_by=("0" * 16, address)))
    return [*cells, f"{1e6 * seconds_of(all_together):,.0f}", f"{len(answer)}"]


def whole_row(blocks: int) -> list[str]:
    """All that a router has, which a gateway hears when it comes: bytes, its processor time, and what it keeps."""
    drawn, known = random.Random(0), KnownRouters()
    messages = [
        msgspec.msgpack.encode(
            RouterNews(
                router_id=f"{number:016x}", load=_LOAD, num_gateways=1, num_blocks=blocks, is_whole=True,
                blocks=packed([drawn.getrandbits(63) & ~1 | (block % 40 == 0) for block in range(blocks)]),
            )
        )
        for number in range(_WHOLE_ROUTERS)
    ]  # fmt: skip

    def hear() -> None:
        for message in messages:
            known.hear(decode_news(message), 0.0)

    before = resident_bytes()
    hear()
    kept = (resident_bytes() - before) / (_WHOLE_ROUTERS * blocks)
    return [f"{len(messages[0]):,}", f"{1e3 * seconds_of(hear) / _WHOLE_ROUTERS:.1f}", f"{kept:.0f}"]


def registry_row(tenants: int) -> list[str]:
    """Memory is that of a process that has read the file, as the system counts it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.json"
        write_registry(file, Registry(stored_tenants(tenants)))
        admin, reader, before = TenantAdministration(file), RegistryFile(file), resident_bytes()
        first_s = spent(reader.read)
        held = resident_bytes() - before
        first_add_s = spent(lambda: admin.add("first", {}))
        add_s = spent(lambda: admin.add("second", {}))
        on_s = spent(reader.read)
        registry = reader.read()
        assert registry is not None
        digest = bytes.fromhex(registry.tenants[tenants // 2].keys[0].sha256)
        find_s = seconds_of(lambda: registry.find(digest))
        figures = [f"{one * 1e3:,.1f}" for one in (first_s, first_add_s, add_s, on_s)]
        size = file.stat().st_size / 1e6
        promotion = [f"{one:,.1f}" for one in promotion_ms(tenants)]
        return [*figures, f"{find_s * 1e6:.1f}", f"{size:.1f}", f"{held / tenants:,.0f}", *promotion]


def promotion_ms(tenants: int) -> tuple[float, float]:
    """All of them anew, and one change."""
    registry = Registry(stored_tenants(tenants, "promoted"))
    source = PromotionSource(Path("none"), ModelSource(spec="m", name="m", path=Path("none")), PromotionConfig())
    keys = StoreKeys("model", PUBLIC)
    nobody = Store(Connection(ConnectionSettings("redis://127.0.0.1:1")), keys), FrameCodec(keys, None)
    pool, gate = PublicPool(source, lambda: nobody), PromotionGate(*nobody, b"secret of 16 bytes", nothing_blocked)
    gate._store = Absent()  # type: ignore[assignment]

    def admit(registry: Registry) -> None:
        terms = pool._terms_of(registry)
        gate.admit(terms.members)
        pool._registry = registry

    changed = registry.changed({registry.tenants[0].id: replace(registry.tenants[0], disabled=True)})
    return 1e3 * spent(lambda: admit(registry)), 1e3 * spent(lambda: admit(changed))


class Absent:
    """A store of the public pool, without a server."""

    def left(self) -> dict[bytes, float]:
        return {}

    def opt_out(self, organisation: bytes) -> None:
        pass


def stored_tenants(count: int, policy: Policy = "isolated") -> Iterator[StoredTenant]:
    now = datetime.now(UTC)
    for number in range(count):
        digest = key_digest(new_key(f"{number:08x}"))
        key = StoredKey(id=f"{number:08x}", sha256=digest.hex(), last4="0000", created=now)
        limits = TenantLimits(max_concurrent=8)
        yield StoredTenant(
            id=f"{number:08x}", name=f"tenant-{number}", created=now, limits=limits, policy=policy, keys=(key,)
        )


def spent(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--tenants", type=int, nargs="+", default=[100, 10_000, 100_000])
    arguments = parser.parse_args()
    header = (
        "groups",
        "question, us",
        "heartbeat",
        "processors",
        "by relays",
        "MB/s",
        "change, B",
        "known prompt, us",
        "new prompt",
    )
    rows = [[str(groups), *directory_row(groups), *choice_row(groups)] for groups in arguments.groups]
    print(plain_table("Control plane by target groups, a router each", header, rows), flush=True)
    header = ("processes", "page, ms", "MB", "telling the node, ms")
    rows = [[str(groups), *page_row(groups)] for groups in arguments.groups]
    print(plain_table("Metrics of all, for a gateway", header, rows), flush=True)
    header = (
        "routers",
        "bytes",
        "us",
        "with a status: bytes",
        "us",
        "all statuses together, us",
        "bytes of an answer to a status call",
    )
    rows = [[str(groups), *news_row(groups)] for groups in arguments.groups]
    print(plain_table("A message of news, for a gateway", header, rows), flush=True)
    header = ("blocks of 64 tokens", "bytes", "ms", "bytes kept a block")
    rows = [[f"{blocks:,}", *whole_row(blocks)] for blocks in (2048, 16_384)]
    print(plain_table("All that a router has, for a gateway that comes", header, rows), flush=True)
    header = (
        "tenants",
        "first read, ms",
        "first add",
        "add",
        "read on",
        "look-up, us",
        "MB",
        "memory a tenant, B",
        "promotion anew, ms",
        "after a change",
    )
    rows = [[str(tenants), *registry_row(tenants)] for tenants in arguments.tenants]
    print(plain_table("Registry of tenants", header, rows))


if __name__ == "__main__":
    main()

"""Processor time of a gateway, of Serve's proxy and of the router's replica by streamed chunk and by request.

    PYTHONPATH=.:tests/support python tests/bench/bench_gateway_streams.py --streams 50 --chunks 200 [--api chat]

A router without a model answers; everything else is as served: Ray Serve, its proxy, one gateway, HTTP. Requests are
priced by answers of one chunk, chunks by what longer answers cost more. The load comes from one process beside it.

With `--crowd`, a third of the clients leave in the middle of their answer, and every tenth reads slowly. Told is the
memory while they are there and once they are gone, and what the router still runs then. With `--target` besides,
`paceline serve` of a toy model answers, all of them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import ray
from ray import serve

from actors.workers.directory_actor import get_or_create_directory
from actors.workers.ray_environment import prepare_own_ray
from cluster.gateway.deployment import gateway_application, start_proxies
from cluster.gateway.served_model import ServedModel
from cluster.gateway_config import GatewayConfig
from paceline_testing.ascii_model import speak_ascii
from paceline_testing.free_ports import free_ports
from paceline_testing.linked_router import LinkedRouter
from paceline_testing.ray_processes import ray_processes
from paceline_testing.scraped import value_of
from paceline_testing.tiny_models import save_tiny_model
from paceline_testing.toy_tokenizer import toy_tokenizer
from tests.bench.simulate.real_cluster import serving

PROCESSES = {
    "gateway": "ServeReplica:paceline:Gateway",
    "proxy": "ProxyActor",
    "router": "ServeReplica:paceline:Router",
}

DIRECTORY = "the directory"
_CONFIG = Path(__file__).parents[2] / "configs" / "laptop.yaml"
SLOW_S = 2.0  # after each part that a slow client reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50, help="open at the same time")
    parser.add_argument("--chunks", type=int, default=200, help="of a long answer")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="between chunks of the router")
    parser.add_argument("--api", choices=["completions", "chat"], default="completions")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--through-serve", action="store_true", help="chunks of the router take the way of requests")
    parser.add_argument("--crowd", action="store_true", help="clients that leave, and slow ones, in place of prices")
    parser.add_argument(
        "--target", action="store_true", help="a crowd of a toy model's, in place of a router without one"
    )
    parser.add_argument("--load", help=argparse.SUPPRESS)  # the process that asks
    options = parser.parse_args()
    if options.load:
        asyncio.run(_ask(options.load, options.streams, options.chunks, options.api, is_crowd=options.crowd))
        return
    if options.target:
        _crowd_of_target(options.streams, options.chunks, options.api)
        return
    with tempfile.TemporaryDirectory() as directory:
        url = _serve(Path(directory), options.delay_ms / 1e3, options.streams, is_linked=not options.through_serve)
        try:
            _load(url, min(options.streams, 50), 2, options.api)  # warms up
            for _ in range(options.turns):
                tell = _report_crowd if options.crowd else _report
                tell(url, options.streams, options.chunks, options.api)
        finally:
            serve.shutdown()
            ray.shutdown()


def _serve(directory: Path, delay_s: float, streams: int, *, is_linked: bool) -> str:
    prepare_own_ray("127.0.0.1", GatewayConfig().max_body_bytes)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    tokenizer = toy_tokenizer()
    tokenizer.save_pretrained(directory)
    http_port, grpc_port = free_ports(2)
    config = GatewayConfig(
        http_port=http_port,
        grpc_port=grpc_port,
        replicas=1,
        max_new_tokens=10_000,
        max_connections=max(500, streams + 10),
    )
    model = ServedModel("toy", max_model_len=16_384, vocab_size=len(tokenizer), eos_token_ids=(), created=1)
    start_proxies(config)
    get_or_create_directory(DIRECTORY, lifetime="detached")
    router = serve.deployment(LinkedRouter).options(name="Router", max_ongoing_requests=10_000)
    bound = router.bind(3, delay_s, 10_000, DIRECTORY)
    keys_from = DIRECTORY if is_linked else None
    serve.run(gateway_application(bound, str(directory), model, config, directory_name=keys_from), name="paceline")
    url = f"http://127.0.0.1:{http_port}"
    while httpx.get(f"{url}/readyz", timeout=30).status_code != 200:
        time.sleep(0.2)
    time.sleep(3.0)  # by then gateways hear the router
    return url


def _report(url: str, streams: int, chunks: int, api: str) -> None:
    short, long = (_load(url, streams, count, api) for count in (1, chunks))
    for name in PROCESSES:
        chunk_s = (long[name] - short[name]) / (streams * (chunks - 1))
        request_s = short[name] / streams - chunk_s
        times = f"{name:8} {chunk_s * 1e6:7.0f} us a chunk {request_s * 1e6:8.0f} us a request"
        print(f"{times} {_memory_mb(PROCESSES[name], 'VmHWM'):6.0f} MB at most", flush=True)


def _crowd_of_target(streams: int, chunks: int, api: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_model(Path(directory), "llama", 5, layers=2, hidden_size=32, max_positions=1024)
        speak_ascii(model)
        settings = {
            "target.model": model,
            "target.kv_cache_tokens": 64 * (streams + streams * chunks // 16),
            "draft.model": "none",
            "router.max_running": streams,
            "router.max_waiting": streams,
            "gateway.max_connections": streams + 10,
        }
        log = Path("build/gateway_streams.log")
        with serving(_CONFIG, [f"{name}={value}" for name, value in settings.items()], log) as url:
            _load(url, min(streams, 50), 2, api)  # warms up
            _crowd(url, streams, chunks, api)
            page = httpx.get(f"{url}/metrics", timeout=30).text
            print(f"router: {value_of(page, 'paceline_sequences_running'):g} running", flush=True)


def _crowd(url: str, streams: int, chunks: int, api: str) -> None:
    before = {name: _memory_mb(title, "VmRSS") for name, title in PROCESSES.items()}
    began = time.monotonic()
    _load(url, streams, chunks, api, "--crowd")
    print(f"{streams} streams ended without an error after {time.monotonic() - began:.0f} s", flush=True)
    time.sleep(2.0)
    for name, title in PROCESSES.items():
        peak, after = (_memory_mb(title, kind) for kind in ("VmHWM", "VmRSS"))
        print(f"{name:8} {before[name]:6.0f} MB before, {peak:6.0f} at most, {after:6.0f} after", flush=True)


def _report_crowd(url: str, streams: int, chunks: int, api: str) -> None:
    _crowd(url, streams, chunks, api)
    router = serve.get_deployment_handle("Router", "paceline")
    running, num_cancelled, _ = router.observed.remote().result()
    print(f"router: {running} running, {num_cancelled} cancelled", flush=True)


def _load(url: str, streams: int, chunks: int, api: str, *more: str) -> dict[str, float]:
    """Processor seconds of each process while the streams are answered."""
    before = _processor_s()
    command = [sys.executable, __file__, "--load", url, "--streams", str(streams), "--chunks", str(chunks)]
    subprocess.run([*command, "--api", api, *more], check=True)
    time.sleep(0.3)  # what follows the end of a stream
    return {name: seconds - before[name] for name, seconds in _processor_s().items()}


def _processor_s() -> dict[str, float]:
    times = {
        name: [psutil.Process(pid).cpu_times() for pid in ray_processes(title)] for name, title in PROCESSES.items()
    }
    return {name: sum(one.user + one.system for one in own) for name, own in times.items()}


def _memory_mb(title: str, kind: str) -> float:
    """Resident memory of the processes, now (VmRSS) or each at its most (VmHWM)."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in ray_processes(title)]
    return sum(int(status.split(f"{kind}:")[1].split()[0]) for status in statuses) / 1024


async def _ask(url: str, streams: int, chunks: int, api: str, *, is_crowd: bool) -> None:
    body: dict[str, object] = {"max_tokens": 3 * chunks, "temperature": 0, "stream": True, "ignore_eos": True}
    path = "/v1/completions"
    if api == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "the quick brown fox"}]
    else:
        body["prompt"] = "the quick brown fox jumps over the lazy dog"
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(number: int) -> None:
            leaves, is_slow = is_crowd and number % 3 == 0, is_crowd and number % 10 == 1
            text = b""
            async with client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for part in answer.aiter_raw():
                    text += part
                    if leaves and text.count(b"\n\n") > chunks // 2:
                        return
                    if is_slow:
                        await asyncio.sleep(SLOW_S)
            assert text.endswith(b"data: [DONE]\n\n"), text[-300:]

        await asyncio.gather(*(one(number) for number in range(streams)))


if __name__ == "__main__":
    main()

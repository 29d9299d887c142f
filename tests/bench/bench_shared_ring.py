"""Time until another process has a message, through the shared ring and by the two gloo broadcasts it stands for.

    python tests/bench/bench_shared_ring.py [--ranks 2]

The other processes answer over a pipe when they have it; the time of the answer is in both figures, and shown alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from actors.engine.rank_group import find_meeting, join_group, leave_group, open_meeting
from actors.engine.shared_ring import RingWriter

SIZES = (200, 20_000, 1_000_000)
ROUNDS = 300


def broadcast(message: bytes | None) -> None:
    """message: None where it is received."""
    size = torch.tensor([0 if message is None else len(message)])
    dist.broadcast(size, src=0)
    data = torch.empty(int(size), dtype=torch.uint8)
    if message is not None:
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.broadcast(data, src=0)


def run_rank(rank: int, ranks: int, ports: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    meeting = open_meeting("127.0.0.1", 60.0) if rank == 0 else find_meeting("127.0.0.1", ports.get(timeout=60), 60.0)
    for _ in range(ranks - 1 if rank == 0 else 0):
        ports.put(meeting.port)
    ring = join_group(meeting, rank, ranks, "cpu", 60.0)
    if rank == 0:
        print("   bytes  way     median ms")
    for size in SIZES:
        for way in ("answer alone", "gloo", "ring"):
            times = []
            for _ in range(ROUNDS):
                if isinstance(ring, RingWriter):
                    time.sleep(0.002)  # others wait, as they do while a round is computed
                    began = time.perf_counter()
                    if way == "gloo":
                        broadcast(bytes(size))
                    elif way == "ring":
                        ring.write(bytes(size), 10.0)
                    else:
                        for connection in answers:
                            connection.send_bytes(b"")
                    for connection in answers:
                        connection.recv_bytes()
                    times.append(time.perf_counter() - began)
                else:
                    if way == "gloo":
                        broadcast(None)
                    elif way == "ring":
                        ring.read(10.0)
                    else:
                        answers.recv_bytes()
                    answers.send_bytes(b"")
            if times:
                print(f"{size:8}  {way:12}  {statistics.median(times) * 1e3:7.3f}", flush=True)
    leave_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    context = multiprocessing.get_context("spawn")
    ports, pipes = context.Queue(), [context.Pipe() for _ in range(ranks - 1)]
    ends = [[mine for mine, _ in pipes], *[theirs for _, theirs in pipes]]
    processes = [context.Process(target=run_rank, args=(rank, ranks, ports, ends[rank])) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()

"""One worker thread a core: work of many small steps, each too small for two cores, is better spread than shared."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def core_pool(device: str, most_workers: int) -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """Workers that divide torch's threads among themselves, and their number: one where the device is no CPU."""
    threads = torch.get_num_threads()
    workers = max(1, min(threads, most_workers)) if device == "cpu" else 1
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            yield pool, workers
    finally:
        torch.set_num_threads(threads)  # for threads to come: the number of those that run is their own

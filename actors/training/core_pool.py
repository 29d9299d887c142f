"""One worker thread a core, for work whose steps are each too small for two cores."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def core_pool(device: str, most_workers: int) -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """Workers that share torch's threads, and their number. One worker if the device is not the CPU."""
    threads = torch.get_num_threads()
    workers = max(1, min(threads, most_workers)) if device == "cpu" else 1
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            yield pool, workers
    finally:
        torch.set_num_threads(threads)  # for new threads: the setting is per thread

"""Ranks of a target group as processes of a test."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.queues import Queue

import pytest
import torch

from actors.engine.rank_group import find_meeting, join_group, leave_group, open_meeting
from paceline_testing.quick_interpreter import quicken_interpreter

ANSWER_WITHIN_S = 180.0
_JOIN_WITHIN_S = 60.0
_IMPORTED = [
    "pytest",
    "actors.build",
    "actors.eagle.eagle_drafter",
    "actors.engine.attention.triton_tree",
    "actors.engine.rank_group",
    "actors.workers.target_group",
    "transformers.models.llama",
]


def _context() -> ForkServerContext:
    """Children are forked from a process that has imported all of that: an import takes a rank seconds. Triton's
    kernels, where they are used, are interpreted in them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        forkserver.ensure_running()
    return context


@contextmanager
def ranks_at_work(count: int, work: Callable[..., None], *arguments: object, end: bool = True) -> Iterator[Queue]:
    """Each rank, in a group with the others, calls `work(rank, ring, answers, *arguments)`; the block is given the
    queue `answers`. end: the ranks must end well by themselves after the block; else they are killed."""
    context = _context()
    ports, answers = context.Queue(), context.Queue()
    ranks = [context.Process(target=_run, args=(rank, count, ports, answers, work, arguments)) for rank in range(count)]
    for process in ranks:
        process.start()
    try:
        yield answers
        for process in ranks if end else []:
            process.join(timeout=_JOIN_WITHIN_S)
        assert not end or [process.exitcode for process in ranks] == [0] * count
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run(
    rank: int, count: int, ports: Queue, answers: Queue, work: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    if importlib.util.find_spec("triton") is not None:
        quicken_interpreter()
    if rank == 0:
        meeting = open_meeting("127.0.0.1", _JOIN_WITHIN_S)
        for _ in range(count - 1):
            ports.put(meeting.port)
    else:
        meeting = find_meeting("127.0.0.1", ports.get(timeout=_JOIN_WITHIN_S), _JOIN_WITHIN_S)
    work(rank, join_group(meeting, rank, count, "cpu", _JOIN_WITHIN_S), answers, *arguments)
    leave_group()

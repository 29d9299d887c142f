"""Finds out in other processes whether a grammar can be compiled, within limits of time, memory and stack."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import NamedTuple

import psutil

from actors.errors import Overloaded

_MOST_S = 2.0  # of processor time for a grammar; common ones take some milliseconds
_MUCH_S = 0.5  # of processor time: then it is not the machine alone that is slow, and the grammar is no common one
_MOST_WAIT_S = 15.0  # on a busy machine, where the process gives way to all others
_RETRY_S = 5.0
_COMMON_S = 0.1  # of processor time, from which on a child runs only where nothing else does
_NICE = 10  # of a process before: rounds come first
_SLICE_S = 0.05  # between looks at the time it has taken
_START_S = 20.0  # for a process to start, load its vocabulary and fork, on a busy machine


class Checked(NamedTuple):
    """problem: what is wrong with a grammar, "" if nothing is. took_long: to compile, other than common ones."""

    problem: str
    took_long: bool = False


_TOO_LARGE = Checked("it is too large or too deeply nested")  # for a child, which is out of stack or memory


class GrammarChecker:
    """A process with the vocabulary, started with the first grammar, which forks a child for each. It ends with this
    one: the socket to it is closed."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._setting = json.dumps([tokenizer_json, vocab_size, list(eos_token_ids)]).encode()
        self._warm: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._lock = threading.Lock()  # of this

    def check(self, text: str) -> Checked:
        """Waits for some seconds at most, longer on a busy machine. Raises Overloaded if the machine is too busy to
        find out."""
        connection, its_end = socket.socketpair()
        with connection:
            with its_end:  # open until it has arrived: macOS may lose it otherwise
                child = self._fork(connection, its_end)
            try:
                return _tried(connection, child, text)
            except OSError:  # the child has ended
                return _TOO_LARGE
            finally:
                with suppress(psutil.Error):
                    child.kill()

    def _fork(self, connection: socket.socket, its_end: socket.socket) -> psutil.Process:
        with self._lock:
            if self._warm is None or self._warm[0].poll() is not None:
                self._warm = _start(self._setting)
            process, requests = self._warm
        with suppress(OSError, psutil.Error):  # it has ended, through no fault of this grammar
            socket.send_fds(requests, [b"+"], [its_end.fileno()])
            if connection in wait([connection, requests], _START_S):
                return psutil.Process(int.from_bytes(connection.recv(8), "little"))
        process.kill()  # the next grammar starts another
        process.wait()
        raise Overloaded("a grammar could not be tried: no process for it has started", _RETRY_S)


def _start(setting: bytes) -> tuple[subprocess.Popen[bytes], socket.socket]:
    requests, its_end = socket.socketpair()
    with its_end:
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.grammar.check_process"],
            stdin=subprocess.PIPE,
            stdout=its_end.fileno(),
            stderr=subprocess.DEVNULL,
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE))
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stream:  # it has ended, which its socket tells
        stream.write(setting)
    return process, requests


def _tried(connection: socket.socket, child: psutil.Process, text: str) -> Checked:
    """A child that takes longer than for a common grammar gets the lowest priority."""
    connection.sendall(text.encode())
    connection.shutdown(socket.SHUT_WR)
    took_long = False
    deadline = time.monotonic() + _MOST_WAIT_S
    while not wait([connection], _SLICE_S):
        taken_s = _processor_s(child)
        is_late = time.monotonic() > deadline
        if taken_s > _MOST_S or (is_late and taken_s >= _MUCH_S):
            return Checked(f"it takes more than {min(taken_s, _MOST_S):.2g} s")
        if is_late:
            raise Overloaded(f"a grammar could not be tried within {_MOST_WAIT_S:g} s", _RETRY_S)
        if taken_s >= _COMMON_S and not took_long:
            took_long = True
            _give_way(child)
    answer = connection.makefile("rb").read().decode(errors="replace")
    return Checked(answer[1:], took_long) if answer else _TOO_LARGE


def _give_way(process: psutil.Process) -> None:
    """Linux has a scheduling policy of each thread. An idle one leaves its core at once to whatever wakes up."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(psutil.Error, OSError):
            for thread in process.threads():
                os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))


def _processor_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0  # it has ended
    return float(times.user + times.system)

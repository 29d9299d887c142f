"""Finds out in another process whether a grammar can be compiled, within limits of time, memory and stack."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple

import psutil

from actors.errors import Overloaded
from actors.grammar.check_process import read_part, write_part

_MOST_S = 2.0  # of processor time for a grammar; common ones take some milliseconds
_MUCH_S = 0.5  # of processor time: then it is not the machine alone that is slow, and the grammar is no common one
_MOST_WAIT_S = 15.0  # on a busy machine, where the process gives way to all others
_RETRY_S = 5.0
_COMMON_S = 0.1  # of processor time, from which on the process runs only where nothing else does
_NICE = 10  # of the process before: rounds come first
_SLICE_S = 0.05  # between looks at the time it has taken
_START_S = 20.0  # for the process and its vocabulary, on a busy machine


class Checked(NamedTuple):
    """problem: what is wrong with a grammar, "" if nothing is. took_long: to compile, other than common ones."""

    problem: str
    took_long: bool = False


class GrammarChecker:
    """A process for each caller at a time, started with the first grammar and again after one that was too much for
    it. They end with this one: their standard input ends."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._setting = tokenizer_json.encode(), json.dumps([vocab_size, list(eos_token_ids)]).encode()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()  # of these

    def check(self, text: str) -> Checked:
        """Waits for some seconds at most, longer on a busy machine. Raises Overloaded if the machine is too busy to
        find out."""
        process, answer = self._take(), None
        try:
            process = process or _start(self._setting)
            write_part(_input_of(process), text.encode())
            answer = _answer(process, _MOST_WAIT_S, _MOST_S)
        except TimeoutError as error:
            return Checked(f"it takes more than {error.args[0]:.2g} s")
        except OSError:  # it has ended
            pass
        finally:
            if answer is not None and process is not None and not answer.took_long:
                with self._lock:
                    self._idle.append(process)
            elif process is not None:  # one that has given way may not come back
                _end(process)
        return answer or Checked("it is too large or too deeply nested")  # it is out of stack or memory

    def _take(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and process.poll() is not None:  # killed meanwhile, through no fault of this grammar
            _end(process)
            return None
        return process


def _start(setting: Sequence[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "actors.grammar.check_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE))
        for part in setting:
            write_part(_input_of(process), part)
        _answer(process, _START_S, math.inf)
    except BaseException:
        _end(process)
        raise
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _input_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _answer(process: subprocess.Popen[bytes], wait_s: float, most_s: float) -> Checked | None:
    """None: the process has ended. most_s: of processor time; a process that takes longer than for a common grammar
    gives way to all others. Raises TimeoutError with the processor time when it has taken that, or much within wait_s;
    otherwise Overloaded after wait_s."""
    assert process.stdout is not None
    took_long = False
    deadline, started_s = time.monotonic() + wait_s, _processor_s(process)
    while not select.select([process.stdout], [], [], _SLICE_S)[0]:
        taken_s = _processor_s(process) - started_s
        if taken_s > most_s:
            raise TimeoutError(most_s)
        if time.monotonic() > deadline:
            if taken_s >= _MUCH_S and most_s < math.inf:
                raise TimeoutError(taken_s)
            raise Overloaded(f"a grammar could not be tried within {wait_s:g} s", _RETRY_S)
        if taken_s >= _COMMON_S and most_s < math.inf and not took_long:
            took_long = True
            _give_way(process.pid)
    found = read_part(process.stdout)
    return None if found is None else Checked(found.decode(errors="replace"), took_long)


def _give_way(pid: int) -> None:
    """Linux has a scheduling policy of each thread. An idle one leaves its core at once to whatever wakes up."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(psutil.Error, OSError):
            for thread in psutil.Process(pid).threads():
                os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))


def _processor_s(process: subprocess.Popen[bytes]) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0  # it has ended
    return float(times.user + times.system)

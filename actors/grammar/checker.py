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
_GIVES_WAY = 19  # niceness of the process from then on
_SLICE_S = 0.05  # between looks at the time it has taken
_START_S = 20.0  # for the process and its vocabulary, on a busy machine


class GrammarChecker:
    """One process, started with the first grammar and again after one that was too much for it. It ends with this one:
    its standard input ends."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._setting = tokenizer_json.encode(), json.dumps([vocab_size, list(eos_token_ids)]).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def problem(self, text: str) -> str:
        """What is wrong with a grammar, "" if nothing is. Waits for some seconds at most, longer on a busy machine, and
        for other callers. Raises Overloaded if the machine is too busy to find out."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # it was killed meanwhile, through no fault of this grammar
            try:
                process = self._process or self._start()
                write_part(_input_of(process), text.encode())
                answer = _answer(process, _MOST_WAIT_S, _MOST_S)
            except TimeoutError as error:
                self._end()
                return f"it takes more than {error.args[0]:.2g} s"
            except Overloaded:
                self._end()
                raise
            except OSError:
                answer = None
            if answer is None:  # out of stack or memory
                self._end()
                return "it is too large or too deeply nested"
            if answer.gave_way:  # and may not come back
                self._end()
            return answer.text

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "actors.grammar.check_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for part in self._setting:
            write_part(_input_of(process), part)
        _answer(process, _START_S, math.inf)
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _input_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


class _Answer(NamedTuple):
    text: str
    gave_way: bool


def _answer(process: subprocess.Popen[bytes], wait_s: float, most_s: float) -> _Answer | None:
    """None: the process has ended. most_s: of processor time; when much of it is taken, the process gives way to all
    others. Raises TimeoutError with the processor time when it has taken that, or much within wait_s; otherwise
    Overloaded after wait_s."""
    assert process.stdout is not None
    gave_way = False
    deadline, started_s = time.monotonic() + wait_s, _processor_s(process)
    while not select.select([process.stdout], [], [], _SLICE_S)[0]:
        taken_s = _processor_s(process) - started_s
        if taken_s > most_s:
            raise TimeoutError(most_s)
        if time.monotonic() > deadline:
            if taken_s >= _MUCH_S and most_s < math.inf:
                raise TimeoutError(taken_s)
            raise Overloaded(f"a grammar could not be tried within {wait_s:g} s", _RETRY_S)
        if taken_s >= _MUCH_S and most_s < math.inf and not gave_way:
            gave_way = True
            _give_way(process.pid)
    found = read_part(process.stdout)
    return None if found is None else _Answer(found.decode(errors="replace"), gave_way)


def _give_way(pid: int) -> None:
    """Linux has a niceness of each thread."""
    with suppress(psutil.Error, OSError):
        for thread in psutil.Process(pid).threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, _GIVES_WAY)


def _processor_s(process: subprocess.Popen[bytes]) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0  # it has ended
    return float(times.user + times.system)

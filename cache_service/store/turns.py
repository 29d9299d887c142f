"""A background thread that runs many small periodic tasks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_PAUSE_AFTER_FAULT_S = 5.0
_IDLE_S = 60.0


class Turns:
    """Calls each task when it is due, one at a time. A task returns the seconds until its next turn.

    A task that raises is logged and retried later; tasks should handle expected errors themselves.
    """

    def __init__(self, name: str) -> None:
        self.num_faults = 0
        self.at_end: Callable[[], None] = lambda: None
        """Called in the thread after the last turn."""
        self._tasks: dict[str, Callable[[], float]] = {}
        self._due: dict[str, float] = {}
        self._hastened: set[str] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, name: str, task: Callable[[], float], delay_s: float = 0.0) -> None:
        """The first turn is due after the delay. Replaces a task of the same name."""
        with self._lock:
            self._tasks[name] = task
            self._due[name] = time.monotonic() + delay_s
        self._wake.set()

    def hasten(self, name: str) -> None:
        """The next turn is due now; after a running one. Unknown names are ignored."""
        with self._lock:
            if name not in self._tasks:
                return
            self._due[name] = time.monotonic()
            self._hastened.add(name)
        self._wake.set()

    def remove(self, name: str) -> None:
        """No turn begins after this; a running one finishes."""
        with self._lock:
            self._tasks.pop(name, None)
            self._due.pop(name, None)
            self._hastened.discard(name)

    def close(self, timeout_s: float) -> bool:
        """End the thread after the running turn. False if that takes over `timeout_s`, or if called in a turn."""
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:  # finalizers may call this in the thread itself
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.clear()  # before reading the state, so that no later wake is lost
            if self._closing:
                self.at_end()
                return
            with self._lock:
                name = min(self._due, key=self._due.__getitem__, default=None)
                wait_s = _IDLE_S if name is None else self._due[name] - time.monotonic()
                task = None if name is None else self._tasks[name]
            if task is None or name is None or wait_s > 0:
                self._wake.wait(wait_s)
                continue
            with self._lock:
                self._hastened.discard(name)
            try:
                pause_s = task()
            except Exception:
                log.exception("%s: a turn of %s failed", self._thread.name, name)
                self.num_faults += 1
                pause_s = _PAUSE_AFTER_FAULT_S
            with self._lock:
                if self._tasks.get(name) is task:
                    self._due[name] = time.monotonic() + (0.0 if name in self._hastened else pause_s)

"""Repeats an action in the background, whether or not its last attempt failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Heartbeat:
    """Calls `beat` at once and then every `interval_s` seconds, in a daemon thread, until `stop`.

    Errors are logged when they start and when they end, and never stop the next beat.
    """

    def __init__(self, beat: Callable[[], object], interval_s: float, name: str) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._name = name
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when no beat runs and none will. May be called twice."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        failing = False
        while not self._stopping.is_set():
            try:
                self._beat()
            except Exception as error:  # the next beat may succeed
                if not failing:
                    _log.warning("%s failed, trying again every %g s: %r", self._name, self._interval_s, error)
                failing = True
            else:
                if failing:
                    _log.info("%s works again", self._name)
                failing = False
            self._stopping.wait(self._interval_s)

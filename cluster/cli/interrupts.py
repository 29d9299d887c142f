"""What Ctrl-C does before a command runs, and where Python would lose it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

INTERRUPTED = 130  # exit status, as a shell has it
_INTERRUPT_AGAIN_S = 0.05


@contextlib.contextmanager
def ctrl_c_ends_the_process() -> Iterator[None]:
    """For imports, which leave nothing to put away. An exception that is raised in the middle of one may come out as
    another, or not at all."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # it is ignored, or somebody's own
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def keep_interrupts() -> None:
    """Python drops what is raised in a callback of a weak reference: without this, a Ctrl-C in one of them would be
    lost, with a traceback. It is raised again a moment later."""
    import threading

    others, main_thread = sys.unraisablehook, threading.get_ident()

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(_INTERRUPT_AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
        else:
            others(unraisable)

    sys.unraisablehook = again

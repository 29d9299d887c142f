"""Settings of Python in processes whose event loop must not wait for their threads."""

from __future__ import annotations

import gc
import sys

# After which a thread lets the event loop go on; Python's is 5 ms. Beside a thread that converts a grammar, whatever
# woke up waited for 1.2 ms with 1 ms, and for 0.3 ms with this one; the thread took 5 % longer.
_SWITCH_S = 1e-4


def put_event_loop_first() -> None:
    """Call it when libraries and models are loaded: they stay, and the garbage collector leaves them out from
    now on. Looking them through takes longer than reading a large body."""
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()

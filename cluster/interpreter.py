"""Settings of Python in processes whose event loop must not wait for their threads."""

from __future__ import annotations

import gc
import sys

# After which a thread lets the event loop go on; Python's is 5 ms. A thread that reads a client's schema of 8,000
# properties let it go on after 14 ms on average, and with this one after 4 ms.
_SWITCH_S = 1e-3


def put_event_loop_first() -> None:
    """Call it when libraries and models are loaded: they stay, and the garbage collector leaves them out from
    now on. Looking them through takes longer than reading a large body."""
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()

"""The `paceline` command. The commands are imported inside `main`, so that an early Ctrl-C is no traceback either."""

from __future__ import annotations

import os
import sys

from actors.errors import PacelineError
from actors.workers.kernel_cache import prepare_kernel_cache


def main() -> None:
    """Entry point: what a user did wrong is one line on stderr and exit status 2, never a traceback."""
    # Where colorama is installed, numba would colour its errors with it, and that writes an escape code at the exit.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    prepare_kernel_cache()
    try:
        from cluster.cli.app import app

        app()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""The `paceline` command. Everything slow is imported inside `main`, so that an early Ctrl-C is no traceback either."""

from __future__ import annotations

import errno
import os
import sys

from cluster.cli.interrupts import INTERRUPTED, ctrl_c_ends_the_process, keep_interrupts


def main() -> None:
    """Entry point. A user's mistake is one line on stderr and exit status 2, never a traceback."""
    with ctrl_c_ends_the_process():
        from typer import Abort
        from typer._click.exceptions import ClickException, NoArgsIsHelpError

        from actors.errors import PacelineError
        from actors.workers.kernel_cache import prepare_kernel_cache
        from cluster.cli.app import app
        from cluster.cli.mistakes import told_mistake
    keep_interrupts()
    # Where colorama is installed, numba would colour its errors with it, and that writes an escape code at the exit.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    disabled = os.environ.get("NUMBA_DISABLE_JIT", "0")
    if disabled not in ("", "0"):
        print(
            f"paceline: NUMBA_DISABLE_JIT is {disabled!r}; unset it or set it to 0: compiled functions need numba's "
            "compiler",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        prepare_kernel_cache()
        sys.exit(app(prog_name="paceline", standalone_mode=False))
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except ClickException as error:
        print(f"paceline: {told_mistake(error)}", file=sys.stderr)
        sys.exit(2)
    except Abort:
        print("aborted", file=sys.stderr)
        sys.exit(1)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"paceline: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

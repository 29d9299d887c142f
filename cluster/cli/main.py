"""The `paceline` command. Everything slow is imported inside `main`, so that an early Ctrl-C is no traceback either."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from typing import Any

from actors.errors import PacelineError
from actors.workers.kernel_cache import prepare_kernel_cache

_INTERRUPT_AGAIN_S = 0.05


def main() -> None:
    """Entry point. A user's mistake is one line on stderr and exit status 2, never a traceback."""
    _keep_interrupts()
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
    prepare_kernel_cache()
    try:
        from typer import Abort
        from typer._click.exceptions import ClickException, NoArgsIsHelpError

        from cluster.cli.app import app

        try:
            sys.exit(app(prog_name="paceline", standalone_mode=False))
        except NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except ClickException as error:
            print(f"paceline: {_message(error)}", file=sys.stderr)
            sys.exit(2)
        except Abort:
            print("aborted", file=sys.stderr)
            sys.exit(1)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _keep_interrupts() -> None:
    """Python drops what is raised in a callback of a weak reference, and an import has many: without this, a Ctrl-C in
    one of them would be lost, with a traceback. It is raised again a moment later."""
    others, main_thread = sys.unraisablehook, threading.get_ident()

    def again(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(_INTERRUPT_AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
        else:
            others(unraisable)

    sys.unraisablehook = again


def _message(error: Any) -> str:
    """One line: what is wrong with the command line, and which command explains itself with --help."""
    from pydantic import ValidationError
    from typer._click.exceptions import BadOptionUsage, BadParameter, MissingParameter, NoSuchOption

    from cluster.validation import limit_of

    cause = error.__cause__
    if isinstance(error, MissingParameter):
        told = f"{_option(error)} is missing"
    elif isinstance(error, BadParameter) and isinstance(cause, ValidationError):
        problem = cause.errors()[0]
        limit = re.sub(r"^'.*?' is not (one of .*?)\.?$", r"it must be \1", limit_of(problem))
        told = f"{_option(error)} is {problem['input']}; {limit}"
    elif isinstance(error, NoSuchOption):
        near = f"; similar: {', '.join(sorted(error.possibilities))}" if error.possibilities else ""
        told = f"there is no option {error.option_name}{near}"
    elif isinstance(error, BadOptionUsage) and "requires an argument" in error.message:
        told = f"{error.option_name} needs a value"
    else:
        told = " ".join(error.format_message().split()).rstrip(".")
        told = re.sub("^No such command", "there is no command", told)
        told = re.sub(r"^Got unexpected extra argument\(s\) \((.*)\)$", r"unexpected argument: \1", told)
    context = getattr(error, "ctx", None)
    return told if context is None else f"{told}; see `{context.command_path} --help`"


def _option(error: Any) -> str:
    """The option as it is written, or the argument in capitals."""
    if error.param is None:
        return "a value"
    longest = max(error.param.opts, key=len)
    return str(longest if longest.startswith("-") else longest.upper())


if __name__ == "__main__":
    main()

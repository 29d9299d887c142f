"""Mistakes in a command line, told in one line."""

from __future__ import annotations

import re
from typing import Any


def told_mistake(error: Any) -> str:
    """What is wrong with the command line, and which command explains itself with --help."""
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

"""Errors of the machine side.

    PacelineError
    ├── InvalidRequest        what a caller sent is wrong: names field, value and limit
    ├── Overloaded            no room now; says when to come back
    │   └── ObjectiveUnreachable  there is room, but the first token would come later than promised
    ├── Unavailable           the service is starting, draining or has lost its target group
    │   └── RouterLost        the router or its target group went away; another router may carry on
    ├── DeadlineExceeded      the caller's own time limit has passed
    ├── ModelError            a model cannot be found, read or run
    │   └── ModelUnavailable  its files cannot be fetched from here
    ├── EngineBroken          an engine can compute nothing more; its process must be replaced
    └── LinkError             a message between workers could not be read or did not arrive

Every class passes its arguments to `Exception.__init__`, so it survives pickling across processes.
"""

from __future__ import annotations

import json

_MAX_SHOWN_CHARS = 256  # longer values are cut: gRPC clients refuse errors of more than a few kilobytes


class Size(str):
    """What is told of a value that is not shown itself, such as "20 tokens". Errors write it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


MISSING = Size("missing")  # what is required and is not there


def spelled(value: object) -> str:
    """A value in a message: null, true, false and Infinity as JSON's parsers spell them, texts in single quotes."""
    return json.dumps(value) if value is None or isinstance(value, (bool, float)) else repr(value)


class PacelineError(Exception):
    """Root of every error that Paceline raises on purpose."""


class InvalidRequest(PacelineError):
    """A request carries a value that cannot be served. `field` is the request's own name for it."""

    def __init__(self, field: str, value: object, limit: str, code: str = "invalid_value") -> None:
        super().__init__(field, value, limit, code)
        self.field = field
        self.value = value
        self.limit = limit
        self.code = code

    def __str__(self) -> str:
        value = spelled(self.value)
        if len(value) > _MAX_SHOWN_CHARS:
            value = f"{value[:_MAX_SHOWN_CHARS]}..."
        return f"{self.field} is {value}; {self.limit}"


class Overloaded(PacelineError):
    """The bounded queue is full; try again after `retry_after_s` seconds."""

    router_id = ""  # of the router that says so, where another one is to be asked; "": the client is refused

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.reason}; retry after {self.retry_after_s:g} s"


class ObjectiveUnreachable(Overloaded):
    """The first token would come later than the objective of the request's class; sooner after `retry_after_s`."""


class Unavailable(PacelineError):
    """The service cannot take requests at the moment (starting, draining, target group lost)."""


class RouterLost(Unavailable):
    """The router died, left, or has no target group while others have. Another router can continue the call."""


class DeadlineExceeded(PacelineError):
    """The request's own deadline passed before it finished."""


class ModelError(PacelineError):
    """A model cannot be found, read or run."""


class ModelUnavailable(ModelError):
    """A model's package is not installed and cannot be fetched."""


class EngineBroken(PacelineError):
    """An engine stopped in a state that no later round can recover from; its process must be replaced."""


class LinkError(PacelineError):
    """A message between workers is malformed, of another protocol version, or did not arrive in time."""

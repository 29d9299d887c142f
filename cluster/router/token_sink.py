"""Where the router tells of committed tokens, so that others may learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache_service.formats.documents import Int32Array
from cache_service.formats.earnings import Earnings


class TokenSink(Protocol):
    """Takes tokens of sequences that may be learnt from. Its methods return within microseconds; what they raise is
    counted and costs only what they were told. Arrays are views: a sink copies what it keeps."""

    def answered(self, organisation: str, token_ids: Int32Array) -> None:
        """A request whose organisation feeds the public pool has got its whole answer, shape [n]."""

    def finished(self, namespace: str, earnings: Earnings) -> None:
        """A request that might draft from the cache has got all its tokens; what that has brought it."""

    def follow(self, namespaces: Sequence[str]) -> None:
        """A request has come that may draft from these."""

    def bounded(self, namespace: str, tenant: str, max_bytes: int | None) -> None:
        """A request has come that will add to a namespace of a tenant, whose namespaces may take so much together;
        None: as much as others."""

    def watch(self, namespace: str, learner: object) -> None:
        """The learner (a router) will learn of this namespace: `ended` tells it when nothing of that must be kept any
        more. Told with every request, and of those that are there when their namespace has ended."""

    def ended(self, learner: object) -> Sequence[str]:
        """Namespaces of which whatever this one has learnt is to be forgotten now. Each is told every learner once, and
        may not be watched any more."""

    def prompted(self, namespace: str, document_id: bytes, token_ids: Int32Array) -> None:
        """A sequence begins with this prompt, shape [n]; told once, before its first `committed`."""

    def committed(self, namespace: str, document_id: bytes, offset: int, token_ids: Sequence[int] | Int32Array) -> None:
        """Tokens that a round has committed, shape [n >= 1]; offset: of the first one in prompt and output."""

"""How often the tokens of tried phrases come true where those before them have: running shares, by depth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from cache_service.store.fair_share import first_to_give_way

Shares = TypeVar("Shares")

_MAX_NAMESPACES = 64  # whose shares are known at a time

# Of a phrase's first token, and of each further one, until it is known better.
_FIRST_SHARE, _NEXT_SHARE = 0.2, 0.5
_WEIGHT = 0.02  # of an observation


def initial_shares(phrase_length: int) -> list[float]:
    """phrase_length: at least 1."""
    return [_FIRST_SHARE, *[_NEXT_SHARE] * (phrase_length - 1)]


def share_after(share: float, came_true: bool) -> float:
    """The running share, one observation later."""
    return share + _WEIGHT * (came_true - share)


class SharesByNamespace(Generic[Shares]):
    """The shares of each namespace by themselves: they say something of its text, so no other's drafts go by them.
    Of the owner with most namespaces, whoever began a sequence least recently is forgotten first."""

    def __init__(self, make_first: Callable[[], Shares]) -> None:
        self._make_first = make_first
        self._shares: OrderedDict[str, Shares] = OrderedDict()

    def of(self, namespace: str) -> Shares:
        """To be kept for a sequence, and changed."""
        if namespace not in self._shares:
            self._shares[namespace] = self._make_first()
            if len(self._shares) > _MAX_NAMESPACES:
                del self._shares[first_to_give_way(list(self._shares))]
        self._shares.move_to_end(namespace)
        return self._shares[namespace]

    def drop_namespace(self, namespace: str) -> None:
        """Begin anew for the sequences that come."""
        self._shares.pop(namespace, None)

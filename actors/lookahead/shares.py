"""Acceptance shares of phrases: running average, by depth, of how often a token is right if those before it are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from cache_service.store.fair_share import first_to_give_way

Shares = TypeVar("Shares")

_MAX_NAMESPACES = 64

_FIRST_SHARE, _NEXT_SHARE = 0.2, 0.5  # priors of a phrase's first token, and of each further one
_WEIGHT = 0.02  # weight of a new observation


def initial_shares(phrase_length: int) -> list[float]:
    """phrase_length: at least 1."""
    return [_FIRST_SHARE, *[_NEXT_SHARE] * (phrase_length - 1)]


def share_after(share: float, came_true: bool) -> float:
    """The running share after one more observation."""
    return share + _WEIGHT * (came_true - share)


class SharesByNamespace(Generic[Shares]):
    """Shares by namespace, because they reveal something about its text. Beyond the limit, the owner with most
    namespaces loses the one that started a sequence least recently."""

    def __init__(self, make_first: Callable[[], Shares]) -> None:
        self._make_first = make_first
        self._shares: OrderedDict[str, Shares] = OrderedDict()

    def of(self, namespace: str) -> Shares:
        """The namespace's shares, to be updated in place."""
        if namespace not in self._shares:
            self._shares[namespace] = self._make_first()
            if len(self._shares) > _MAX_NAMESPACES:
                del self._shares[first_to_give_way(list(self._shares))]
        self._shares.move_to_end(namespace)
        return self._shares[namespace]

    def drop_namespace(self, namespace: str) -> None:
        """New sequences start with the initial shares again."""
        self._shares.pop(namespace, None)

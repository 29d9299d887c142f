"""Fair eviction: the least recently used namespace of the owner who holds most.

With plain LRU, one tenant that uses ever new salts would evict everybody else's namespaces; so it evicts its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache_service.formats.namespaces import owner_of


def first_to_give_way(names: Sequence[str], size: Callable[[str], int] = lambda _: 1, num_spared: int = 1) -> str:
    """The namespace to evict. names: least recently used first; the last `num_spared` are not evicted.

    size: what a namespace holds; by default owners are compared by their number of namespaces. Raises ValueError where
    all are spared.
    """
    held: dict[str, int] = {}
    for name in names:
        owner = owner_of(name)
        held[owner] = held.get(owner, 0) + size(name)
    # max returns the first of equals: the least recently used.
    return max(names[: len(names) - num_spared], key=lambda name: held[owner_of(name)])

"""Who gives way where there is no more room: of the owner who holds most, what was used least recently.

An owner is who a namespace's name begins with. By mere recency, one tenant that asks under ever new salts would push
out what all others have learnt; so it pushes out its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache_service.formats.namespaces import owner_of


def first_to_give_way(names: Sequence[str], size: Callable[[str], int] = lambda _: 1, num_spared: int = 1) -> str:
    """One of the namespaces that are known, least recently used first; the last `num_spared` do not give way.

    size: what a namespace holds, as a number; 1 counts namespaces. Raises ValueError where all are spared.
    """
    held: dict[str, int] = {}
    for name in names:
        owner = owner_of(name)
        held[owner] = held.get(owner, 0) + size(name)
    # Of equals the first, which is the one used least recently.
    return max(names[: len(names) - num_spared], key=lambda name: held[owner_of(name)])

"""The prefix cache of an aggregated group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.simulate.prefix_memory import PrefixMemory

SYSTEM_TOKENS = 10


def texts(conversation: int, system: int, count: int):
    return ((("conversation", conversation), count), (("system", system), SYSTEM_TOKENS))


def tokens_without_room(used: list[tuple[int, int]]) -> int:
    """That the texts take together if each system prompt is kept once."""
    return sum(dict(used).values()) + SYSTEM_TOKENS * len({conversation % 3 for conversation, _ in used})


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 30)), max_size=20), st.integers(0, 150))
def test_the_last_texts_that_fit_are_found_and_shared_beginnings_take_room_once(told, room):
    memory = PrefixMemory(room)
    own: dict[int, int] = {}  # tokens behind the system prompt
    used: list[tuple[int, int]] = []  # conversation and such tokens, last use last
    for conversation, more in told:
        own[conversation] = own.get(conversation, 0) + more
        used = [one for one in used if one[0] != conversation] + [(conversation, own[conversation])]
        length = SYSTEM_TOKENS + own[conversation]
        memory.add(texts(conversation, conversation % 3, length), length)
    kept: list[tuple[int, int]] = []
    for one in reversed(used):
        if tokens_without_room([*kept, one]) > room:
            break
        kept.append(one)
    for conversation, count in kept:
        length = SYSTEM_TOKENS + count
        assert memory.find(texts(conversation, conversation % 3, length), length) == length
        assert memory.find(texts(99, conversation % 3, length), length) == SYSTEM_TOKENS
    if tokens_without_room(used) > room:
        whole = [memory.find(texts(one, one % 3, SYSTEM_TOKENS + count), 10_000) for one, count in used]
        assert sum(found == SYSTEM_TOKENS + count for found, (_, count) in zip(whole, used, strict=True)) < len(used)

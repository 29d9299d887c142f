"""Random batches of the engine, for tests by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from paceline_testing.forests import Forest, forest_of


@st.composite
def forests(draw: st.DrawFn, max_sequences: int = 3, max_known: int = 60, max_nodes: int = 12) -> Forest:
    parts = []
    for _ in range(draw(st.integers(1, max_sequences))):
        known = draw(st.integers(1, max_known))
        size = draw(st.sampled_from([0, 1, 3, max_nodes // 2, max_nodes]))
        parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
        if draw(st.booleans()):
            parents = list(range(-1, size - 1))
        grows = size > 1 and draw(st.booleans())
        computed = known if grows else draw(st.sampled_from([0, known // 2, known - 1]))
        parts.append((known, computed, parents, draw(st.integers(1, size - 1)) if grows else 0))
    return forest_of(parts, draw(st.sampled_from([1, 4, 16])))

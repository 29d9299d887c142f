"""Compiles what the automata of a shared cache and of corpora need. As a program, it fills numba's cache."""

from __future__ import annotations

from cache_service.automata import joined_text, static_automaton, suffix_automaton


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache, so that no request pays for it."""
    suffix_automaton.warm_up()
    suffix_automaton.warm_up_documents()
    joined_text.warm_up()
    static_automaton.warm_up()


if __name__ == "__main__":
    warm_up()

"""Suffix automata over token ids, live and frozen, and the draft trees that they propose.

May import: formats.
"""

"""Automata and n-gram counts learnt from tokens, and the Redis store that shares them.

May import: nothing of actors or cluster, neither torch nor Ray.
"""

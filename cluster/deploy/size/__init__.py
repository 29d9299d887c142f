"""Estimates whether a model fits and how fast it can be, from published figures of GPUs or measured rates of a CPU.

May import: configuration and validation; the router's curve of forward times; actors.
"""

"""Estimates from published hardware figures whether a model fits and how fast it can be.

May import: the configuration alone.
"""

"""Checks cluster files and manifests for mistakes before they are applied.

May import: configuration; actors.
"""

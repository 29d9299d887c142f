"""Verified tokens on their way: publisher, compactor, reader, follower.

May import: store and formats.
"""

"""Owns the sequences of one target group: schedules rounds, plans drafts, commits tokens, journals every stream.

May import: cache, workers, drafters; never the gateway.
"""

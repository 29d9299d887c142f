"""Owns the sequences of one target group: schedules rounds, plans drafts, commits tokens.

May import: cache and configuration, never the gateway; actors; cache_service.
"""

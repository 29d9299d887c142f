"""Drafters that run on the CPU of the router, one a file.

May import: lookahead, grammar and the records below it; cache_service.
"""

"""Drafters that run on the CPU of the router, one a file.

May import: lookahead, draft_tree and the automata of cache_service.
"""

"""Window, phrase pool and token trie of lookahead decoding, for the drafters of target and draft model.

May import: cache_service.
"""

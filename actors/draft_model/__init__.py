"""The draft engine: draft trees from a small model, drafting ahead, lookahead, other vocabularies.

May import: engine, lookahead, sampling, the contract of drafters.
"""

"""The draft engine: draft trees from a small model, drafting ahead, lookahead, other vocabularies.

May import: engine, drafters, lookahead, sampling, models and the records below them.
"""

"""The target engine: ragged batches, paged KV, attention backends, verification of draft trees.

May import: sampling, models and the records below them.
"""

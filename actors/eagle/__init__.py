"""EAGLE and MTP heads: drafters that read hidden states of the target.

May import: engine, drafters, models and the records below them.
"""

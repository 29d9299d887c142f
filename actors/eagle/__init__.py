"""EAGLE heads: drafters that read hidden states of the target.

May import: engine, models, the contract of drafters.
"""

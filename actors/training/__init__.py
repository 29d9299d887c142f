"""Builds draft models and trains EAGLE heads from the text that a target writes.

May import: everything of actors but workers.
"""

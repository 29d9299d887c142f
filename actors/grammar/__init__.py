"""Grammars that constrain answers: which tokens may follow committed tokens and draft nodes.

May import: messages and the records below them.
"""

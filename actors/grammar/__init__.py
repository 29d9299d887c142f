"""Grammars that constrain answers: which tokens may follow committed tokens and draft nodes.

May import: sampling's messages and the records below them.
"""

"""Finds, loads and quantises models and tokenizers.

May import: errors and options.
"""

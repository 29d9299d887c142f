"""Text to tokens and back: chat templates, incremental detokenizer, stop strings.

May import: cluster.errors.
"""

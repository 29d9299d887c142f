"""Text to tokens and back: chat templates, incremental detokenizer, stop strings.

May import: nothing of the cluster but its request options.
"""

"""Text to tokens and back: chat templates, incremental detokenizer, stop strings.

May import: validation and errors; actors.
"""

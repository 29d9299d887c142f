"""Tool calls and reasoning in answers: formats of chat templates, their parsers and grammars. Pure functions.

May import: the rest of text; validation and errors; actors.
"""

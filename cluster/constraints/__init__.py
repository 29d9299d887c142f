"""What constrains an answer: the client's schemas, expressions and tags, checked, and the grammars that they become.

Compiled grammars and their masks are in `actors.grammar`. May import: validation and errors; actors.
"""

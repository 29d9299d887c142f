"""How complex a grammar may be. A mask of one that comes close to them takes some milliseconds."""

from __future__ import annotations

from llguidance import LLParserLimits

# Without the parser's state in errors, which would tell the answer so far.
LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=25_000, max_lexer_states=50_000, verbose_errors=False)

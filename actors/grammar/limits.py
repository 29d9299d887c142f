"""How complex a grammar may be, and how long its masks may take."""

from __future__ import annotations

from llguidance import LLParserLimits

# Masks take longer than in proportion to the parser's items: an ambiguous grammar took 735 ms with 25,000, and 9 ms
# with 5,000. Objects with 500 optional properties need 2,000. Errors are without the parser's state, which would tell
# the answer so far.
LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=3_000, max_lexer_states=50_000, verbose_errors=False)
# Processor time of an answer's masks and of the ways behind its tokens, for which all sequences of its rounds may wait.
MASK_S_PER_ROUND = 5e-3
MOST_MASK_S_AHEAD = 0.25  # of these: an answer's first masks take longer than others
MOST_AHEAD_S = 5e-3  # of processor time in a round, to look at what may follow drafts of one sequence

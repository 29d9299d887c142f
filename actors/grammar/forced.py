"""The tokens that a grammar forces."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer


def forced_tokens(matcher: LLMatcher, vocabulary: LLTokenizer) -> list[int]:
    """The next tokens, as far as the grammar leaves no choice.

    Forced text may spell a special token, such as a string "<|end|>" in a schema. llguidance proposes that token then,
    which the grammar does not allow, and its mask has nothing else; here it is spelled with ordinary tokens. Only the
    first of these is returned: behind it, the tokenizer may spell the rest together with the text that follows.
    """
    if matcher.is_stopped():
        return []
    tokens = matcher.compute_ff_tokens()
    if not any(map(vocabulary.is_special_token, tokens)):
        return tokens
    allowed = tokens[: matcher.validate_tokens(tokens)]
    if allowed or not tokens:
        return allowed
    spelled = vocabulary.greedy_tokenize(vocabulary.decode_str(tokens[:1]))[:1]
    return spelled[: matcher.validate_tokens(spelled)]

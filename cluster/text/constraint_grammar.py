"""The grammar of a constraint for the vocabulary of a model."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.text.structural_tag_grammar import structural_tag_grammar


def constraint_grammar(outputs: StructuredOutputs, special_tokens: Mapping[str, int], field: str) -> str:
    """In llguidance's format. special_tokens: ids by text. field: what errors name. Raises InvalidRequest."""
    if outputs.structural_tag is not None:
        return structural_tag_grammar(outputs.structural_tag, special_tokens, field)
    return outputs.grammar_text(field)

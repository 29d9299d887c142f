"""The grammars of a call's answers: of tool calls, of the content, and of the whole."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from cluster.gateway.requests.call import GenerationCall
from cluster.text.constraint_grammar import constraint_grammar
from cluster.text.text_codec import TextCodec


@dataclass(frozen=True, slots=True)
class CallGrammars:
    """Grammars of the parts of an answer; "": none."""

    calls: str
    content: str


async def grammars_of(call: GenerationCall, codec: TextCodec) -> CallGrammars:
    """Raises InvalidRequest."""
    outputs, content = call.options.structured_outputs, ""
    if outputs is not None:
        special_ids = codec.chat_format.special_ids
        content = await asyncio.to_thread(constraint_grammar, outputs, special_ids, call.constraint_field)
    calls = ""
    if call.is_chat and call.tool_use.callable_tools:
        calls = await asyncio.to_thread(codec.chat_format.calls_grammar, call.tool_use, bool(content))
    return CallGrammars(calls, content)


def with_whole_grammar(
    call: GenerationCall, parts: CallGrammars, codec: TextCodec, starts_inside_thought: bool
) -> tuple[GenerationCall, str]:
    """The call, with special tokens in the text if a parser reads it, and the grammar of its answers."""
    if not call.is_chat:
        return call, parts.content
    grammar = codec.chat_format.whole_grammar(call.tool_use, parts.calls, parts.content, starts_inside_thought)
    if codec.chat_format.parser(call.tool_use, starts_inside_thought) is not None:
        call = replace(call, skip_special_tokens=False)
    return call, grammar

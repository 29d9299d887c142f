"""Harmony, of gpt-oss: messages in channels. analysis is reasoning, final and commentary are content, and commentary to
functions.f is a call.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster.text.tools.json_call import read_arguments
from cluster.text.tools.lark import ANY_TEXT, Lark, Plain, arguments_rule, either, repeated
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_format import SteppedFormat
from cluster.text.tools.tool import MAX_NAME_CHARS, Tool, ToolChoice

_CHANNEL, _MESSAGE, _CONSTRAIN, _START = "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MAX_HEADER_CHARS = 256
_HEADERS = Marks([_CHANNEL, _START])
_ENDS = Marks([_END, _CALL, _RETURN, _START, _CHANNEL])
_RECIPIENT = re.compile(rf"to=functions\.([A-Za-z0-9_.:/-]{{1,{MAX_NAME_CHARS}}})(?![A-Za-z0-9_.:/-])")


class Harmony(SteppedFormat):
    name = "harmony"
    marks_every_answer = True

    def detects(self, chat_template: str) -> bool:
        return _CHANNEL in chat_template and _MESSAGE in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output)

    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        bodies = []
        for index, tool in enumerate(tools):
            head = lark.marks(Plain(tool.name + " "), _CONSTRAIN, "json", _MESSAGE)
            bodies.append(f"{head} {arguments_rule(lark, tool, index)}")
        next_message = lark.marks(_START, "assistant")
        text = lark.text_up_to("text_and_end", _END)
        lark.rule("thought", f"{lark.marks(_CHANNEL, 'analysis', _MESSAGE)} {text} {next_message}")
        lark.rule("preamble", f"{lark.marks(_CHANNEL, 'commentary', _MESSAGE)} {text} {next_message}")
        lark.rule("final", f"{lark.marks(_CHANNEL, 'final', _MESSAGE)} {ANY_TEXT}")
        answers = ["final"] if choice in ("none", "auto") else []
        if bodies:
            head = lark.marks(_CHANNEL, "commentary to=functions.")
            between = lark.marks(_CALL, _START, "assistant")
            answers.append(repeated(lark, f"{head} {either(bodies)}", between, choice, parallel))
        before = "(thought | preamble)*" if choice in ("none", "auto") else "thought*"
        lark.rule("start", f"{before} {either(answers)}")
        return lark.written()


def _read_answer(reader: Reader, output: Output) -> Steps[None]:
    mark = yield from reader.text_until(_HEADERS, output.content)
    while mark is not None:
        header = yield from reader.short_text_until(_MESSAGE, _MAX_HEADER_CHARS)
        if header is None:
            output.content(reader.taken())
            mark = yield from reader.text_until(_HEADERS, output.content)
            continue
        reader.commit()
        channel = header if mark == _CHANNEL else header.partition(_CHANNEL)[2]
        recipient = _RECIPIENT.search(header)
        if recipient:
            yield from _read_call(reader, output, recipient[1])
        emit = output.reasoning if channel.startswith("analysis") else output.content
        mark = yield from reader.text_until(_ENDS, emit)
        if mark is not None and mark not in (_START, _CHANNEL):
            reader.commit()
            mark = yield from reader.text_until(_HEADERS, output.content)


def _read_call(reader: Reader, output: Output, name: str) -> Steps[None]:
    yield from reader.spaces()
    if (yield from reader.peek()) != "{":
        output.content(reader.taken())
        return
    output.begin_call(name)
    reader.commit()
    yield from read_arguments(reader, output)
    reader.commit()

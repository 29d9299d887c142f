"""Parsers of tool calls: what they read, and that it does not depend on how the text comes."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.text.tools.json_scanner import JsonScanner
from paceline_testing.tool_calls import ARGUMENTS, FORMAT_OF_NAME, TOOLS, TWO_CALLS, joined, read_in_pieces, read_whole

NAMES = sorted(FORMAT_OF_NAME)
FRAGMENTS = {
    name: [text, *[text[start : start + size] for start in range(0, len(text), 5) for size in (1, 4, 13, 31)]]
    for name, text in TWO_CALLS.items()
}
MORE = ["<tool_call>", "</tool_call>", "<function=", '{"name": "f", "arguments": ', "}", "[TOOL_CALLS]", "<|channel|>"]
MORE += ["\n", " ", "[ARGS]", '"', "\\", "{}", "<|python_tag|>", "<|message|>", "<|end|>", "a", "é", "<", "[CALL_ID]x"]


def parser_of(name):
    return FORMAT_OF_NAME[name].parser(TOOLS)


@st.composite
def answers(draw):
    """A format, text made of parts of its calls, and a split of it."""
    name = draw(st.sampled_from(NAMES))
    parts = st.one_of(st.sampled_from(FRAGMENTS[name]), st.sampled_from(MORE), st.text(max_size=5))
    text = "".join(draw(st.lists(parts, max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return name, text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_reads_two_calls(name):
    read = read_whole(parser_of(name), TWO_CALLS[name])
    assert [called for called, _ in read.calls] == ["get_weather", "get_time"]
    assert [json.loads(arguments) for _, arguments in read.calls] == [ARGUMENTS, {}]
    assert (read.content, read.reasoning) == ("", "")


@given(answers())
def test_a_split_changes_nothing_and_nothing_is_lost(answer):
    name, text, pieces = answer
    read = read_whole(parser_of(name), text)
    assert read_in_pieces(parser_of(name), pieces) == read
    assert read_in_pieces(parser_of(name), text) == read
    for called, arguments in read.calls:
        assert 0 < len(called) <= 64
        scanner = JsonScanner()
        assert scanner.scan(arguments)[0] == len(arguments)
        assert arguments.startswith("{")
    if not read.calls and name != "harmony":
        assert read.content == text
    left = iter(text)
    assert all(character in left for character in read.content), "content is a part of the text"


@pytest.mark.parametrize(("name", "size"), [(name, 40_000 if name == "hermes" else 10_000) for name in NAMES])
def test_time_grows_with_the_text_only(name, size):
    """200,000 characters one by one: to read them again for each one would take minutes."""
    call = ("<|python_tag|>" if name == "llama3_json" else "") + TWO_CALLS[name]
    head, tail = call.split("Zürich", 1)
    cut = call[: call.index("get_weather")]
    parts = ["word " * (size // 5), cut * (size // len(cut)), cut + " " * size, head + "x" * size + tail]
    text = "".join(parts) + head + '", "days": ' + "7" * size
    parser = parser_of(name)
    started = time.process_time()
    events = [event for character in text for event in parser.push(character)] + parser.finish()
    assert time.process_time() - started < 4  # the longest takes 0.4 on a machine that is not busy
    assert len(joined(events).calls) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_arguments_come_as_they_are_written(name):
    parser = parser_of(name)
    head, _ = TWO_CALLS[name].split("Zürich", 1)
    first = [event for piece in (head, "Zürich") for event in parser.push(piece)]
    assert read_in_pieces(parser_of(name), [head]).calls[0][0] == "get_weather"
    assert "".join(getattr(event, "text", "") for event in first).endswith('"Zürich')


@pytest.mark.parametrize("name", NAMES)
def test_text_around_calls(name):
    calls = TWO_CALLS[name]
    if name == "harmony":
        calls = (
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>A<|end|>{calls}"
        )
        read = read_whole(parser_of(name), calls)
        assert (read.content, read.reasoning, len(read.calls)) == ("A", "Hm.", 2)
        return
    before = "" if name == "llama3_json" else "Let me see.\n"
    read = read_whole(parser_of(name), f"{before}{calls}\n")
    assert (read.content, len(read.calls)) == (before, 2)
    assert read_whole(parser_of(name), f"{before}{calls}\nDone.").content == f"{before}\nDone."


MARKS_BETWEEN = (
    "\n</tool_call>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "</function>",
    "<|call|>",
    "\n```<",
    "; ",
    "\n",
)


@pytest.mark.parametrize("mark", MARKS_BETWEEN)
@pytest.mark.parametrize("name", NAMES)
def test_marks_after_calls_may_be_missing(name, mark):
    read = read_whole(parser_of(name), TWO_CALLS[name].replace(mark, mark[-1] if mark.endswith("<") else ""))
    assert [called for called, _ in read.calls][:2] == ["get_weather", "get_time"][: len(read.calls)]
    assert json.loads(read.calls[0][1])["days"] == 3
    assert len(read.calls) == 2 or (name == "glm" and mark.endswith("</tool_call>"))  # a name alone is no call


@pytest.mark.parametrize("name", NAMES)
def test_the_end_may_cut_a_call_anywhere(name):
    for end in range(len(TWO_CALLS[name])):
        cut = TWO_CALLS[name][:end]
        read = read_whole(parser_of(name), cut)
        if read.calls:
            scanner = JsonScanner()
            scanner.scan(read.calls[-1][1])
            assert not scanner.is_bad, cut
            assert not read.content or len(read.calls) == 1
        else:
            assert read.content in (cut, ""), cut


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": [1]}, "id": 7, "name": "f"}</tool_call>', [("f", '{"a": [1]}')], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "x', [("f", "{}")], ""),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")], ""),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
            [("f", '{"a": 0')],
            "1}}</tool_call>",
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', [], None),
        ("hermes", '<tool_call>{"name": "' + "f" * 65 + '", "arguments": {}}', [], None),
        ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}', [("f", "{}")], "<tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ty"}}', [("f", '{"a": "x\\ty"}')], ""),
        ("hermes", "see <tool_call", [], None),
        ("hermes", "  \n", [], None),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', [], None),
        ("llama3_json", '<|python_tag|>{"name": "bob", "parameters": {}}', [("bob", "{}")], ""),
        ("llama3_json", '{"type": "function", "name": "get_time", "parameters": {}}', [("get_time", "{}")], ""),
        ("llama3_json", 'So: {"name": "get_time", "parameters": {}}', [], None),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', [("f", "{}")], ""),
        ("mistral_args", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", [("f", "{}")], ""),
        ("mistral_args", '[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')], ""),
        ("mistral_args", "[TOOL_CALLS]f[CALL", [], None),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>What?", [], None),
        (
            "glm",
            "<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
            [("f", '{"a": [1, 2]}')],
            "",
        ),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1, 2</arg_value>", [("f", '{"a": "[1, 2"')], ""),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>oops", [("f", "{}")], "<arg_key>a</arg_key>oops"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n\n1\n\n</parameter>\n</function>", [("f", '{"a": 1}')], ""),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\n\n1\n\n</parameter>\n</function>",
            [("get_weather", '{"city": "\\n1\\n"}')],
            "",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=note>5</parameter><parameter=days>True</parameter></function>",
            [("get_weather", '{"note": "5", "days": true}')],
            "",
        ),
        ("harmony", "No channel.", [], None),
        ("harmony", "<|channel|>final<|message|>Yes.<|return|>", [], "Yes."),
        ("harmony", "<|channel|>commentary to=functions.a.b json<|message|> {}", [("a.b", "{}")], ""),
        ("harmony", "<|channel|>" + "x" * 300 + "<|message|>", [], None),
    ],
)
def test_unusual_answers(name, text, calls, content):
    """content None: all of the text."""
    read = read_whole(parser_of(name), text)
    assert (read.calls, read.content) == (calls, text if content is None else content)


def test_depth_is_bounded():
    for deep in ("[" * 100_000, '{"a":' * 100_000):
        read = read_whole(parser_of("hermes"), f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}')
        assert len(read.calls[0][1]) < 1000
        assert read.content.endswith(deep[-1])
        nested = f"<tool_call>f<arg_key>a</arg_key><arg_value>{deep}</arg_value></tool_call>"
        assert json.loads(read_whole(parser_of("glm"), nested).calls[0][1]) == {"a": deep}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(json_values, st.sampled_from([None, 1]), st.booleans())
def test_the_scanner_passes_json_through(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    scanner = JsonScanner()
    passed = "".join(scanner.scan(character)[1] for character in text)
    scanner.end()
    assert scanner.is_complete
    assert passed == text


@given(st.text('{}[]",:\\u0 1.eE+-atrufalsn\n\x01', max_size=20))
@example('{"a": 1.}')
@example("-")
@example("1e5")
def test_the_scanner_refuses_what_json_refuses(text):
    scanner = JsonScanner()
    end, passed = scanner.scan(text)
    scanner.end()
    is_whole = scanner.is_complete and not text[end:].strip(" \t\n\r")
    try:
        json.loads(text, strict=False)  # control characters in strings come out escaped
        is_json = True
    except ValueError:
        is_json = False
    assert is_whole == is_json
    if is_whole:
        json.loads(passed)

"""Grammars of tool calls, compiled as answers are constrained by them."""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from actors.errors import InvalidRequest
from actors.grammar.grammars import Grammars
from actors.grammar.limits import LIMITS
from cluster.text.tools.reasoning import ReasoningMarks, with_thought
from cluster.text.tools.schema_types import ALL_TYPES, types_of
from cluster.text.tools.tool import NamedFunction, Tool
from paceline_testing.tool_calls import FORMAT_OF_NAME, TIME, TOOLS, TWO_CALLS, WEATHER, read_whole
from paceline_testing.toy_tokenizer import toy_tokenizer

NAMES = sorted(FORMAT_OF_NAME)
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
)
MARKS += (
    "<|python_tag|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "</think>",
)
MARKS += tuple(f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
ENDS = ('"', "}", "]", "<", "</", "</arg_value>", "</tool_call>", "<｜tool▁calls▁end｜>", "[ARGS]", "<|message|>")
ENDS_OF_RAW_VALUES = {"qwen3_coder": "\n</parameter>\n", "glm": "</arg_value>"}
BEFORE_CALLS = {"llama3_json": "{", "deepseek_v3": "<｜tool▁calls▁begin｜>", "deepseek_v31": "<｜tool▁calls▁begin｜>"}
BEFORE_CALLS |= {
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]",
    "harmony": "<|channel|>commentary to=functions.",
}


@functools.cache
def vocabulary(has_marks: bool):
    """A tokenizer with the marks as special tokens or without; the same for llguidance; ids of special tokens."""
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end-of-text|>"})
    if has_marks:
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    ids = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    if not has_marks:  # <|start|> and <|end|> are the toy's own
        ids = {text: id for text, id in ids.items() if text not in MARKS}
    text = tokenizer.backend_tokenizer.to_str()
    return tokenizer, LLTokenizer(text, n_vocab=len(tokenizer), eos_token=[tokenizer.eos_token_id]), ids.get


@functools.cache
def token_texts(has_marks: bool) -> list[str]:
    tokenizer = vocabulary(has_marks)[0]
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]


@functools.cache
def matcher_of(grammar: str, has_marks: bool) -> LLMatcher:
    matcher = LLMatcher(vocabulary(has_marks)[1], LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error() + grammar
    return matcher


def consumed_all(matcher: LLMatcher, tokens: list[int]) -> bool:
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)


def written(name, choice="auto", parallel=True, has_marks=True, tools=TOOLS):
    return FORMAT_OF_NAME[name].grammar(tools, choice, parallel, vocabulary(has_marks)[2])


def encoded(text: str, has_marks: bool) -> list[int]:
    tokenizer = vocabulary(has_marks)[0]
    if has_marks:
        return tokenizer.encode(text, add_special_tokens=False)
    return vocabulary(False)[1].tokenize_bytes(text.encode())


def accepted(grammar: str, text: str, has_marks: bool) -> tuple[int, bool]:
    """Characters that follow the grammar, and whether the answer may end there."""
    matcher, tokens = matcher_of(grammar, has_marks).deep_copy(), encoded(text, has_marks)
    count = matcher.try_consume_tokens(tokens)
    decoded = vocabulary(has_marks)[0].decode(tokens[:count]) if count < len(tokens) else text
    return len(decoded), matcher.is_accepting()


def single_call(name: str) -> str:
    """The call of get_weather alone, as the grammar writes it."""
    first_only = {
        "llama3_json": ("; {", ""),
        "mistral": (', {"name": "get_time"', "]"),
        "mistral_args": ("[TOOL_CALLS]get_time", ""),
        "deepseek_v31": ("<｜tool▁call▁begin｜>get_time", "<｜tool▁calls▁end｜>"),
        "deepseek_v3": ("\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time", "<｜tool▁calls▁end｜>"),
        "harmony": ("<|call|>", ""),
    }
    cut, end = first_only.get(name, ("\n<tool_call>", ""))
    text = TWO_CALLS[name].replace("\nNone\n", "\nnull\n")
    return text[: text.index(cut, 5)] + end


each = pytest.mark.parametrize("name", NAMES)
# Harmony's marks are special tokens in every vocabulary that has them.
each_with_and_without_marks = pytest.mark.parametrize(
    ("name", "has_marks"),
    [(name, has_marks) for name in NAMES for has_marks in (True, False) if has_marks or name != "harmony"],
)


@each_with_and_without_marks
def test_calls_are_accepted(name, has_marks):
    two, one = TWO_CALLS[name], single_call(name)
    for choice in ("auto", "required"):
        for text in (two, one):
            assert accepted(written(name, choice, True, has_marks), text, has_marks) == (len(text), True)
    for choice, parallel in (("auto", False), ("required", False), (NamedFunction("get_weather"), True)):
        grammar = written(name, choice, parallel, has_marks)
        assert accepted(grammar, one, has_marks) == (len(one), True)
        assert accepted(grammar, two, has_marks)[0] < len(two)
    again = two.replace("get_time", "get_weather").replace("\nNone\n", "\nnull\n")
    weather = [Tool("get_weather", "", {**WEATHER.parameters, "required": []})]
    assert accepted(written(name, "required", True, has_marks, weather), again, has_marks) == (len(again), True)
    named = written(name, NamedFunction("get_weather"), True, has_marks, weather)
    assert accepted(named, again, has_marks)[0] < len(again)


@each_with_and_without_marks
def test_free_text_is_everything_but_a_call(name, has_marks):
    grammar = written(name, has_marks=has_marks)
    before = "<|channel|>final<|message|>" if name == "harmony" else ""
    text = before + 'Hello, <b>wörld</b>! \\ \n\n {"a": [1]} <tool_cal [TOOL </function> ```json'
    assert accepted(grammar, text, has_marks) == (len(text), True)
    trigger = BEFORE_CALLS.get(name, "<tool_call>")
    if name not in ("llama3_json", "harmony"):
        assert accepted(grammar, f"Hello {trigger} Hi", has_marks)[0] <= len(f"Hello {trigger} ")
        assert not accepted(grammar, f"Hello {trigger}", has_marks)[1]
    none = written(name, "none", has_marks=has_marks)
    assert accepted(none, text, has_marks) == (len(text), True)
    assert accepted(none, TWO_CALLS[name], has_marks)[0] < len(TWO_CALLS[name])


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"llama3_json", "harmony"}))
def test_a_mark_is_not_written_with_ordinary_tokens(name):
    trigger = BEFORE_CALLS.get(name, "<tool_call>")
    tokens = vocabulary(False)[1].tokenize_bytes(f"Hello {trigger}".encode())  # ids of ordinary tokens are the same
    for choice in ("auto", "none"):
        assert matcher_of(written(name, choice), True).validate_tokens(tokens) < len(tokens)


@each_with_and_without_marks
def test_what_is_wrong_is_refused(name, has_marks):
    grammar = written(name, "required", has_marks=has_marks)
    call = single_call(name)
    for right, wrong in (("get_weather", "get_whether"), ("celsius", "kelvin"), ("1.5", '"a"'), ("days", "daze")):
        text = call.replace(right, wrong)
        assert accepted(grammar, text, has_marks)[0] < len(text), wrong
    assert accepted(grammar, "Hi", has_marks) == (0, False)
    assert not accepted(grammar, call[:-5], has_marks)[1]


@each
def test_what_is_forced_is_forced(name):
    """For a named function: everything up to the value of the first argument, whose key is required."""
    matcher = matcher_of(written(name, NamedFunction("get_weather")), True).deep_copy()
    forced = vocabulary(True)[0].decode(matcher.compute_ff_tokens())
    head = single_call(name).split("get_weather")[0]
    if name == "harmony":  # it may think first
        assert forced == "<|channel|>"
    elif name == "mistral":  # a space before the bracket is free
        assert forced == "[TOOL_CALLS]"
    else:
        assert forced.startswith(f"{head}get_weather")


@each_with_and_without_marks
def test_the_parser_reads_what_the_grammar_writes(name, has_marks):
    """Tokens drawn from the masks, most of them ones that end something."""
    eos, texts = vocabulary(has_marks)[0].eos_token_id, token_texts(has_marks)
    base, num_whole = matcher_of(written(name, "required", True, has_marks), has_marks), 0
    end_of_raw_value = encoded(ENDS_OF_RAW_VALUES[name], has_marks) if name in ENDS_OF_RAW_VALUES else []
    for seed in range(4):
        rng, matcher = random.Random(seed), base.deep_copy()
        tokens: list[int] = []
        while not matcher.is_stopped() and len(tokens) < 300:
            if end_of_raw_value and rng.random() < 0.1 and consumed_all(matcher, end_of_raw_value):
                tokens += end_of_raw_value
                continue
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: len(texts)]).tolist()
            ends = [token for token in allowed if token == eos or texts[token] in ENDS]
            tokens.append(rng.choice(ends if ends and rng.random() < 0.7 else allowed))
            assert matcher.consume_token(tokens[-1])
        if matcher.is_stopped():
            num_whole += 1
            answer = vocabulary(has_marks)[0].decode(tokens).removesuffix("<|end-of-text|>")
            read = read_whole(FORMAT_OF_NAME[name].parser(TOOLS), answer)
            assert read.calls
            assert not read.content
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in read.calls)
    assert num_whole


@pytest.mark.parametrize("has_marks", [True, False])
def test_a_thought_comes_first(has_marks):
    special = vocabulary(has_marks)[2]
    marks = ReasoningMarks()
    for name in ("hermes", "glm"):
        call = single_call(name)
        inside = with_thought(written(name, "required", True, has_marks), marks, True, special)
        for text in (f"Hm, {{.\n</think>\n\n{call}", f"</think>{call}"):
            assert accepted(inside, text, has_marks) == (len(text), True)
        assert not accepted(inside, "Hm, <tool", has_marks)[1]
        outside = with_thought(written(name, "required", True, has_marks), marks, False, special)
        for text in (call, f"<think>Hm</think>\n{call}"):
            assert accepted(outside, text, has_marks) == (len(text), True)
        assert accepted(outside, f"Hm</think>{call}", has_marks)[0] == 0


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("name", ["hermes", "glm", "deepseek_v31", "llama3_json"])
def test_a_thought_comes_before_free_text_too(name, has_marks):
    call, trigger = single_call(name), BEFORE_CALLS.get(name, "<tool_call>")
    for starts_inside, begin in ((True, ""), (False, "\n<think>\n")):
        free = written(name, "auto", True, has_marks)
        grammar = with_thought(free, ReasoningMarks(), starts_inside, vocabulary(has_marks)[2])
        for text in (f"{begin}Hm.</think>\n\nHi", f"{begin}Hm.</think>\n\n{call}"):
            assert accepted(grammar, text, has_marks) == (len(text), True), text
        assert accepted(grammar, call, has_marks)[1] is not starts_inside
        if not has_marks:  # in a thought a mark is text
            text = f"{begin}Hm {trigger} x</think>\n\nHi"
            assert accepted(grammar, text, has_marks) == (len(text), True)
        wrong = f"{begin}Hm.</think>\n\n{call.replace('celsius', 'kelvin')}"
        assert accepted(grammar, wrong, has_marks)[0] < len(wrong)


def nested(index: int) -> dict:
    """A schema that no other index has."""
    return {**NESTED, "properties": {**NESTED["properties"], f"flag_{index}": {"enum": [f"on_{index}", "off"]}}}


NESTED = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["a", "b", "c"]},
                    "at": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["kind"],
                "additionalProperties": False,
            },
        },
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "query": {"type": "string"},
    },
    "required": ["items"],
    "additionalProperties": False,
}


@functools.cache
def toy_grammars_with_marks() -> Grammars:
    tokenizer = vocabulary(True)[0]
    return Grammars(lambda: tokenizer, len(tokenizer), [tokenizer.eos_token_id], "toy")


@pytest.mark.parametrize("name", ["hermes", "glm", "qwen3_coder"])  # the others have the rules of hermes
def test_128_tools_compile_within_the_limits(name):
    special = vocabulary(True)[2]
    tools = [Tool(f"tool_number_{index}", f"Tool {index}", nested(index)) for index in range(128)]
    text = FORMAT_OF_NAME[name].grammar(tools, "auto", True, special)
    matcher = toy_grammars_with_marks().matcher(LLMatcher.grammar_from_lark(text))
    assert len(matcher.allowed_tokens())


TYPED = ("glm", "qwen3_coder")


def with_definitions(num_properties: int, padding: int) -> dict:
    """A schema in which every property has a definition of its own, and one of them leads to another."""
    definitions = {
        f"d{index}": {"type": "object", "properties": {"p" * padding: {"type": "integer"}}}
        for index in range(num_properties)
    }
    definitions["d0"]["properties"]["next"] = {"$ref": "#/$defs/last"}
    definitions["last"] = {"type": "object", "properties": {"deep": {"type": "boolean"}}}
    properties = {f"a{index}": {"$ref": f"#/$defs/d{index}"} for index in range(num_properties)}
    return {"type": "object", "properties": properties, "$defs": definitions}


@pytest.mark.parametrize("name", TYPED)
def test_a_property_takes_the_definitions_that_it_leads_to_along_and_no_others(name):
    schema = with_definitions(100, 100)
    grammar = written(name, "required", tools=[Tool("f", "", schema)])
    assert len(grammar) < 4 * len(json.dumps(schema))
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": with_definitions(2, 1)["$defs"]}
    grammar = written(name, "required", tools=[Tool("f", "", schema)])
    assert "deep" in grammar
    assert '"d1"' not in grammar
    assert matcher_of(grammar, True)


@each
def test_tools_that_make_too_long_a_grammar_are_refused(name):
    """Each property leads to all definitions, so that every rule has all of them."""
    definitions = {f"d{index}": {"type": "object", "properties": {"p" * 100: {}}} for index in range(1000)}
    definitions["all"] = {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/{key}"} for key in definitions]}}
    properties = {f"a{index}": {"$ref": "#/$defs/all", "minItems": index} for index in range(100)}
    if name not in TYPED:  # which take the schema as it is
        definitions["long"] = {"enum": ["x" * 200_000]}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    with pytest.raises(InvalidRequest, match="tools is a grammar of more than 262144 characters"):
        written(name, "required", tools=[Tool("f", "", schema)])


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("required", [5, "city", None, [["city"], 5]])
def test_a_list_of_required_arguments_that_is_none_requires_nothing(name, required):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": required}
    grammar = written(name, "required", tools=[Tool("f", "", schema)])
    assert "[argument_0_0]" in grammar


@each
def test_a_clients_text_is_never_a_special_token(name):
    """It would end the answer, or a call."""
    properties = {"<|end|>": {"enum": ["</tool_call>", "<|call|>"]}}
    tool = Tool("[ARGS]", "", {"type": "object", "properties": properties, "required": ["<|end|>"]})
    special = vocabulary(True)[2]
    free = {"<|end|>", "<|call|>", "[ARGS]", "</tool_call>"}

    def id_of(text):
        return special(text) if text in free else None

    alone = FORMAT_OF_NAME[name].grammar([tool], "required", False, id_of)
    other = Tool("f", "", {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]})
    usual = FORMAT_OF_NAME[name].grammar([other], "required", False, id_of)
    assert alone.count("<[") == usual.count("<[")


def test_types_of_schemas_that_lead_to_themselves():
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 16 + [{"type": "integer"}]}, "b": {"$ref": "#/$defs/b"}}}
    assert types_of({"$ref": "#/$defs/a"}, root) == {"integer"}
    assert types_of({"$ref": "#/$defs/b"}, root) == ALL_TYPES
    deep = {f"c{index}": {"anyOf": [{"$ref": f"#/$defs/c{index + 1}"}] * 16} for index in range(12)}
    assert types_of({"$ref": "#/$defs/c0"}, {"$defs": {**deep, "c12": {"type": "null"}}}) == {"null"}


def test_keywords_that_no_grammar_follows():
    """Refused for a strict tool, otherwise ignored."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    loose, strict = (Tool("f", "", schema, strict=strict) for strict in (False, True))
    for tool, is_refused in ((loose, False), (strict, True)):
        grammar = written("hermes", "required", tools=[tool])
        matcher = LLMatcher(vocabulary(True)[1], LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS)
        assert matcher.is_error() is is_refused


def test_a_choice_needs_its_tool():
    with pytest.raises(ValueError, match="'get_whether', which is not among the tools"):
        written("hermes", NamedFunction("get_whether"))
    with pytest.raises(ValueError, match="there are no tools"):
        written("hermes", "required", tools=[])
    odd = Tool("auto", "", TIME.parameters)
    text = '<tool_call>\n{"name": "auto", "arguments": {}}\n</tool_call>'
    grammar = written("hermes", NamedFunction("auto"), tools=[odd, WEATHER])
    assert accepted(grammar, text, True) == (len(text), True)

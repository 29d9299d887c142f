"""Calls that chat templates write, read again by the format that they show."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from actors.grammar.limits import LIMITS
from cluster.text.tools.detect import NAMES, format_of, takes_tools
from cluster.text.tools.hermes import Hermes
from cluster.text.tools.hermes_prompt import plain_messages, system_text
from cluster.text.tools.history import HistoryNeeds, template_messages
from paceline_testing.tool_calls import ARGUMENTS, FORMAT_OF_NAME, TOOLS, read_whole
from paceline_testing.toy_tokenizer import toy_tokenizer

# The parts of templates that matter here, as the models' documentation describes them: how the assistant's calls are
# written. The answer is what stands between <answer> and </answer>.
HEAD = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
LOOP = HEAD + (
    "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.name }}: {{ m.content }}]"
    "{% elif m.tool_calls %}<answer>{{ m.content }}CALLS</answer>{% else %}{{ m.role }}: {{ m.content }}{% endif %}"
    "{% endfor %}"
)
EACH = "{% for call in m.tool_calls %}{% set f = call.function %}ONE{% endfor %}"
CALLS = {
    "hermes": EACH.replace(
        "ONE",
        '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    ),
    "llama3_json": EACH.replace(
        "ONE", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{{ \'; \' if not loop.last }}'
    ),
    "mistral": "[TOOL_CALLS] ["
    + EACH.replace("ONE", '{{ (f | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ \', \' if not loop.last }}')
    + "]",
    "mistral_args": EACH.replace("ONE", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + EACH.replace(
        "ONE", "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}"
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + EACH.replace(
        "ONE",
        "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + f.name + '\n```json\n' + f.arguments "
        "+ '\n```<｜tool▁call▁end｜>' }}\n",
    )
    + "<｜tool▁calls▁end｜>",
    "glm": EACH.replace(
        "ONE",
        "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
    ),
    "qwen3_coder": EACH.replace(
        "ONE",
        "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v | tojson if v is mapping else v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    ),
    "harmony": EACH.replace(
        "ONE",
        "{{ '<|start|>assistant' if not loop.first }}<|channel|>commentary to=functions.{{ f.name }} "
        "<|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>",
    ),
}
MESSAGES = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
            },
            {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


def template_of(name: str) -> str:
    calls = CALLS[name]
    mark = '<|start_header_id|>{"name": "f", "parameters": {}}' if name == "llama3_json" else ""
    return mark + LOOP.replace("CALLS", calls)


def rendered(template: str, messages, **arguments) -> str:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)


@pytest.mark.parametrize("name", sorted(FORMAT_OF_NAME))
def test_the_parser_reads_what_the_template_writes(name):
    template = template_of(name)
    found = format_of(template)
    assert found is not None
    assert found.name == name
    others = {each.name for each in FORMAT_OF_NAME.values() if each.detects(template)} - {name}
    assert others == ({"hermes"} if name in ("glm", "qwen3_coder") else set())
    assert takes_tools(template)
    messages = template_messages(MESSAGES, found.history_needs)
    text = rendered(template, messages, tools=[tool.openai_form for tool in TOOLS])
    read = read_whole(found.parser(TOOLS), text.partition("<answer>")[2].partition("</answer>")[0])
    assert [called for called, _ in read.calls] == ["get_weather", "get_time"]
    assert [json.loads(arguments) for _, arguments in read.calls] == [ARGUMENTS, {}]
    assert not read.content
    assert text.endswith("[get_time: noon][get_weather: rain]")


def test_a_wanted_format_needs_no_template():
    assert format_of("", "glm") is FORMAT_OF_NAME["glm"]
    assert format_of("") is None
    with pytest.raises(ValueError, match=f"tool_parser is 'x'; it must be auto or one of {', '.join(NAMES)}"):
        format_of("", "x")


def test_a_template_without_tools_gets_them_as_text():
    template = toy_tokenizer().chat_template
    assert not takes_tools(template)
    assert not takes_tools("You have no tools.{% for m in messages %}{{ m }}{% endfor %}")
    messages = plain_messages(template_messages(MESSAGES, HistoryNeeds()), TOOLS)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    text = rendered(template, messages, add_generation_prompt=True)
    assert system_text(TOOLS) in text
    assert all(tool.name in system_text(TOOLS) for tool in TOOLS)
    assert text.index("noon") < text.index("rain") < text.rindex("</tool_response>")
    read = read_whole(Hermes().parser(TOOLS), messages[2]["content"])
    assert [json.loads(arguments) for _, arguments in read.calls] == [ARGUMENTS, {}]
    grammar = LLMatcher.grammar_from_lark(Hermes().grammar(TOOLS, "required", True, lambda text: None))
    tokenizer = toy_tokenizer()
    vocabulary = LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id)
    matcher = LLMatcher(vocabulary, grammar, limits=LIMITS)
    tokens = vocabulary.tokenize_str(messages[2]["content"])
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert plain_messages(own, TOOLS)[0]["content"].startswith("Be brief.\n\n")
    assert plain_messages(own, ()) == own

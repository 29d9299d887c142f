"""Messages with calls, as templates take them, and what is refused."""

from __future__ import annotations

import pytest

from actors.errors import InvalidRequest
from cluster.text.tools.history import HistoryNeeds, template_messages


def conversation(arguments='{"a": 1}', call_id="call_1", result_of="call_1"):
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": result_of},
        {"role": "assistant", "content": "Two.", "tool_calls": None},
    ]


def test_arguments_become_an_object_and_results_get_a_name():
    user, call, result, last = template_messages(conversation(), HistoryNeeds())
    assert user == {"role": "user", "content": "Hi"}
    assert call["content"] == ""
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert result == {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "f"}
    assert last == {"role": "assistant", "content": "Two."}


def test_what_templates_of_some_formats_need():
    messages = template_messages(conversation(), HistoryNeeds(arguments_as_text=True))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    messages = template_messages(conversation(), HistoryNeeds(short_ids=True))
    short = messages[1]["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert messages[2]["tool_call_id"] == short
    kept = template_messages(conversation(call_id="abcdef123", result_of="abcdef123"), HistoryNeeds(short_ids=True))
    assert kept[2]["tool_call_id"] == "abcdef123"


@pytest.mark.parametrize(
    "arguments",
    [
        "{",
        "[1]",
        "1",
        "{} {}",
        '{"a": NaN}',
        '{"a":' * 60_000,
        '{"a":' * 250 + "1" + "}" * 250,
        '{"a": "\\ud800"}',
        '{"a\n": "\\udc00"}',
        "x" * 100,
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments):
    with pytest.raises(InvalidRequest) as caught:
        template_messages(conversation(arguments), HistoryNeeds())
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"
    assert str(caught.value.value).startswith(f"a string of {len(arguments)} character")


def test_control_characters_in_strings_are_taken_as_models_write_them():
    (_, call, _, _) = template_messages(conversation('{"a": "1\n2"}\n'), HistoryNeeds())
    assert call["tool_calls"][0]["function"]["arguments"] == {"a": "1\n2"}


def test_arguments_of_too_many_lists_are_refused_and_brackets_in_text_are_not():
    with pytest.raises(InvalidRequest, match="is 65538 lists and objects; at most 65536 are read"):
        template_messages(conversation('{"a": [' + "[]," * 65_536 + "1]}"), HistoryNeeds())
    template_messages(conversation('{"a": "' + "[" * 70_000 + '"}'), HistoryNeeds())


def test_arguments_that_are_an_object_and_a_field_of_another_name():
    calls = conversation({"a": "é"})
    for needs, written in ((HistoryNeeds(), {"a": "é"}), (HistoryNeeds(arguments_as_text=True), '{"a": "é"}')):
        assert template_messages(calls, needs)[1]["tool_calls"][0]["function"]["arguments"] == written
    calls = conversation("{")
    calls[1]["tool_calls"][0]["field"] = "input[1].arguments"
    with pytest.raises(InvalidRequest, match=r"input\[1\]\.arguments is a string of 1 character"):
        template_messages(calls, HistoryNeeds())


def test_a_result_needs_its_call():
    with pytest.raises(InvalidRequest, match=r"messages\[2\]\.tool_call_id is 'call_2'; it must be the id of"):
        template_messages(conversation(result_of="call_2"), HistoryNeeds())
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.tool_call_id is null"):
        template_messages([{"role": "tool", "content": "2"}], HistoryNeeds())

"""Thoughts before answers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text.tools.answer_parser import AnswerParser
from cluster.text.tools.reasoning import ReasoningMarks, ReasoningSplitter, ends_inside_thought, reasoning_marks
from paceline_testing.tool_calls import FORMAT_OF_NAME, TOOLS, TWO_CALLS, read_in_pieces, read_whole


@pytest.mark.parametrize(
    ("starts_inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Hm.\n\nSo.", "Yes."),
        (False, "\n<think>Hm.</think>Yes.\n", "Hm.", "Yes.\n"),
        (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (False, "Yes, <think> is a mark.", "", "Yes, <think> is a mark."),
        (False, "<thin", "", "<thin"),
        (False, "<think>Hm.\n", "Hm.\n", ""),
        (True, "\nHm.\n</think>\nYes.", "Hm.", "Yes."),
        (True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (True, "Hm.</thin", "Hm.</thin", ""),
        (True, "</think>Yes.", "", "Yes."),
        (True, "<</think>Yes.", "<", "Yes."),
        (True, "", "", ""),
    ],
)
def test_splits(starts_inside, text, reasoning, content):
    read = read_whole(ReasoningSplitter(starts_inside=starts_inside), text)
    assert (read.reasoning, read.content) == (reasoning, content)
    assert read_in_pieces(ReasoningSplitter(starts_inside=starts_inside), text) == read


PARTS = ["<think>", "</think>", "\n", "<", "think", "</", ">", " ", "a", "<tool_call>", TWO_CALLS["hermes"], "é"]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.booleans(), st.lists(st.integers(0, 60)))
def test_a_split_of_the_text_changes_nothing(text, starts_inside, cuts):
    def parser():
        return AnswerParser(ReasoningSplitter(starts_inside=starts_inside), FORMAT_OF_NAME["hermes"].parser(TOOLS))

    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    read = read_whole(parser(), text)
    assert read_in_pieces(parser(), [text[a:b] for a, b in itertools.pairwise(bounds)]) == read
    assert read_in_pieces(parser(), text) == read


def test_calls_in_a_thought_are_part_of_it():
    parser = AnswerParser(ReasoningSplitter(), FORMAT_OF_NAME["hermes"].parser(TOOLS))
    calls = TWO_CALLS["hermes"]
    read = read_whole(parser, f"<think>{calls}</think>\n\n{calls}")
    assert (read.reasoning, read.content, len(read.calls)) == (calls, "", 2)
    assert read_whole(AnswerParser(None, None), calls).content == calls


def test_marks_of_templates():
    assert reasoning_marks("{{ content.split('</think>') }}") == ReasoningMarks("<think>", "</think>")
    assert reasoning_marks("[THINK]{{ thought }}[/THINK]") == ReasoningMarks("[THINK]", "[/THINK]")
    assert reasoning_marks("{{ content }}") is None
    marks = ReasoningMarks()
    assert ends_inside_thought("<|im_start|>assistant\n<think>\n", marks)
    assert not ends_inside_thought("user: What is <think>?\nassistant:\n", marks)
    assert not ends_inside_thought("assistant:\n<think>\n\n</think>\n\n", marks)

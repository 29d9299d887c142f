"""Streams of a server: whatever they are cut into, every chunk is read, and nothing else is taken for one."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.errors import Unavailable
from cluster.cli.answer_stream import StreamEvent, message_of_refusal, read_events, read_events_async


def texts_of(events: list[StreamEvent]) -> list[str]:
    return [choice.new_text for event in events for choice in event.choices]


@example(["a\u2028b", "a\u2029b", "a\x85b"], 7)  # breaks of lines to others, not to a stream of events
@given(st.lists(st.text(min_size=1)), st.integers(1, 50))
@pytest.mark.parametrize(
    "end", [b"data: [DONE]\n\ndata: left alone\n\n", b": a comment\r\nevent: end", b"data: [DONE]"]
)
async def test_texts_come_back_whatever_the_bytes_are_cut_into(end, texts, size):
    events = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    stream = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + end
    chunks = [stream[begin : begin + size] for begin in range(0, len(stream), size)]

    async def awaited():
        for chunk in chunks:
            yield chunk

    assert texts_of(list(read_events(chunks))) == texts
    assert texts_of([event async for event in read_events_async(awaited())]) == texts


def test_a_last_line_without_its_end_is_read():
    (event,) = read_events([b'data:{"choices":[{"text":"a"}]}'])
    assert texts_of([event]) == ["a"]


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"7",
        b"",
        b'"\xff"',
        b'{"choices": [{"text": "\xff"}]}',
        b'{"choices": [{"text": "\\ud800"}]}',
        b'{"more": ' + b"[" * 100_000,
        b'{"error": {"code": 3}}',
        b'{"usage": {"prompt_tokens": -1}}',
        b'{"usage": {"completion_tokens": 1' + b"0" * 400 + b"}}",
        b'{"choices": ["x"]}',
        b'{"choices": [{"delta": "x"}]}',
        b'{"speculation": {"rounds": 1e9, "accepted_tokens": [1]}}',
    ],
)
def test_what_is_no_chunk_is_one_error(data):
    with pytest.raises(Unavailable, match="the stream held what is not a chunk: "):
        list(read_events([b"data: " + data + b"\n\n"]))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no room\\u001b[2J", "code": 3}}', "no room\ufffd[2J"),
        (b'{"error": "no model"}', "no model"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"bad gateway\x07\xff", "bad gateway\ufffd\ufffd"),
        (b'{"error": ' + b"[" * 100_000, '{"error": ' + "[" * 290),
    ],
)
def test_a_refusal_is_told_in_the_servers_words(body, message):
    assert message_of_refusal(body) == message

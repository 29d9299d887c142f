"""Detokeniser, stop strings and tokenising, against what decoding the whole text at once gives."""

import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from actors.errors import InvalidRequest
from cluster.text.chat_format import NO_TOOLS, ToolUse
from cluster.text.detokenizer import Detokenizer
from cluster.text.stop_strings import StopStrings
from cluster.text.text_codec import ChatMessage, TextCodec
from cluster.text.tools.tool import Tool
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
CODEC = TextCodec(TOKENIZER, "toy")
TEXTS = st.text(st.sampled_from("ab the fox Ж漢字😀👨‍👩‍👧é\n"), max_size=40)


def byte_fallback_decode():
    """Llama's kind of decoder: <0xE2> tokens, a run of them is decoded as a whole; leading space dropped."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁hello", "world", "▁fox"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: tokenizer.decode(list(ids))


BYTE_FALLBACK = byte_fallback_decode()


def split(items, cuts):
    borders = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[start:end] for start, end in pairwise(borders)]


@given(TEXTS, TEXTS, st.lists(st.integers(0, 200)))
def test_pieces_join_to_the_text_for_any_split_of_the_tokens(prompt, text, cuts):
    token_ids = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    context = TOKENIZER.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
    detokenizer = Detokenizer(CODEC.decode, context)
    pieces = [detokenizer.push(chunk) for chunk in split(token_ids, cuts)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(st.sampled_from("Ж漢😀é"), max_size=20), st.lists(st.integers(0, 200)))
def test_runs_of_byte_fallback_tokens_come_out_whole(text, cuts):
    token_ids = [258, *text.encode(), 257, *text.encode()]
    detokenizer = Detokenizer(BYTE_FALLBACK, [257])
    pieces = [detokenizer.push(chunk) for chunk in split(token_ids, cuts)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == f"world{text} hello{text}"


def test_the_space_before_the_first_word_survives_a_decoder_that_strips_it():
    assert Detokenizer(BYTE_FALLBACK, [258]).push([259]) == " fox"
    assert Detokenizer(BYTE_FALLBACK).push([259]) == "fox"


def test_a_character_is_held_until_it_is_whole():
    detokenizer = Detokenizer(CODEC.decode)
    token_ids = TOKENIZER.backend_tokenizer.encode("a😀").ids
    assert len(token_ids) == 5
    assert [detokenizer.push([token]) for token in token_ids] == ["a", "", "", "", "😀"]


def test_half_a_character_at_the_end_is_dropped():
    detokenizer = Detokenizer(CODEC.decode)
    assert detokenizer.push(TOKENIZER.backend_tokenizer.encode("ab😀").ids[:-1]) == "ab"
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_do_not_hold_the_text_for_ever():
    continuation = TOKENIZER.backend_tokenizer.encode("Ж").ids[1]
    detokenizer = Detokenizer(CODEC.decode)
    shown = "".join(detokenizer.push([continuation]) for _ in range(100))
    assert len(shown) > 50
    assert detokenizer.push(TOKENIZER.backend_tokenizer.encode("ok").ids).endswith("ok")


@pytest.mark.parametrize("add_special_tokens", [False, True])
async def test_a_long_text_has_the_tokens_of_a_short_one(add_special_tokens):
    text = "the fox <|end|> Ж漢字😀é\n " * 400
    wanted = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    found = await CODEC.encode_prompt(text, "prompt", add_special_tokens=add_special_tokens)
    assert found.token_ids.tolist() == wanted


def test_special_tokens_show_nothing():
    detokenizer = Detokenizer(CODEC.decode)
    start, hello = TOKENIZER.convert_tokens_to_ids("<|start|>"), TOKENIZER.backend_tokenizer.encode("hello").ids
    assert detokenizer.push([start]) == ""
    assert detokenizer.push(hello) == "hello"
    assert detokenizer.push([start, *hello]) == "hello"


def test_work_per_token_does_not_grow_with_the_text():
    decoded = []
    detokenizer = Detokenizer(lambda ids: decoded.append(len(ids)) or CODEC.decode(ids))
    for token in TOKENIZER.backend_tokenizer.encode("the quick Ж fox " * 500).ids:
        detokenizer.push([token])
    assert max(decoded) <= 8


def naive_cut(text, stops):
    """The text up to the stop string that ends first, checked character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 100)),
)
@settings(max_examples=300)
def test_stop_strings_cut_at_the_same_place_for_any_split(text, stops, cuts):
    matcher = StopStrings(stops)
    shown = ""
    matched = False
    for chunk in split(text, cuts):
        part, matched = matcher.push(chunk)
        shown += part
        assert naive_cut(text, stops)[0].startswith(shown)
        if matched:
            break
    if not matched:
        shown += matcher.flush()
    assert (shown, matched) == naive_cut(text, stops)
    assert (matcher.matched in stops) == matched
    assert text[len(shown) :].startswith(matcher.matched or "")


def test_text_is_held_only_while_it_may_become_a_stop_string():
    matcher = StopStrings(["END"])
    assert matcher.push("an E") == ("an ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("X of E") == ("ENX of ", False)
    assert matcher.push("ND tail") == ("", True)


def test_without_stop_strings_nothing_is_held():
    assert StopStrings([]).push("anything") == ("anything", False)


def test_a_long_stop_string_costs_time_proportional_to_the_text():
    matcher = StopStrings(["a" * 256 + "b"])
    started = time.perf_counter()
    for _ in range(2000):
        matcher.push("a")
    assert time.perf_counter() - started < 2.0


async def test_a_chat_is_rendered_with_the_template_and_its_special_tokens():
    token_ids = (await CODEC.encode_prompt((ChatMessage("user", "hello"),), "messages")).token_ids
    text = TOKENIZER.backend_tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
    assert text == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


async def test_a_long_prompt_has_the_same_tokens_as_its_parts():
    text = "the quick brown fox " * 1000
    short = (await CODEC.encode_prompt("the quick brown fox ", "prompt")).token_ids
    assert (await CODEC.encode_prompt(text, "prompt")).token_ids.tolist()[: len(short) - 1] == short.tolist()[:-1]


class ObservedCodec(TextCodec):
    """Notes which thread encodes."""

    encoded_by = None

    def _encode(self, text, add_special_tokens):
        self.encoded_by = threading.current_thread()
        return super()._encode(text, add_special_tokens)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "tools", "on_the_loop"),
    [
        (ChatMessage("user", "hello"), NO_TOOLS, True),
        (ChatMessage("user", "hello" * 1000), NO_TOOLS, False),
        (ChatMessage("assistant", "", reasoning_content="hello" * 1000), NO_TOOLS, False),
        (ChatMessage("user", "", tool_call_id="a" * 5000), NO_TOOLS, False),
        (ChatMessage("assistant", "", (CALL,)), NO_TOOLS, False),
        (ChatMessage("user", "hello"), ToolUse((Tool("f", "what it does" * 1000, {}),)), False),
    ],
    ids=["short", "content", "reasoning", "id", "calls", "tools"],
)
async def test_what_may_be_long_is_encoded_in_a_thread(message, tools, on_the_loop):
    codec = ObservedCodec(TOKENIZER, "toy")
    await codec.encode_prompt((message,), "messages", tool_use=tools)
    assert (codec.encoded_by is threading.current_thread()) == on_the_loop


async def test_a_model_without_chat_template_says_so():
    codec = TextCodec(toy_tokenizer(with_chat_template=False), "plain")
    with pytest.raises(InvalidRequest, match="'plain' has no chat template"):
        await codec.encode_prompt((ChatMessage("user", "hello"),), "messages")


async def test_messages_that_the_template_refuses_are_the_callers_fault():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await TextCodec(tokenizer, "strict").encode_prompt((ChatMessage("user", "hello"),), "messages")

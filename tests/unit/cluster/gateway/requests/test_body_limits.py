"""Bodies that would hold up all other calls are refused by their shape, and texts by their length.

Covers `cluster.gateway.requests.body_limits` and `cluster.text.token_bound`, and measures a served gateway under such
calls.
"""

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel

from actors.errors import InvalidRequest
from cluster.gateway.errors import BodyTooLarge
from cluster.gateway.requests.body_limits import (
    MAX_CONTAINERS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STRINGS,
    check_lengths,
    check_shape,
)
from cluster.text.token_bound import token_bound
from paceline_testing.toy_tokenizer import toy_tokenizer

LENGTH = 4096
SIZE = 3_900_000
LONGEST_GAP_S = 0.5  # on a busy machine; a quiet one has less than half of it
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)
)


@given(JSON)
def test_small_bodies_pass_whatever_they_hold(value):
    check_shape(json.dumps(value).encode(), 16)


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt":"' + b",[{}]:" * 600_000 + b'"}',
        b'{"prompt":"' + b'\\"' * 1_900_000 + b'"}',
        b'{"prompt":"' + b"\\\\" * 1_900_000 + b'"}',
        json.dumps({"prompt": [[5] * LENGTH] * 32}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "a, [b]"}] * MAX_MESSAGES}).encode(),
    ],
    ids=["brackets in a text", "quotes in a text", "backslashes", "token ids", "messages"],
)
def test_large_calls_pass(data):
    check_shape(data, LENGTH)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b'{"a":[' + b'"",' * (MAX_STRINGS + 2) + b'""]}', "strings"),
        (b'{"a":[' + b'"\\\\",' * (2 * MAX_STRINGS + 4) + b'""]}', "strings"),
        (b'{"a":[' + b"{}," * MAX_CONTAINERS + b"1]}", "lists and objects"),
        (b'{"a":"x",' + b"[" * (MAX_CONTAINERS + 1), "lists and objects"),
        (b'{"a":[' + b"1," * 1_900_000 + b"1]}", "values"),
        (b'"' + b'\\"' * 100_000 + b"\\" + b"," * 500_000 + b"[" * 100_000, None),
    ],
    ids=["strings", "backslash strings", "objects", "depth", "values", "damaged"],
)
def test_more_values_than_a_call_needs_are_refused(data, what):
    started = time.perf_counter()
    if what is None:  # what is wrong is for the parser to say
        check_shape(data, LENGTH)
    else:
        with pytest.raises(BodyTooLarge, match=f"{what}; at most"):
            check_shape(data, LENGTH)
    assert time.perf_counter() - started < 0.2


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"messages": [{}] * (LENGTH + 1)}, "messages", "is 4097 messages; at most 4096 messages are taken"),
        ({"prompt": ["a"] * 33}, "prompt", "is 33 prompts; at most 32 in one call"),
        ({"prompt": [[5]] * 33}, "prompt", "is 33 prompts"),
        (
            {"messages": [{"content": [{}] * 1100}] * 2},
            "messages",
            "is 2200 content parts and tool calls; at most 2048",
        ),
        ({"messages": [{"tool_calls": [{}] * 1100}] * 2}, "messages", "is 2200 content parts"),
        ({"messages": [{"content": [{"content": [{}] * 1100}] * 2}]}, "messages", "is 2202 content parts"),
        ({"input": [{"output": [{}] * 1100, "summary": [{}] * 1100}]}, "input", "is 2200 content parts"),
        ({"prompt": [5] * LENGTH}, "prompt", "is 4096 tokens; there is room for at most 4096"),
        ({str(number): 1 for number in range(257)}, "body", "is 257 fields"),
    ],
)
def test_lists_that_cannot_be_served_are_refused_before_they_are_checked(fields, field, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_lengths(fields, LENGTH)
    assert caught.value.field == field


# --- the number of tokens, from the length ---------------------------------------------------------------------------

TOY = toy_tokenizer().backend_tokenizer


@given(st.text(max_size=200) | st.lists(st.sampled_from([*TOY.get_vocab(), " "]), max_size=40).map("".join))
def test_no_text_has_less_tokens_than_the_bound(text):
    assert token_bound(TOY).least_tokens(text) <= len(TOY.encode(text).ids)


@given(st.lists(st.sampled_from(["‹｜tool▁calls▁begin｜>", "｜é｜", "a", "Ж", " "]), max_size=40).map("".join))
def test_added_tokens_of_long_characters_are_one_token_each(text):
    tokenizer = Tokenizer.from_str(TOY.to_str())
    tokenizer.add_special_tokens(["‹｜tool▁calls▁begin｜>", "｜é｜"])
    assert token_bound(tokenizer).least_tokens(text) <= len(tokenizer.encode(text).ids)


def test_the_bound_grows_with_the_text():
    longest = max(map(len, TOY.get_vocab()))
    assert token_bound(TOY).least_tokens("é" * 500) == -(-1000 // longest)


def test_bytes_that_the_vocabulary_lacks_do_not_count():
    tokenizer = Tokenizer.from_str(TOY.to_str())
    vocab = {token: place for place, token in enumerate(sorted({*ByteLevel.alphabet()} - {"a"}))}
    tokenizer.model = models.BPE(vocab, [])
    least = token_bound(tokenizer).least_tokens
    assert least("a" * 990) == len(tokenizer.encode("a" * 990).ids) == 0
    assert least("a" * 990 + "b" * 90) == 10  # the longest token is <|start|>


def changed(change):
    tokenizer = Tokenizer.from_str(TOY.to_str())
    change(tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        changed(lambda one: setattr(one, "normalizer", normalizers.Strip())),
        changed(lambda one: setattr(one, "normalizer", normalizers.Replace("aaa", "a"))),
        changed(lambda one: one.add_special_tokens([AddedToken("<x>", rstrip=True)])),
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.BPE({"a": 0}, [])),
    ],
    ids=["python", "strip", "replace", "spaces", "unknown words", "no bytes"],
)
def test_there_is_no_bound_where_a_token_may_stand_for_any_text(tokenizer):
    assert token_bound(tokenizer) is None


# --- a served gateway ------------------------------------------------------------------------------------------------


def called(arguments, num_calls=1):
    """A chat's message with calls."""
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call] * num_calls}


def used(given, num_blocks=1):
    """A message with tool_use blocks."""
    block = {"type": "tool_use", "id": "a", "name": "f", "input": given}
    return {"role": "assistant", "content": [block] * num_blocks}


LONG = json.dumps({"a": "x" * SIZE})
NEWLINES = json.dumps({"a": "\n" * (SIZE // 4)})  # as text in a body, each has four characters
LISTS = '{"a":[' + "[]," * (SIZE // 3 - 10) + "1]}"

ATTACKS = {
    "a long prompt": ("completions", {"prompt": "hello world, " * (SIZE // 13)}),
    "a long word": ("completions", {"prompt": "x" * SIZE}),
    "empty messages": ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 100_000}),
    "a long prediction": (
        "completions",
        {"prompt": "x", "max_tokens": 2, "prediction": {"type": "content", "content": "a b " * 970_000}},
    ),
    "a long message": ("chat/completions", {"messages": [{"role": "user", "content": "hello " * (SIZE // 6)}]}),
    "nested prompts": ("completions", {"prompt": [[1]] * 900_000}),
    "token ids": ("completions", {"prompt": [7] * 1_900_000}),
    "unknown fields": ("completions", {f"field {number}": 1 for number in range(60_000)}),
    "a long thought": (
        "chat/completions",
        {
            "messages": [{"role": "assistant", "content": "", "reasoning_content": "hello " * (SIZE // 6)}],
            "max_tokens": 2,
        },
    ),
    "long arguments": ("chat/completions", {"messages": [called(LONG)]}),
    "arguments of newlines": ("chat/completions", {"messages": [called(NEWLINES)]}),
    "arguments of lists": ("chat/completions", {"messages": [called(LISTS)]}),
    "many calls": ("chat/completions", {"messages": [called("{}", 16_000)]}),
    "as many calls as are taken": ("chat/completions", {"messages": [called("{}", MAX_PARTS)]}),
    "calls in many messages": ("chat/completions", {"messages": [called("{}", 30)] * 480}),
    "arguments of an item": (
        "responses",
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": NEWLINES}]},
    ),
    "text parts": (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 30_000}]},
    ),
    "thoughts": (
        "responses",
        {
            "input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a" * 8_000}]}] * 460,
            "max_output_tokens": 2,
        },
    ),
    "input of newlines": ("messages", {"max_tokens": 2, "messages": [used({"a": "\n" * (SIZE // 2)})]}),
    "as many tool_use blocks as are taken": ("messages", {"max_tokens": 2, "messages": [used({}, MAX_PARTS)]}),
    "tool_use blocks": ("messages", {"max_tokens": 2, "messages": [used({}, 14_000)]}),
    "counting": ("messages/count_tokens", {"messages": [used({"a": "hello " * (SIZE // 6)})]}),
}


SERVER = """
import sys
from cluster.interpreter import put_event_loop_first
from paceline_testing.echo_gateway import echo_gateway
with echo_gateway("toy") as (address, _, router):
    router.delay_s = 0.02
    put_event_loop_first()  # as the deployment does
    print(address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def address():
    """Address of a gateway in a process of its own, so that only it can hold up its calls."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=PIPE, stdout=PIPE, text=True) as server:
        yield f"http://{server.stdout.readline().strip()}"
        server.stdin.close()  # it ends


def post(address, path, body):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{address}/v1/{path}", content=body, headers=headers, timeout=60).status_code


async def longest_gap_s(address, attack):
    """What the attack returns, and the longest answer time of a probe and gap in a stream while it lasts."""
    gaps = {"probe": 0.0, "stream": 0.0}
    done = asyncio.Event()

    async def probe(client):
        while not done.is_set():
            started = time.monotonic()
            assert (await client.get("/livez")).status_code == 200
            gaps["probe"] = max(gaps["probe"], time.monotonic() - started)
            await asyncio.sleep(0.005)

    async def stream(client):
        body = {"prompt": "the quick brown fox", "max_tokens": 200, "stream": True}
        while not done.is_set():
            async with client.stream("POST", "/v1/completions", json=body) as response:
                last = time.monotonic()
                async for _ in response.aiter_bytes():
                    now = time.monotonic()
                    gaps["stream"] = max(gaps["stream"], now - last)
                    last = now
                    if done.is_set():
                        break

    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        watchers = [asyncio.create_task(watch(client)) for watch in (probe, stream)]
        await asyncio.sleep(0.1)
        statuses = await attack()
        done.set()
        await asyncio.gather(*watchers)
    return statuses, gaps


@pytest.mark.parametrize("name", ATTACKS)
async def test_no_call_holds_up_others(address, name):
    path, fields = ATTACKS[name]
    body = json.dumps(fields, separators=(",", ":")).encode()
    assert len(body) < 4 * 1024 * 1024
    threads = ThreadPoolExecutor(4)

    async def attack():
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(threads, post, address, path, body) for _ in range(4)))

    longest = []
    for _ in range(3):  # another process may have held up one of them
        statuses, gaps = await longest_gap_s(address, attack)
        assert set(statuses) <= {200, 400, 413}
        longest.append(max(gaps.values()))
        if longest[-1] < LONGEST_GAP_S:
            break
    threads.shutdown()
    assert min(longest) < LONGEST_GAP_S, longest

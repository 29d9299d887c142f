"""What may become public: spans that look sensitive, phrases that are the same everywhere, and the verdict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cache_service.errors import FormatError
from cache_service.promotion.phrases import MAX_PHRASE_TOKENS, decode_phrase, encode_phrase, phrases_of
from cache_service.promotion.promotion_policy import (
    NEVER,
    Candidate,
    PromotionPolicy,
    batch_time,
    noise_of,
    support_of,
    verdict,
)
from cache_service.promotion.sensitive_spans import SensitiveSpans

BYTES = SensitiveSpans(lambda token: bytes([token]))


def hidden(text, rules=BYTES):
    """The text with # for every blocked byte."""
    data = text.encode()
    return "".join("#" if block else chr(byte) for byte, block in zip(data, rules(data), strict=True))


@pytest.mark.parametrize(
    "marked",
    [
        "call [030 1234567] now",
        "card [4111-1111-1111-1111].",
        "born [24.12.1999], he",
        "in 3 steps, 12 parts, 999 ways",
        "write to [jo.doe+x@example.org] please",
        "see [https://example.org/a?b=c] for more",
        "see [WWW.example.org] for",
        "the @ sign, a@, @b and @property",
        "key [sk-abcdefgh12] ok",
        "[AKIAIOSFODNN7EXAMPLE] is",
        "hash [9f86d081884c7d659a2f] ok",
        f"a [{'x' * 40}] word",
        "an internationalisation of words",
        "[password: hunter]",
        "The [API key is abc] ok",
        "mac [0a:1b:2c:3d:4e:5f] ok",
        "cd [/home/joe/x.txt] ok",
        "def f(self, x): return std::abs(x)",
        "",
    ],
)
def test_what_looks_sensitive_is_blocked_and_the_rest_is_not(marked):
    begin, end = marked.find("["), marked.find("]") - 1
    text = marked.replace("[", "").replace("]", "")
    assert hidden(text) == (text[:begin] + "#" * (end - begin) + text[end:] if begin >= 0 else text)


def test_digits_of_other_scripts_are_digits():
    assert set(hidden("٠١٢٣٤")) == {"#"}
    assert "#" not in hidden("größer als naïve 日本語のテキスト")


def test_a_token_that_touches_a_span_is_blocked_whole():
    table = [b"my num", b"ber 1", b"23", b"45 is", b" secret", b"\xe6\x97", b"\xa5", b""]
    rules = SensitiveSpans([*table, b" and"].__getitem__)
    assert rules([0, 1, 2, 3, 4]).tolist() == [False, True, True, True, False]
    assert rules([0, 5, 6, 8, 4]).tolist() == [False] * 5, "halves of a character are no fault"
    assert rules([0, 7, 4]).tolist() == [False, True, False], "nobody can tell what it stands for"
    assert rules([2]).tolist() == [False], "which is why the whole text is judged"


def test_runs_of_rare_tokens_and_forbidden_texts_are_blocked():
    rules = SensitiveSpans(lambda token: bytes([token]), lambda token: chr(token) in "xyz", 3, ("Project Hush",))
    assert hidden("ax yxyz zz xyz", rules) == "ax #### zz ###"
    assert hidden("of project hush.", rules) == "of ############."


@given(st.lists(st.integers(0, 255), max_size=200))
def test_any_tokens_can_be_judged(tokens):
    assert BYTES(tokens).shape == (len(tokens),)


@given(st.text("0123456789 -abc@.:/", max_size=80), st.text("0123456789 -abc@.:/", max_size=20))
def test_no_phrase_of_allowed_tokens_has_four_digits_in_a_row(before, after):
    data = np.frombuffer((before + "12345" + after).encode(), np.uint8)
    blocked = BYTES(data)
    for phrase in phrases_of(data, blocked, every=1):
        assert not any(bytes(phrase[i : i + 4]).isdigit() for i in range(len(phrase) - 3))


def test_texts_that_share_a_passage_share_its_phrases():
    rng = np.random.default_rng(0)
    passage = rng.integers(0, 40_000, 200)
    free = np.zeros(1000, bool)
    own = set(phrases_of(passage, free[:200]))
    assert 10 < len(own) < 200
    for _ in range(5):
        text = np.concatenate([rng.integers(0, 40_000, rng.integers(1, 50)), passage, rng.integers(0, 40_000, 20)])
        assert own <= set(phrases_of(text, free[: len(text)]))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=80), st.integers(1, 4))
def test_phrases_are_parts_of_the_text_without_blocked_tokens(text, every):
    tokens = np.array([token for token, _ in text], np.int64)
    blocked = np.array([block for _, block in text], bool)
    allowed = set()
    for begin in range(len(text)):
        for length in (4, 8, 16):
            if begin + length <= len(text) and not blocked[begin : begin + length].any():
                allowed.add(tuple(tokens[begin : begin + length].tolist()))
    found = phrases_of(tokens, blocked, every=every)
    assert set(found) <= allowed
    assert len(set(found)) == len(found)
    if every == 1:
        assert set(found) == allowed
    assert phrases_of(tokens, blocked, every=1, max_phrases=3) == phrases_of(tokens, blocked, every=1)[:3]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=MAX_PHRASE_TOKENS))
def test_phrases_as_bytes(tokens):
    assert decode_phrase(encode_phrase(tuple(tokens))) == tuple(tokens)


@pytest.mark.parametrize("data", [b"", b"abc", b"\0" * 4 * (MAX_PHRASE_TOKENS + 1), b"\xff" * 4])
def test_bytes_that_are_no_phrase_are_refused(data):
    with pytest.raises(FormatError, match="phrase"):
        decode_phrase(data)


POLICY = PromotionPolicy(min_tenants=5, min_age_s=100, window_s=1000)


def candidate(num_tenants=5, reached_s=0, length=4, seen_s=500.0):
    return Candidate(tuple(range(length)), reached_s, {bytes([row]): seen_s for row in range(num_tenants)})


@pytest.mark.parametrize(
    ("found", "support", "noise", "is_sensitive", "batch_s", "wanted"),
    [
        (candidate(), 5, 0.0, False, 100, "public"),
        (candidate(), 5, 0.0, False, 99, "wait"),
        (candidate(), 5, -0.5, False, 100, "wait"),
        (candidate(), 4, 50.0, False, 100, "drop"),
        (candidate(), 5, 0.0, True, 100, "drop"),
        (candidate(length=16), 5, 0.0, False, 100, "public"),
        (candidate(length=17), 5, 0.0, False, 100, "drop"),
        (candidate(length=0), 5, 0.0, False, 100, "drop"),
    ],
)
def test_verdicts(found, support, noise, is_sensitive, batch_s, wanted):
    assert verdict(found, support, noise, is_sensitive, POLICY, batch_s) == wanted


def test_support_is_of_tenants_that_take_part_and_have_said_it_lately():
    found = candidate(8)
    assert (support_of(found, {}, 1500, 1000), support_of(found, {}, 1501, 1000)) == (8, 0)
    assert support_of(found, {b"\0": NEVER, b"\1": 499.0, b"\2": 500.0}, 1000, 1000) == 6


def test_batches_are_released_at_fixed_times():
    assert [batch_time(now_s, PromotionPolicy(release_every_s=60)) for now_s in (0, 59.9, 60, 179)] == [0, 0, 60, 120]


def test_noise_is_laplacian_and_always_the_same_for_a_phrase():
    drawn = np.array([noise_of(b"secret", number.to_bytes(4, "little"), 0.5) for number in range(20_000)])
    assert noise_of(b"secret", b"\1\0\0\0", 0.5) == drawn[1]
    assert noise_of(b"another", b"\1\0\0\0", 0.5) != drawn[1]
    assert noise_of(b"secret", b"\1\0\0\0", None) == 0.0
    # Of scale b = 2: mean 0, mean distance b, half of it within b ln 2.
    assert abs(drawn.mean()) < 0.1
    assert abs(np.abs(drawn).mean() - 2.0) < 0.1
    assert abs((np.abs(drawn) < 2.0 * np.log(2)).mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("field", "value"), [("min_tenants", 4), ("max_tokens", 17), ("noise_epsilon", 0.0), ("release_every_s", 0)]
)
def test_no_policy_goes_below_the_floor(field, value):
    with pytest.raises(ValidationError, match=field):
        PromotionPolicy(**{field: value})

"""A sequence in two vocabularies: its text survives, work stays at its end, and guesses come back as target tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.draft_model.retokenized_sequence import RetokenizedSequence
from actors.draft_tree import DraftTree
from actors.messages import SamplingParams, SequenceStart
from actors.models.token_text import TokenText
from paceline_testing.integrity import check_integrity
from paceline_testing.other_vocabularies import TEXT, changing_tokenizer, merging_tokenizer, sentence_piece_tokenizer
from paceline_testing.tiny_models import make_byte_tokenizer

VOCABULARIES = {
    "bytes": TokenText(make_byte_tokenizer(), "bytes"),
    "merges": TokenText(merging_tokenizer(), "merges"),
    "shuffled": TokenText(merging_tokenizer(290, seed=4), "shuffled"),
    "sentence piece": TokenText(sentence_piece_tokenizer(), "sentence piece"),
    "changing": TokenText(changing_tokenizer(), "changing"),
}
PAIRS = [
    ("bytes", "merges"),
    ("merges", "bytes"),
    ("merges", "shuffled"),
    ("sentence piece", "merges"),
    ("merges", "sentence piece"),
    ("sentence piece", "sentence piece"),
]
few = settings(max_examples=40)
pairs = pytest.mark.parametrize(("target", "draft"), PAIRS)
texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(list(TEXT))), max_size=60)


def sequence(target: str, draft: str) -> RetokenizedSequence:
    begin = SequenceStart(SamplingParams(seed=1), 4)
    return RetokenizedSequence(begin, VOCABULARIES[target], VOCABULARIES[draft])


def spelled(name: str, token_ids: list[int]) -> bytes:
    return b"".join(map(VOCABULARIES[name].bytes_of, token_ids))


def text_of(name: str, token_ids: list[int]) -> bytes:
    """Without what the tokenizer puts before every text."""
    prefix = VOCABULARIES[name].prefix
    body = spelled(name, token_ids[len(prefix) :] if tuple(token_ids[: len(prefix)]) == prefix else token_ids)
    return body.removeprefix(b" ") if name == "sentence piece" else body


def chain(token_ids: list[int], confidence: list[float]) -> DraftTree:
    parents = np.arange(-1, len(token_ids) - 1, dtype=np.int32)
    return DraftTree(np.array(token_ids, np.int32), parents, np.array(confidence, np.float32))


def in_parts(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    return [token_ids[first:last] for first, last in pairwise(places)]


@few
@given(texts, st.lists(st.integers(0, 10**6), max_size=12))
@pytest.mark.parametrize(("target", "draft"), [*PAIRS, ("merges", "changing")])
def test_whatever_the_parts_the_draft_side_has_the_text_of_the_whole_characters(target, draft, text, cuts):
    retokenized = sequence(target, draft)
    token_ids = VOCABULARIES[target].encode(text)
    taken: list[int] = []
    for part in in_parts(token_ids, cuts):
        retokenized.extend(part)
        taken += part
        committed = text_of(target, taken)
        open_bytes = retokenized.open_bytes
        assert committed.endswith(open_bytes)
        assert retokenized.text.encode() == committed[: len(committed) - len(open_bytes)]
        check_integrity(retokenized)
        if draft != "changing":
            assert text_of(draft, retokenized.draft_ids).decode() == retokenized.text
    assert (retokenized.num_tokens, retokenized.open_bytes) == (len(token_ids), b"")


@few
@given(st.lists(st.integers(0, 330), max_size=40), st.lists(st.integers(0, 10**6), max_size=8))
@example([301, 259], [1])  # one that spells nothing comes alone, before the beginning of the text
@pairs
def test_bytes_that_are_no_character_are_replaced_and_the_rest_stays(target, draft, token_ids, cuts):
    retokenized = sequence(target, draft)
    token_ids = [token for token in token_ids if VOCABULARIES[target].special_content(token) is None]
    for part in in_parts(token_ids, cuts):
        retokenized.extend(part)
    committed = text_of(target, token_ids)
    whole = committed[: len(committed) - len(retokenized.open_bytes)]
    assert retokenized.text == whole.decode(errors="replace")
    assert text_of(draft, retokenized.draft_ids).decode() == retokenized.text
    check_integrity(retokenized)


@few
@given(texts, st.lists(st.integers(0, 10**6), max_size=12))
@pairs
def test_who_follows_what_is_new_ends_with_the_same_tokens(target, draft, text, cuts):
    """A receiver that appends while `num_sent` tokens stand and begins anew where it is 0 never goes wrong."""
    retokenized = sequence(target, draft)
    received: list[int] = []
    for part in in_parts(VOCABULARIES[target].encode(text), cuts):
        retokenized.extend(part)
        if retokenized.num_sent == 0:
            received = []
        assert len(received) == retokenized.num_sent
        received += retokenized.draft_ids[retokenized.num_sent :]
        retokenized.num_sent = len(received)
        assert received == retokenized.draft_ids


class _Watched(TokenText):
    """Notes how much text it is given."""

    longest = 0

    def encode(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        return super().encode(text)


@pytest.mark.parametrize("text", [TEXT * 12, "東京の天気" * 200, "x" * 3000, " \n" * 1500])
def test_a_long_sequence_is_only_spelled_anew_at_its_end(text):
    draft = _Watched(merging_tokenizer(), "watched")
    retokenized = RetokenizedSequence(SequenceStart(SamplingParams(seed=1), 4), VOCABULARIES["bytes"], draft)
    token_ids = VOCABULARIES["bytes"].encode(text)
    retokenized.extend(token_ids[:-300])
    draft.longest = 0
    for first in range(len(token_ids) - 300, len(token_ids), 3):
        retokenized.extend(token_ids[first : first + 3])
    assert 0 < draft.longest < 600
    assert spelled("merges", retokenized.draft_ids) == text.encode()


def test_a_tokenizer_that_changes_the_text_is_not_spelled_anew_for_ever():
    draft = _Watched(changing_tokenizer(), "watched")
    retokenized = RetokenizedSequence(SequenceStart(SamplingParams(seed=1), 4), VOCABULARIES["bytes"], draft)
    for token in VOCABULARIES["bytes"].encode("cafe\u0301 " * 200):
        retokenized.extend([token])
        check_integrity(retokenized)
    assert draft.longest < 600


def test_new_text_at_the_end_gives_the_spelling_of_the_whole_text():
    retokenized = sequence("bytes", "merges")
    for token in VOCABULARIES["bytes"].encode(TEXT * 3):
        retokenized.extend([token])
    assert retokenized.draft_ids == VOCABULARIES["merges"].encode(TEXT * 3)


@few
@given(st.text(st.sampled_from(list(TEXT)), min_size=2, max_size=60), st.integers(0, 10**6), st.data())
@pairs
def test_a_guess_of_the_text_to_come_is_the_targets_tokens_of_it(target, draft, text, cut, data):
    token_ids = VOCABULARIES[target].encode(text)
    committed = token_ids[: 1 + cut % (len(token_ids) - 1)] if len(token_ids) > 1 else []
    retokenized = sequence(target, draft)
    retokenized.extend(committed)
    coming = text_of(target, token_ids)[len(retokenized.text.encode()) :]
    guess = VOCABULARIES[draft].encode_behind(retokenized.text[-20:], coming.decode())
    assert guess is not None
    shares = data.draw(st.lists(st.floats(0.0, 1.0, width=32), min_size=len(guess), max_size=len(guess)))
    confidence = np.cumprod(np.array(shares, np.float32)).astype(np.float32)
    tree = retokenized.realign(chain(guess, confidence.tolist()), 100)
    assert tree is not None
    drafted = spelled(target, tree.token_ids.tolist())
    wanted = spelled(target, token_ids[len(committed) :])
    assert wanted.startswith(drafted) or not committed
    assert drafted
    assert tree.parents.tolist() == list(range(-1, len(tree.token_ids) - 1))
    assert ((tree.confidence >= 0.0) & (tree.confidence <= 1.0)).all()
    assert (np.diff(tree.confidence) <= 0.0).all()
    assert tree.confidence[-1] >= confidence[-1] * 0.999


@pytest.mark.parametrize(("target", "draft"), [("merges", "bytes"), ("bytes", "merges"), ("merges", "shuffled")])
def test_token_for_token_the_chain_is_what_the_target_would_write(target, draft):
    text = TEXT[:160]
    token_ids = VOCABULARIES[target].encode(text)
    for count in range(1, len(token_ids) - 1):
        retokenized = sequence(target, draft)
        retokenized.extend(token_ids[:count])
        guess = VOCABULARIES[draft].encode(text[len(retokenized.text) :])
        tree = retokenized.realign(chain(guess, [1.0] * len(guess)), 1000)
        assert tree.token_ids.tolist() == token_ids[count : count + len(tree.token_ids)]
        assert len(tree.token_ids) >= len(token_ids) - count - 1  # the last one may be the beginning of a longer one
        assert len(retokenized.realign(chain(guess, [1.0] * len(guess)), 2).token_ids) <= 2


def test_confidence_falls_along_a_token_and_is_the_guesss_own_at_its_end():
    retokenized = sequence("bytes", "merges")
    retokenized.extend(VOCABULARIES["bytes"].encode("sat on"))
    guess = VOCABULARIES["merges"].encode(" the cat")
    assert [len(VOCABULARIES["merges"].bytes_of(token)) for token in guess] == [4, 4]
    tree = retokenized.realign(chain(guess, [0.16, 0.04]), 100)
    assert spelled("bytes", tree.token_ids.tolist()) == b" the ca"
    assert tree.confidence[:4] == pytest.approx([0.16**0.25, 0.16**0.5, 0.16**0.75, 0.16])
    assert tree.confidence[5] == pytest.approx(0.08)


def test_inside_a_character_only_a_guess_that_goes_on_with_it_counts():
    target, emoji = VOCABULARIES["bytes"], "\U0001f642"
    retokenized = sequence("bytes", "merges")
    retokenized.extend(target.encode("done " + emoji)[:-2])
    assert (retokenized.text, retokenized.open_bytes) == ("done ", emoji.encode()[:2])
    guess = VOCABULARIES["merges"].encode(emoji + " and")
    tree = retokenized.realign(chain(guess, [0.9] * len(guess)), 100)
    assert emoji.encode()[:2] + spelled("bytes", tree.token_ids.tolist()) == (emoji + " an").encode()
    other = VOCABULARIES["merges"].encode("and")
    assert retokenized.realign(chain(other, [0.9] * len(other)), 100) is None
    half = [token for token in guess if VOCABULARIES["merges"].bytes_of(token)[0] >= 0x80][:1]
    if len(VOCABULARIES["merges"].bytes_of(half[0])) < 4:
        assert retokenized.realign(chain(half, [0.9]), 100) is None


def test_a_special_token_of_the_draft_model_alone_ends_the_guess_there():
    merges = VOCABULARIES["merges"]
    end = merges.encode("</s>")
    assert len(end) == 1
    retokenized = sequence("bytes", "merges")
    retokenized.extend(VOCABULARIES["bytes"].encode("sat on"))
    words = merges.encode(" the")
    tree = retokenized.realign(chain([*words, *end, *words], [0.9] * (2 * len(words) + 1)), 100)
    assert spelled("bytes", tree.token_ids.tolist()) == b" the"  # whole: nothing can follow that would change it
    assert retokenized.realign(chain(end, [0.9]), 100) is None
    shared = sequence("sentence piece", "merges")  # which knows </s> too
    shared.extend(VOCABULARIES["sentence piece"].encode("the cat"))
    tree = shared.realign(chain(end, [0.9]), 100)
    assert tree.token_ids.tolist() == VOCABULARIES["sentence piece"].encode("</s>")[-1:]


def test_each_side_has_its_own_beginning():
    retokenized = sequence("sentence piece", "merges")
    retokenized.extend([1, *VOCABULARIES["sentence piece"].encode("the cat")])
    assert (retokenized.text, retokenized.draft_ids) == ("the cat", VOCABULARIES["merges"].encode("the cat"))
    other = sequence("merges", "sentence piece")
    other.extend(VOCABULARIES["merges"].encode("the cat"))
    assert other.draft_ids == [1, *VOCABULARIES["sentence piece"].encode("the cat")]

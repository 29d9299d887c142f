"""Tokens as bytes, text as tokens, and which vocabularies are the same."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from actors.errors import ModelError
from actors.models.source import VOCAB_MAP_FILE, ModelSource
from actors.models.token_text import TokenText, has_own_vocabulary
from paceline_testing.other_vocabularies import (
    TEXT,
    changing_tokenizer,
    merging_tokenizer,
    save_renumbered_pair,
    sentence_piece_tokenizer,
)
from paceline_testing.tiny_models import make_byte_tokenizer, save_tiny_model

TOKENIZERS = {
    "bytes": make_byte_tokenizer(),
    "merges": merging_tokenizer(),
    "shuffled": merging_tokenizer(300, seed=4),
    "sentence piece": sentence_piece_tokenizer(),
}
TEXTS = {name: TokenText(tokenizer, name) for name, tokenizer in TOKENIZERS.items()}
# SentencePiece's own sign for a space, U+2581, cannot be spelled in its vocabularies.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
texts = st.text(st.one_of(characters, st.sampled_from(list(TEXT))), max_size=40)


def spelled(text: TokenText, token_ids: list[int]) -> bytes:
    return b"".join(map(text.bytes_of, token_ids))


@given(texts)
@pytest.mark.parametrize("name", TEXTS)
def test_the_tokens_of_a_text_have_its_bytes(name, text):
    token_ids = TEXTS[name].encode_start(text)
    assert token_ids is not None
    space = b" " if name == "sentence piece" and text else b""
    assert spelled(TEXTS[name], token_ids) in (text.encode(), space + text.encode())


@given(texts, texts, st.data())
@pytest.mark.parametrize("name", TEXTS)
def test_behind_other_text_and_from_inside_a_character_nothing_is_added_or_lost(name, before, text, data):
    skip = data.draw(st.integers(0, len(text[0].encode()) - 1)) if text else 0
    token_ids = TEXTS[name].encode_behind(before, text, skip)
    assert token_ids is not None
    assert spelled(TEXTS[name], token_ids) == text.encode()[skip:]


def test_what_stands_before_decides_how_a_text_is_spelled():
    merges = TEXTS["merges"]
    whole = merges.encode("the cat and the dog")
    first = len(merges.encode("the cat"))
    assert merges.encode_behind("the cat", " and the dog") == whole[first:]
    pieces = TEXTS["sentence piece"]
    assert spelled(pieces, pieces.encode("cat")) == b" cat"
    assert spelled(pieces, pieces.encode_behind("the", "cat")) == b"cat"
    assert pieces.encode_behind("the", " cat") == pieces.encode("cat")


def test_special_tokens_are_their_content_and_unknown_ids_are_nothing():
    text = TEXTS["bytes"]
    assert (text.bytes_of(256), text.special_content(256)) == (b"<|end|>", "<|end|>")
    assert text.special_content(65) is None
    assert text.has_special("<|pad|>")
    assert not text.has_special("a")
    assert (text.bytes_of(-1), text.bytes_of(len(text))) == (b"", b"")
    assert text.encode("a<|end|>")[1:] == [256]
    assert TEXTS["sentence piece"].prefix == (1,)
    assert text.prefix == ()


def test_a_tokenizer_that_changes_the_text_says_so():
    text = TokenText(changing_tokenizer(), "changing")
    assert text.encode_behind("", "cafe\u0301") is None
    assert text.encode_start("cafe\u0301") is None
    assert text.encode_behind("", "caf\u00e9") is not None


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_a_tokenizer_without_bytes_is_refused(decoder):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ModelError, match=r"model 'words': its tokenizer is neither byte-level nor of SentencePiece"):
        TokenText(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "words")


def source(path) -> ModelSource:
    return ModelSource(str(path), path.name, path)


def test_vocabularies_are_compared_and_not_names(tmp_path):
    target, renumbered = save_renumbered_pair(tmp_path)
    assert has_own_vocabulary(source(renumbered), source(target))
    merges = save_tiny_model(tmp_path / "merges", tokenizer=TOKENIZERS["merges"], layers=1, hidden_size=16)
    assert has_own_vocabulary(source(merges), source(target))
    same = save_tiny_model(tmp_path / "same", seed=9, layers=1, hidden_size=16)
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{{ messages }}"  # the files differ, the vocabulary does not
    tokenizer.save_pretrained(same)
    assert source(same).tokenizer_fingerprint() != source(target).tokenizer_fingerprint()
    assert not has_own_vocabulary(source(same), source(target))
    assert not has_own_vocabulary(source(target), source(target))


def test_few_output_rows_or_no_tokenizer_are_the_targets_vocabulary(tmp_path):
    target = save_tiny_model(tmp_path / "target", layers=1, hidden_size=16)
    few = shutil.copytree(target, tmp_path / "few")
    save_file({"token_ids": torch.arange(0, 259, 2)}, few / VOCAB_MAP_FILE)
    assert not has_own_vocabulary(source(few), source(target))
    for path in few.glob("tokenizer*"):
        path.unlink()
    assert not has_own_vocabulary(source(few), source(target))


def test_special_tokens_of_one_side_only_matter_where_they_cannot_be_told_apart(tmp_path):
    target = save_tiny_model(tmp_path / "target", layers=1, hidden_size=16)
    more = make_byte_tokenizer()
    more.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    taught = save_tiny_model(tmp_path / "taught", tokenizer=more, layers=1, hidden_size=16)
    assert not has_own_vocabulary(source(taught), source(target))
    assert has_own_vocabulary(source(target), source(taught))  # it has no row for <|tool|>
    roomy = save_tiny_model(tmp_path / "roomy", layers=1, hidden_size=16, vocab_size=264)
    assert not has_own_vocabulary(source(roomy), source(taught))

"""Tokenizers of several kinds and numberings, and a model behind another numbering of its own tokens."""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from actors.models.source import VOCAB_MAP_FILE
from paceline_testing.tiny_models import make_byte_tokenizer, save_tiny_model

TEXT = (
    "the cat and the dog sat on the mat, and then the other cat went to the market in the rain. "
    "A model says what comes next; another model thinks that it knows better. "
    "def add(first, second):\n    return first + second\n\n"
    "Größe und Übung, naïve café, 東京の天気, привет мир, 🙂👍🏽 done. "
)


def merging_tokenizer(vocab_size: int = 320, seed: int | None = None) -> PreTrainedTokenizerBase:
    """Byte-level with merges learnt from TEXT, words apart as in GPT-2's, and the end `</s>`.

    vocab_size: ids at most, at least 257. seed: numbers the tokens in a random order; None: `</s>`, bytes, merges.
    """
    learning = Tokenizer(models.BPE())
    learning.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learning.train_from_iterator([TEXT], trainer)
    learnt = json.loads(learning.to_str())["model"]
    tokens = sorted(learnt["vocab"], key=learnt["vocab"].__getitem__)
    if seed is not None:
        random.Random(seed).shuffle(tokens)
    merges = [(left, right) for left, right in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentence_piece_tokenizer() -> PreTrainedTokenizerBase:
    """Like Llama 2's: a space before the text, bytes for unknown characters, a token before every text."""
    words = ["\u2581the", "\u2581cat", "\u2581and", "\u2581", *sorted(set("abcdefghijklmnopqrstuvwxyz.,ABC"))]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    pieces += ["th", "\u2581th", "an", "\u2581an", "ca", "\u2581ca", "he"]
    merges = [("t", "h"), ("a", "n"), ("c", "a"), ("h", "e"), ("\u2581", "th"), ("\u2581", "an"), ("\u2581", "ca")]
    merges += [("\u2581th", "e"), ("\u2581an", "d"), ("\u2581ca", "t")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def changing_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level with merges, but it makes one character of a letter and its accent (NFC), as Qwen's do."""
    tokenizer = merging_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def renumbered_byte_tokenizer(seed: int = 3) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """The byte tokenizer with its bytes in another order, and the new id of each old one."""
    new_ids = list(range(256))
    random.Random(seed).shuffle(new_ids)
    tokenizer = make_byte_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    state["model"]["vocab"] = {token: new_ids[index] for token, index in vocabulary.items()}
    renumbered = Tokenizer.from_str(json.dumps(state))
    fast = PreTrainedTokenizerFast(tokenizer_object=renumbered, eos_token="<|end|>")
    return fast, [*new_ids, *range(256, len(tokenizer))]


def save_renumbered_pair(directory: Path, seed: int = 5) -> tuple[Path, Path]:
    """A tiny target that writes ASCII only, and itself behind other numbers of the same tokens."""
    target = save_tiny_model(directory / "target", "llama", seed, layers=2, hidden_size=48, max_positions=256)
    draft = directory / "draft"
    tokenizer, new_ids = renumbered_byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[torch.tensor(new_ids)] = weight.clone()
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    ascii_ids = make_byte_tokenizer().encode("".join(map(chr, range(32, 127))))
    save_file({"token_ids": torch.tensor(sorted(ascii_ids))}, target / VOCAB_MAP_FILE)
    save_file({"token_ids": torch.tensor(sorted(new_ids[index] for index in ascii_ids))}, draft / VOCAB_MAP_FILE)
    return target, draft

"""A small byte-level tokenizer with a chat template, for tests that want no model files."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun",
    "user assistant system hello world how are you today I am fine thank you",
    "one two three four five six seven eight nine ten stop end of the line",
)
_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def toy_tokenizer(with_chat_template: bool = True) -> Any:
    """A `transformers` tokenizer of about 400 ids. Whatever is not in its corpus (all that is not English) comes out
    as one token per byte, so every other character is spread over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = _TEMPLATE if with_chat_template else None
    return wrapped

"""Time of grammar masks in a round: 8 sequences with trees of 8 nodes, nested schemas, a vocabulary of 128,000 tokens.

python tests/bench/bench_grammar_masks.py [--sequences 8] [--nodes 8] [--rounds 200]
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from actors.draft_tree import DraftTree
from actors.grammar.grammars import Grammars
from actors.grammar.matcher import GrammarMatcher
from cluster.cli.bench.tools_task import TOOLS
from cluster.constraints.structured_outputs import StructuredOutputs

_VOCABULARY = 128_000
_EOS = "<end>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with words, numbers and punctuation as in a trained vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng = random.Random(0)
    pieces = dict.fromkeys(alphabet)
    letters, others = "etaoinshrdlucmfwypvbgkjqxz", '0123456789{}[]",:._-Ċ'
    while len(pieces) < _VOCABULARY - 1:
        source = letters if rng.random() < 0.85 else others
        word = "".join(rng.choice(source) for _ in range(rng.randint(2, 9)))
        pieces[("Ġ" if rng.random() < 0.5 else "") + word] = None
    vocabulary = {piece: index for index, piece in enumerate(pieces)} | {_EOS: len(pieces)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_EOS)


def grown(matcher: GrammarMatcher, nodes: int, rng: random.Random) -> DraftTree:
    """A tree of allowed tokens behind the matcher's place."""
    tokens: list[int] = []
    parents: list[int] = []
    places = [(-1, matcher)]
    while places and len(tokens) < nodes:
        parent, at = places.pop(rng.randrange(len(places)))
        allowed = at.allowed_tokens()
        for token in {int(allowed[rng.randrange(len(allowed))]) for _ in range(2)} if len(allowed) else set():
            if len(tokens) == nodes:
                break
            behind = at.copy()
            if behind.follow([token]):
                places.append((len(tokens), behind))
                tokens.append(token)
                parents.append(parent)
    confidence = np.full(len(tokens), 0.5, np.float32)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), confidence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    grammars = Grammars(make_tokenizer, _VOCABULARY, [_VOCABULARY - 1], "bench")
    rng = random.Random(1)
    texts = [StructuredOutputs(json=schema).grammar_text("schema") for schema in TOOLS.values()]
    matchers = [grammars.matcher(texts[index % len(texts)]) for index in range(arguments.sequences)]
    known: list[float] = []
    unknown: list[float] = []
    for _ in range(arguments.rounds):
        for index, matcher in enumerate(matchers):
            if matcher.is_complete:
                matchers[index] = grammars.matcher(texts[index % len(texts)])
        trees = [grown(matcher, arguments.nodes, rng) for matcher in matchers]
        for times in (known, unknown):  # `grown` has looked at the masks, as a drafter does
            started = time.perf_counter()
            for matcher, tree in zip(matchers, trees, strict=True):
                matcher.masks(tree)
            times.append(time.perf_counter() - started)
            for matcher in matchers:
                matcher.follow([])  # forgets them
        for matcher, tree in zip(matchers, trees, strict=True):
            matcher.follow(tree.token_ids[:1].tolist())
    for name, times in (("known from drafting", known), ("computed", unknown)):
        quarters = np.quantile(np.array(times) * 1e3, (0.25, 0.5, 0.75, 0.95))
        print(f"masks {name}, milliseconds a round, quartiles and 95 %:", *(f"{value:.3f}" for value in quarters))


if __name__ == "__main__":
    main()

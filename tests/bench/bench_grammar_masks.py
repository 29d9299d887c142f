"""Time of grammar masks in a round: 8 sequences with trees of 8 nodes, nested schemas, a vocabulary of 128,000 tokens.
Of the router, which computes them, and of the target, which draws within them: against draws without masks, and against
draws from logits in which all else is set to minus infinity before.

python tests/bench/bench_grammar_masks.py [--sequences 8] [--nodes 8] [--rounds 200]
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from actors.draft_tree import DraftTree
from actors.grammar.grammars import Grammars
from actors.grammar.matcher import GrammarMatcher
from actors.messages import SamplingParams
from actors.sampling.row_masks import RowMasks, mask_rows, row_masks
from actors.sampling.rows import rows_for
from actors.sampling.sampler import sample_tokens
from actors.sampling.sequence_sampling import SequenceSampling
from cluster.cli.bench.tools_task import TOOLS
from cluster.constraints.structured_outputs import StructuredOutputs

Draws = defaultdict[str, list[float]]

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


def draw(logits: torch.Tensor, masks: RowMasks, times: Draws) -> None:
    """Add the times of one round's draws."""
    count = len(logits)
    for way, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        state = SequenceSampling(SamplingParams(1, temperature=temperature), 1)
        rows = rows_for([state], np.zeros(count, np.int64), np.arange(count))
        started = time.perf_counter()
        sample_tokens(logits, rows)
        free = time.perf_counter()
        within = sample_tokens(logits, rows, masks=masks)
        done = time.perf_counter()
        times[f"{way} without masks"].append(free - started)
        times[f"{way} within masks"].append(done - free)
        masked = logits.clone()
        started = time.perf_counter()
        mask_rows(masked, masks)
        at_last = sample_tokens(masked, rows)
        times[f"{way} from masked logits"].append(time.perf_counter() - started)
        assert torch.equal(within, at_last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    grammars = Grammars(make_tokenizer, _VOCABULARY, [_VOCABULARY - 1], "bench")
    rng = random.Random(1)
    texts = [StructuredOutputs(json=schema).grammar_text("schema") for schema in TOOLS.values()]
    matchers = [grammars.matcher(texts[index % len(texts)]) for index in range(arguments.sequences)]
    known: list[float] = []
    unknown: list[float] = []
    draws: Draws = defaultdict(list)
    logits = 3 * torch.randn(arguments.sequences * (1 + arguments.nodes), _VOCABULARY)
    for index_of_round in range(arguments.rounds):
        for index, matcher in enumerate(matchers):
            if matcher.is_complete:
                matchers[index] = grammars.matcher(texts[index % len(texts)])
        trees = [grown(matcher, arguments.nodes, rng) for matcher in matchers]
        if index_of_round % 5 == 0:
            masks = [matcher.masks(tree).masks for matcher, tree in zip(matchers, trees, strict=True)]
            joined = row_masks(masks, [len(mask.index) for mask in masks], _VOCABULARY)
            assert joined is not None
            draw(logits[: len(joined.rows)], joined, draws)
        for times in (known, unknown):  # `grown` has looked at the masks, as a drafter does
            started = time.perf_counter()
            for matcher, tree in zip(matchers, trees, strict=True):
                matcher.masks(tree)
            times.append(time.perf_counter() - started)
            for matcher in matchers:
                matcher.follow([])  # forgets them
        for matcher, tree in zip(matchers, trees, strict=True):
            matcher.follow(tree.token_ids[:1].tolist())
    for name, times in {"masks known from drafting": known, "masks computed": unknown, **draws}.items():
        quarters = np.quantile(np.array(times) * 1e3, (0.25, 0.5, 0.75, 0.95))
        print(f"{name}, milliseconds a round, quartiles and 95 %:", *(f"{value:.3f}" for value in quarters))


if __name__ == "__main__":
    main()

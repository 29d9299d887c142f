"""Tries a model's architecture: a tiny random model of it on the engine against the same model of transformers.

Compared are the logits of prompt chunks, of a draft tree beside another sequence and of a chain, then the tokens of
whole greedy answers with drafts in every round, and of one that begins with cached blocks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.draft_tree import DraftTree
from actors.engine.batch import SequenceRows
from actors.engine.block_pool import BlockPool
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.kv_bytes import kv_bytes_per_token
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.runner import make_runner
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, Verdict, VerifyBatch, VerifyItem
from actors.models.decoder_start import DecoderStart
from actors.models.layer_types import has_recurrent_state
from actors.models.loader import generation_problem
from actors.models.random_model import random_model
from actors.models.tiny_config import VOCAB_SIZE, config_of_type, tiny_config

logger = logging.getLogger(__name__)

Outcome = Literal["exact", "chain only", "refused", "not tried", "wrong"]

_BLOCK_SIZE = 4
_NUM_BLOCKS = 64
_CHUNK = 7  # prompt tokens a round
_OUTPUT = 8  # tokens of an answer
_TOLERANCE = 1e-3  # allowed difference of two logits, relative to the spread of the row
_GREEDY = SamplingParams(seed=1, temperature=0.0)
_Tree = tuple[list[int], list[int]]  # tokens and parents
_Parts = tuple[list[int], list[int]]  # prompt and output


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """outcome "exact": all logits and tokens are those of the unpatched model; "chain only": the same, with draft trees
    that are chains; "refused": the engine does not load the model; "not tried": no tiny model can be made of the
    configuration; "wrong": the engine does not refuse it, and its output differs or it raises an error, which is a bug
    of the engine."""

    outcome: Outcome
    reason: str = ""  # empty: exact or chain only

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome


def check_model_type(model_type: str) -> ModelCheck:
    """model_type: as `config.json` names it. Raises ModelError for one that transformers does not know."""
    from transformers import CONFIG_MAPPING

    try:
        config = config_of_type(model_type)
    except ModelError as error:
        if model_type not in CONFIG_MAPPING:
            raise
        return ModelCheck("not tried", str(error))
    return check_architecture(config)


def check_architecture(config: PretrainedConfig) -> ModelCheck:
    """config: of any size; sizes are cut down, and weights are random."""
    problem = generation_problem(config)
    if problem is not None:
        return ModelCheck("refused", f"{config.model_type} {problem}")
    try:
        model = random_model(tiny_config(config))
        reference = _Reference(model)
        is_finite = bool(reference.logits(_prompts()[0]).isfinite().all())
    except Exception as error:
        return ModelCheck("not tried", _named(error))
    if not is_finite:
        return ModelCheck("not tried", "logits of the unpatched model are not finite")
    try:
        difference = _difference(model, reference)
    except ModelError as error:
        return ModelCheck("refused", str(error))
    except Exception as error:  # what the engine cannot compute it should refuse by name
        logger.debug("the engine fails on %s", config.model_type, exc_info=True)
        return ModelCheck("wrong", _named(error))
    if difference is not None:
        return ModelCheck("wrong", difference)
    return ModelCheck("chain only" if has_recurrent_state(model.config) else "exact")


def _named(error: Exception) -> str:
    """Type and first sentence."""
    sentence = " ".join(str(error).split()).split(". ")[0]
    return f"{type(error).__name__}: {sentence}"


class _Reference:
    """The unpatched model, without a cache: whole texts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model)
        self._start = DecoderStart.of(model) if model.config.is_encoder_decoder else None

    @torch.inference_mode()
    def logits(self, prompt: Sequences[int], output: Sequences[int] = ()) -> torch.Tensor:
        """[rows, vocab]: after each token of prompt and output, or with an encoder after its prompt and each token of
        the output."""
        if self._start is None:
            logits: torch.Tensor = self._model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
            return logits
        logits = self._model(
            input_ids=torch.tensor([prompt]),
            decoder_input_ids=torch.tensor([[self._start.token_id, *output]]),
            use_cache=False,
        ).logits[0]
        return self._start.constrain(logits, is_first=True)

    @torch.inference_mode()
    def logits_of(self, texts: Sequences[_Parts]) -> list[torch.Tensor]:
        """`logits` of each. One forward without an encoder: texts are padded at their ends, where no row sees it."""
        if self._start is not None:
            return [self.logits(*text) for text in texts]
        whole = [[*prompt, *output] for prompt, output in texts]
        longest = max(map(len, whole))
        padded = torch.tensor([text + text[-1:] * (longest - len(text)) for text in whole])
        logits = self._model(input_ids=padded, use_cache=False).logits
        return [rows[: len(text)] for rows, text in zip(logits, whole, strict=True)]

    def answers(self, prompts: Sequences[list[int]], count: int) -> list[list[int]]:
        """`count` tokens of each by greedy decoding."""
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(count):
            logits = self.logits_of(list(zip(prompts, outputs, strict=True)))
            for output, rows in zip(outputs, logits, strict=True):
                output.append(int(rows[-1].argmax()))
        return outputs


def _prompts() -> list[list[int]]:
    """Three of different lengths; the last begins as the first does."""
    rng = np.random.default_rng(0)
    first, second, rest = (rng.integers(3, VOCAB_SIZE - 3, length).tolist() for length in (21, 10, 4))
    return [first, second, first[:18] + rest]


def _difference(model: PreTrainedModel, reference: _Reference) -> str | None:
    """What the engine computes otherwise, or None. Raises ModelError for a model that the engine refuses."""
    tried = copy.deepcopy(model)
    bytes_per_token = kv_bytes_per_token(tried)
    runner = make_runner(tried, _NUM_BLOCKS * _BLOCK_SIZE)
    kv = runner.kv
    if kv.num_slots and kv.num_bytes != (kv.num_slots + 1) * bytes_per_token:
        return (
            f"a token takes {kv.num_bytes / (kv.num_slots + 1):.0f} bytes of the cache; {bytes_per_token} are counted"
        )
    difference = _difference_of_logits(runner, reference)
    if difference is None:
        engine = TargetEngine(model, EngineOptions(_NUM_BLOCKS, _BLOCK_SIZE))
        difference = _difference_of_tokens(engine, reference)
    return difference


def _difference_of_logits(runner: ModelRunner | EncoderDecoderRunner, reference: _Reference) -> str | None:
    """Two sequences in each forward: a part of their prompts, the rest with a tree, and all with a chain."""
    pool = BlockPool(_NUM_BLOCKS, _BLOCK_SIZE, prefix_cache=False)
    texts = [_Text(runner, pool, seq_id, prompt) for seq_id, prompt in enumerate(_prompts()[:2])]
    parents = [-1, 0, 1, 2, 3] if runner.chain_only else [-1, -1, 0, 0, 2]
    rounds: list[tuple[str, int | None, _Tree]] = [
        ("a part of a prompt", _CHUNK, ([], [])),
        ("a draft tree", None, ([5, 9, 6, 7, 8], parents)),
    ]
    for what, count, tree in rounds[_has_encoder(runner) :]:  # an encoder reads a prompt at once
        difference = _difference_of_round(runner, reference, texts, count, tree)
        if difference is not None:
            return f"logits of {what} differ by {difference}"
    texts = [_Text(runner, pool, seq_id, prompt) for seq_id, prompt in enumerate(_prompts()[:2])]
    difference = _difference_of_round(runner, reference, texts, None, ([9, 4, 8], [-1, 0, 1]))
    return None if difference is None else f"logits of a chain differ by {difference}"


def _has_encoder(runner: ModelRunner | EncoderDecoderRunner) -> bool:
    return isinstance(runner, EncoderDecoderRunner)


class _Text:
    """A sequence of the runner, and what it consists of."""

    def __init__(
        self, runner: ModelRunner | EncoderDecoderRunner, pool: BlockPool, seq_id: int, prompt: list[int]
    ) -> None:
        self.prompt = prompt
        self.output = [11, 12] if _has_encoder(runner) else []
        self.sequence = runner.sequence_type(seq_id, SequenceStart(_GREEDY, len(prompt)), pool)
        self.sequence.extend(np.array(prompt + self.output, np.int32))
        self.sequence.reserve(self.sequence.length + 8)

    def first(self, end: int) -> _Parts:
        """The first `end` tokens."""
        text = (self.prompt + self.output)[:end]
        return text[: len(self.prompt)], text[len(self.prompt) :]


def _expected(reference: _Reference, texts: Sequences[_Parts], tree: _Tree) -> list[torch.Tensor]:
    """Logits of each text and after each node: [all rows of the text and the nodes, vocab]."""
    tokens, parents = tree
    leaves = sorted(set(range(len(tokens))) - set(parents))
    paths = [_path(leaf, parents) for leaf in leaves] or [[]]  # a path has the logits of the nodes above its leaf, too
    found = iter(
        reference.logits_of(
            [(prompt, output + [tokens[node] for node in path]) for prompt, output in texts for path in paths]
        )
    )
    expected = []
    for _ in texts:
        of_nodes: dict[int, torch.Tensor] = {}
        for path in paths:
            logits = next(found)
            before = logits[: len(logits) - len(path)]
            of_nodes.update(zip(path, logits[len(before) :], strict=True))
        expected.append(torch.cat([before, *(of_nodes[node][None] for node in range(len(tokens)))]))
    return expected


def _difference_of_round(
    runner: ModelRunner | EncoderDecoderRunner,
    reference: _Reference,
    texts: Sequences[_Text],
    count: int | None,
    tree: _Tree,
) -> str | None:
    """count: tokens to compute of each text; None: all that are left."""
    tokens, parents = (np.array(part, np.int32) for part in tree)
    parts, ends, wanted = [], [], []
    for text in texts:
        sequence = text.sequence
        rows = sequence.num_pending if count is None else min(count, sequence.num_pending)
        parts.append(SequenceRows(sequence, rows, tokens, parents))
        wanted.append((1 if _has_encoder(runner) else rows) + len(tokens))
        ends.append(sequence.num_computed + rows)
    expected = _expected(reference, [text.first(end) for text, end in zip(texts, ends, strict=True)], tree)
    logits = runner.run(parts, wanted)
    for part in parts:
        part.sequence.computed(part.count, tokens, parents)
    return _gap(logits, torch.cat([rows[-count:] for rows, count in zip(expected, wanted, strict=True)]))


def _gap(logits: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The largest difference, relative to the spread of a row, if it is too large."""
    spread = expected[expected.isfinite()].std()
    gap = float(((logits - expected).nan_to_num(0.0, 0.0, 0.0).abs() / spread).max())  # tokens that are never emitted
    is_equal = gap <= _TOLERANCE and torch.equal(logits.isfinite(), expected.isfinite())
    return None if is_equal else f"{gap:.2g} of their spread"


def _path(node: int, parents: Sequences[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _difference_of_tokens(engine: TargetEngine, reference: _Reference) -> str | None:
    """Greedy answers: two at a time, with right and wrong drafts, and one whose prompt begins as an earlier one."""
    first, second, third = zip(_prompts(), reference.answers(_prompts(), _OUTPUT), strict=True)
    asked = [("answers", [first, second]), ("an answer after a cached prefix", [third])]
    if engine.chain_only:  # a state is cached where a prompt has left another one, so the next one finds it
        asked.append(("an answer after a cached state", [third]))
    for what, answers in asked:
        streams = [_Stream(index + 1, *answer, chain_only=engine.chain_only) for index, answer in enumerate(answers)]
        rounds = shared = 0
        while any(stream.is_open for stream in streams):
            open_streams = [stream for stream in streams if stream.is_open]
            result = engine.verify(VerifyBatch(rounds, [stream.item(rounds) for stream in open_streams]))
            for stream, verdict in zip(open_streams, result.verdicts, strict=True):
                stream.take(verdict)
                shared = max(shared, verdict.num_cached)
            rounds += 1
            if rounds > 4 * _OUTPUT:
                return f"{what} do not end"
        engine.verify(VerifyBatch(rounds, [], [stream.seq_id for stream in streams]))
        for stream in streams:
            if stream.output[:_OUTPUT] != stream.truth:
                return f"tokens of {what} differ"
    if not shared and engine.pool.prefix_cache and not engine.model.config.is_encoder_decoder:
        return "no cached prefix was found"
    return None


class _Stream:
    """The router's side of a sequence that knows the right answer and drafts from it, in trees and in chains."""

    def __init__(self, seq_id: int, prompt: list[int], truth: list[int], *, chain_only: bool) -> None:
        self.seq_id = seq_id
        self._chain_only = chain_only
        self.truth = truth
        self.output: list[int] = []
        self._prompt = prompt
        self._num_sent = 0
        self._draft: list[int] = []

    @property
    def is_open(self) -> bool:
        return len(self.output) < len(self.truth)

    def item(self, round_id: int) -> VerifyItem:
        text = self._prompt + self.output
        rest = self.truth[len(self.output) :][:2]
        wrong = [(token + 1) % VOCAB_SIZE for token in rest]
        parents = list(range(-1, len(rest) - 1))
        self._draft = rest
        if round_id % 2 and self._chain_only:  # one row is accepted, the others are not
            self._draft = rest[:1] + wrong
            parents = list(range(-1, len(self._draft) - 1))
        elif round_id % 2:  # the wrong branch first, so that accepted keys and values have to move
            self._draft = wrong + rest
            parents += [-1, *range(len(rest), 2 * len(rest) - 1)]
        draft = DraftTree(
            np.array(self._draft, np.int32), np.array(parents, np.int32), np.zeros(len(parents), np.float32)
        )
        begin = SequenceStart(_GREEDY, len(self._prompt)) if self._num_sent == 0 else None
        delta = SequenceDelta(self.seq_id, self._num_sent, np.array(text[self._num_sent :], np.int32))
        self._num_sent = len(text)
        return VerifyItem(delta, _CHUNK, draft, begin)

    def take(self, verdict: Verdict) -> None:
        if verdict.next_token >= 0:
            self.output += [*(self._draft[node] for node in verdict.path), verdict.next_token]

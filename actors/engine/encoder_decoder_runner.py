"""Runs an encoder-decoder model of transformers (T5, BART, ...): the encoder reads the prompt, the decoder the rest.

Any architecture works whose decoder continues from an `EncoderDecoderCache`. Such decoders take neither position ids
nor masks for trees, so a draft tree is computed as a batch of its paths from the root. A chain is one path and costs
nothing extra. Sequences are computed one after the other, so the logits of one do not depend on the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from actors.draft_tree import depths_of
from actors.engine.batch import SequenceRows
from actors.engine.cpu_kernels.kernel_choice import replace_linears
from actors.engine.kv_cache import KvCache
from actors.engine.sequence import Sequence
from actors.errors import ModelError
from actors.models.decoder_start import DecoderStart

_MAX_COPIED_TOKENS = 16384  # tokens of all paths in one forward: each has a copy of the text before it
_TOLERANCE = 0.05  # allowed difference of two computations of a row, relative to the spread of its logits


class EncoderDecoderSequence(Sequence):
    """The first `begin.num_prompt_tokens` tokens are the encoder's, the others the decoder's.

    Keys and values are in `memory`; the pool's blocks only count them. A prompt token counts for the decoder's keys and
    values of the encoder's output. Nothing is shared, because all of them depend on the whole prompt.
    """

    shares_prefixes = False
    memory: Memory | None = None

    def reuse_prefix(self) -> None:
        """No prefix is shared."""

    def publish(self) -> None:
        """No block is shared."""

    def free(self) -> None:
        super().free()
        self.memory = None


@dataclass(slots=True)
class _Branches:
    """Keys and values of a tree's paths, which are not in the cache yet."""

    paths: list[list[int]]  # the last cached token's successors on each path
    layers: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each, [paths, heads, longest path, head_dim]


@dataclass(slots=True)
class Memory:
    """The encoder's output and the decoder's keys and values of a sequence."""

    encoded: torch.Tensor  # [1, prompt, hidden]
    cache: EncoderDecoderCache
    cached: list[int] = field(default_factory=list)  # the decoder's tokens whose keys and values are in the cache
    branches: _Branches | None = None

    def rewind(self, token_ids: Sequences[int]) -> None:
        """Keep the keys and values of the longest common prefix of `token_ids` and the computed tokens."""
        branches, self.branches = self.branches, None
        same = _common(self.cached, token_ids)
        if same < len(self.cached):
            self.cache.crop(same - len(self.cached))
            del self.cached[same:]
        elif branches is not None:
            rest = token_ids[same:]
            shared = [_common(path, rest) for path in branches.paths]
            best = int(np.argmax(shared))
            for layer, (keys, values) in zip(self.cache.self_attention_cache.layers, branches.layers, strict=True):
                length = shared[best]
                layer.update(keys[best : best + 1, :, :length], values[best : best + 1, :, :length])
            self.cached += rest[: shared[best]]

    def copies(self, count: int) -> EncoderDecoderCache:
        """A copy of the cache for `count` continuations of the text."""
        return EncoderDecoderCache(
            _repeated(self.cache.self_attention_cache, count), _repeated(self.cache.cross_attention_cache, count)
        )


class EncoderDecoderRunner:
    """An encoder-decoder model with the interface of `ModelRunner`."""

    sequence_type = EncoderDecoderSequence
    chain_only = False
    row_steps: tuple[int, ...] = ()  # no padding

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError for a model without a start token, or whose decoder gives other logits for several tokens
        at once than for one after the other."""
        replace_linears(model)
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.kv = KvCache(0, self.device, ())  # no slots: keys and values are kept with their sequences
        self._start = DecoderStart.of(model)
        self._check_decoder()

    @torch.inference_mode()
    def run(self, parts: Sequences[SequenceRows], wanted: Sequences[int]) -> torch.Tensor:
        """As `ModelRunner.run`. Incomplete prompts are not computed: the encoder reads a prompt at once."""
        logits = [self._logits(part) for part, rows in zip(parts, wanted, strict=True) if rows]
        return torch.cat(logits) if logits else torch.empty(0, 0, device=self.device)

    def _logits(self, part: SequenceRows) -> torch.Tensor:
        """[rows, vocab], after the last known token (unless count is 0) and each new node."""
        sequence = part.sequence
        assert isinstance(sequence, EncoderDecoderSequence)
        prompt, output = np.split(sequence.tokens, [max(1, sequence.begin.num_prompt_tokens)])
        if sequence.memory is None:
            sequence.memory = self._encode(prompt)
        known = [self._start.token_id, *output.tolist()]
        paths = _paths(part)
        if len(paths) == 1:
            logits = self._follow(sequence.memory, known, paths[0], part)
        else:
            logits = self._branch(sequence.memory, known, paths, part)
        return self._start.constrain(logits, is_first=part.count > 0 and len(output) == 0)

    def _encode(self, prompt: np.ndarray) -> Memory:
        token_ids = torch.from_numpy(prompt.astype(np.int64)).to(self.device)[None]
        output = self.model.get_encoder()(
            input_ids=token_ids, attention_mask=torch.ones_like(token_ids), return_dict=True
        )
        return Memory(output.last_hidden_state, EncoderDecoderCache(DynamicCache(), DynamicCache()))

    def _follow(self, memory: Memory, known: list[int], path: list[int], part: SequenceRows) -> torch.Tensor:
        """Logits of a chain. Its keys and values stay in the cache."""
        token_ids = known + part.tree_tokens[path].tolist()
        num_wanted = sum(node >= part.first_node for node in path) + (part.count > 0)
        memory.rewind(token_ids[: len(token_ids) - num_wanted])
        logits = self._decode(memory, memory.cache, [token_ids[len(memory.cached) :]])
        memory.cached = token_ids
        return logits[0, -num_wanted:]

    def _branch(self, memory: Memory, known: list[int], paths: list[list[int]], part: SequenceRows) -> torch.Tensor:
        """Logits of a tree with several leaves. Its keys and values are kept beside the cache, until the next tokens
        show which were accepted."""
        memory.rewind(known[:-1])
        if len(known) == 1:  # computes the keys and values of the encoder's output for all paths
            self._decode(memory, memory.cache, [known])
            memory.cache.crop(-1)
        elif len(memory.cached) < len(known) - 1:
            self._decode(memory, memory.cache, [known[len(memory.cached) : -1]])
            memory.cached = known[:-1]
        width = 1 + max(map(len, paths))
        tokens = [[known[-1], *part.tree_tokens[path].tolist()] for path in paths]
        rows: list[torch.Tensor] = []
        layers: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        step = max(1, _MAX_COPIED_TOKENS // (len(known) + width))
        for first in range(0, len(paths), step):
            # Causal: padding at the end of a path changes nothing.
            batch = [path + [path[0]] * (width - len(path)) for path in tokens[first : first + step]]
            cache = memory.copies(len(batch))
            rows.append(self._decode(memory, cache, batch))
            new = slice(len(memory.cached), None)
            layers.append([
                (layer.keys[:, :, new].clone(), layer.values[:, :, new].clone())
                for layer in cache.self_attention_cache.layers
            ])  # fmt: skip
        memory.branches = _Branches(tokens, [
            (torch.cat([keys for keys, _ in group]), torch.cat([values for _, values in group]))
            for group in zip(*layers, strict=True)
        ])  # fmt: skip
        logits = torch.cat(rows)
        depths = depths_of(part.tree_parents)
        where = {node: (row, int(depths[node])) for row, path in enumerate(paths) for node in path}
        chosen = [(0, 0)] if part.count else []
        chosen += [where[node] for node in range(part.first_node, len(part.tree_tokens))]
        return torch.stack([logits[place] for place in chosen])

    def _decode(self, memory: Memory, cache: EncoderDecoderCache, token_ids: list[list[int]]) -> torch.Tensor:
        """Logits [paths, tokens, vocab] of tokens after the cached ones, which are added to the cache."""
        count = len(token_ids)
        encoded = memory.encoded.expand(count, -1, -1)
        output = self.model(
            attention_mask=torch.ones(encoded.shape[:2], dtype=torch.int64, device=self.device),
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            decoder_input_ids=torch.tensor(token_ids, device=self.device),
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits
        return logits

    @torch.inference_mode()
    def _check_decoder(self) -> None:
        start, vocab_size = self._start.token_id, int(self.model.get_output_embeddings().out_features)
        token_ids = [start, *(token % vocab_size for token in (5, 7, 11))]
        prompt = np.asarray(token_ids[1:], dtype=np.int32)
        name = type(self.model).__name__
        try:
            memory = self._encode(prompt)
            at_once = self._decode(memory, memory.cache, [token_ids])[0]
            memory.cached = list(token_ids)
            memory.rewind(token_ids[:2])
            behind = self._decode(memory, memory.copies(2), [token_ids[2:]] * 2)[1]
            memory = self._encode(prompt)
            alone = torch.cat([self._decode(memory, memory.cache, [[token]])[0] for token in token_ids])
        except Exception as error:
            raise ModelError(f"{name} does not decode several tokens at once: {error}") from error
        spread = alone.max() - alone.min()
        for logits, wanted in ((at_once, alone), (behind, alone[2:])):
            if not (logits - wanted).abs().max() <= _TOLERANCE * spread:  # NaN, too
                raise ModelError(f"{name} gives other logits for several tokens at once than for one after the other")


def _paths(part: SequenceRows) -> list[list[int]]:
    """The nodes from the root to each new leaf; one empty path if there are no nodes."""
    parents = part.tree_parents.tolist()
    inner = set(parents)
    leaves = [node for node in range(part.first_node, len(parents)) if node not in inner]
    return [list(_ancestors(leaf, parents))[::-1] for leaf in leaves] or [[]]


def _ancestors(node: int, parents: list[int]) -> Iterator[int]:
    while node >= 0:
        yield node
        node = parents[node]


def _common(first: Sequences[int], second: Sequences[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _repeated(cache: DynamicCache, count: int) -> DynamicCache:
    repeated = DynamicCache()
    for layer in cache.layers:
        twin = copy.copy(layer)
        if layer.is_initialized:
            twin.keys, twin.values = (part.expand(count, -1, -1, -1) for part in (layer.keys, layer.values))
        repeated.layers.append(twin)
    return repeated

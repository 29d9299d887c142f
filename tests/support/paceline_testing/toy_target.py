"""A target without a model: the next token is a hash of the last few. It speaks the whole verify protocol, keeps
paged-memory accounts like a real engine, and refuses whatever the protocol forbids, so it is the oracle of the
router's tests and the stand-in of its benchmarks."""

from collections.abc import Callable, Sequence

import numpy as np

from actors.messages import (
    GenerationRequest,
    MasksSource,
    SequenceDelta,
    Successors,
    Verdict,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
)
from cache_service.splitmix64 import MIX_1, STEP

_MASK = (1 << 64) - 1


class _Sequence:
    __slots__ = ("computed", "num_blocks", "parents", "tokens", "tree")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.computed = 0
        self.num_blocks = 0
        self.tree: list[int] = []  # the last round's draft nodes, whose KV is still there
        self.parents: list[int] = []


class ToyTarget:
    """Deterministic text over `vocab_size` tokens that depends on the last `order` tokens.

    After about every `mean_length` contexts the next token is `eos_token_id` (None: never). `num_cached_tokens` of
    every restarted sequence are found in an imaginary prefix cache. `seconds(rows)` is reported as elapsed time.
    """

    def __init__(
        self,
        vocab_size: int = 97,
        max_model_len: int = 256,
        block_size: int = 4,
        total_blocks: int = 4096,
        *,
        order: int = 2,
        seed: int = 0,
        eos_token_id: int | None = None,
        mean_length: int = 40,
        num_cached_tokens: int = 0,
        seconds: Callable[[int], float] = lambda rows: 0.01 + 0.0001 * rows,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.total_blocks = total_blocks
        self.free_blocks = total_blocks
        self.eos_token_id = eos_token_id
        self._order = order
        self._seed = seed
        self._mean_length = mean_length
        self._num_cached_tokens = num_cached_tokens
        self._seconds = seconds
        self._sequences: dict[int, _Sequence] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def next_token(self, tokens: Sequence[int]) -> int:
        """The target's token after `tokens`."""
        value = self._seed
        for token in tokens[-self._order :]:
            value = ((value ^ token) * STEP + 0x632BE59BD9B4E019) & _MASK
            value ^= value >> 29
        value = (value * MIX_1) & _MASK
        value ^= value >> 32
        if self.eos_token_id is not None and value % self._mean_length == 0:
            return self.eos_token_id
        return (value >> 20) % self.vocab_size

    def text_after(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next tokens that it says, whatever they are."""
        text = list(tokens)
        for _ in range(count):
            text.append(self.next_token(text))
        return text[len(tokens) :]

    def complete(self, request: GenerationRequest) -> tuple[list[int], str]:
        """The one right answer to a request, token by token: (token ids, finish reason)."""
        tokens = [int(token) for token in request.prompt_token_ids]
        end = min(len(tokens) + request.max_new_tokens, self.max_model_len)
        first = len(tokens)
        while len(tokens) < end:
            token = self.next_token(tokens)
            if token in request.stop_token_ids:
                return tokens[first:], "stop"
            tokens.append(token)
        return tokens[first:], "length"

    def lose(self, seq_id: int) -> None:
        """Forget a sequence without telling anyone, as after an eviction."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self.free_blocks += sequence.num_blocks

    def lose_all(self) -> None:
        """Come back as a new incarnation."""
        for seq_id in list(self._sequences):
            self.lose(seq_id)

    def verify(self, batch: VerifyBatch, masks: MasksSource | None = None) -> VerifyResult:
        """Carry out a round, without masks. Raises ValueError where the batch breaks the protocol."""
        for seq_id in batch.finished:
            self.lose(seq_id)
        if len({item.delta.seq_id for item in batch.items}) != len(batch.items):
            raise ValueError("a sequence appears twice in the batch")
        verdicts: list[Verdict] = []
        stale: list[int] = []
        starved: list[int] = []
        for item in batch.items:
            self._check_item(item)
            sequence = self._sequences.get(item.delta.seq_id)
            known = len(sequence.tokens) if sequence is not None else 0
            if item.delta.start and known != item.delta.start:
                stale.append(item.delta.seq_id)
                continue
            verdict = self._verify_item(item)
            if verdict is None:
                starved.append(item.delta.seq_id)
            else:
                verdicts.append(verdict)
        rows = sum(verdict.rows for verdict in verdicts)
        elapsed_s = self._seconds(rows) if rows else 0.0
        successors = self._successors(verdicts, batch.num_successors) if batch.num_successors else None
        return VerifyResult(
            round_id=batch.round_id,
            verdicts=verdicts,
            stale_seq_ids=stale,
            starved_seq_ids=starved,
            free_blocks=self.free_blocks,
            total_blocks=self.total_blocks,
            rows=rows,
            elapsed_s=elapsed_s,
            successors=successors,
        )

    def _successors(self, verdicts: list[Verdict], count: int) -> Successors:
        """Its next token at every row of emitting sequences, with probability 1; the other successors are token 0."""
        said: list[int] = []
        for verdict in verdicts:
            if verdict.next_token >= 0:
                sequence = self._sequences[verdict.seq_id]
                texts = [sequence.tokens]
                for token, parent in zip(sequence.tree, sequence.parents, strict=True):
                    texts.append([*texts[parent + 1], token])
                said += map(self.next_token, texts)
        token_ids, probs = np.zeros((len(said), count), np.int32), np.zeros((len(said), count), np.float32)
        token_ids[:, 0], probs[:, 0] = said, 1.0
        return Successors(token_ids.reshape(-1), probs.reshape(-1), count)

    def _check_item(self, item: VerifyItem) -> None:
        delta: SequenceDelta = item.delta
        if (delta.start == 0) != (item.begin is not None):
            raise ValueError("begin must be there exactly when the sequence starts at 0")
        if delta.start == 0 and not len(delta.token_ids):
            raise ValueError("a sequence starts without tokens")
        if item.max_rows < 1:
            raise ValueError(f"max_rows is {item.max_rows}; it must be at least 1")
        tree = item.tree
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        if tree.token_ids.dtype != np.int32 or tree.parents.dtype != np.int32 or len(tokens) != len(parents):
            raise ValueError("a draft tree is two int32 arrays of one length")
        if any(not 0 <= token < self.vocab_size for token in (*tokens, *delta.token_ids.tolist())):
            raise ValueError("a token id is out of range")
        if any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise ValueError("a draft node does not come after its parent")
        if len(set(zip(parents, tokens, strict=True))) != len(tokens):
            raise ValueError("siblings of a draft tree have the same token")
        length = delta.start + len(delta.token_ids)
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        if length + max(depths, default=0) >= self.max_model_len + 1:
            raise ValueError("a draft node lies beyond max_model_len")

    def _verify_item(self, item: VerifyItem) -> Verdict | None:
        """None, and nothing changed, if there are not enough blocks."""
        delta = item.delta
        old = self._sequences.get(delta.seq_id)
        starts = delta.start == 0
        tokens = (
            delta.token_ids.tolist() if starts else (old.tokens if old is not None else []) + delta.token_ids.tolist()
        )
        num_cached = 0
        if starts:
            computed = num_cached = min(self._num_cached_tokens, len(tokens) - 1)
        else:
            assert old is not None
            computed = old.computed + _num_kept(old, delta.token_ids.tolist())
        rows = min(item.max_rows, len(tokens) - computed)
        is_complete = computed + rows == len(tokens)
        if len(item.tree) and not is_complete:
            raise ValueError("drafts for a sequence whose tokens are not all computed")
        nodes = len(item.tree)
        held = old.num_blocks if old is not None else 0
        needed = -(-(computed + rows + nodes) // self.block_size)
        if needed - held > self.free_blocks:
            return None
        sequence = _Sequence()
        sequence.tokens = tokens
        sequence.computed = computed + rows
        sequence.num_blocks = needed
        self.free_blocks -= needed - held
        self._sequences[delta.seq_id] = sequence
        if not is_complete:
            return Verdict(delta.seq_id, sequence.computed, rows, -1, num_cached=num_cached)
        sequence.tree, sequence.parents = item.tree.token_ids.tolist(), item.tree.parents.tolist()
        path, token = self._walk(tokens, sequence.tree, sequence.parents)
        return Verdict(
            seq_id=delta.seq_id,
            num_computed=sequence.computed,
            rows=rows + nodes,
            next_token=token,
            path=np.array(path, np.int32),
            num_cached=num_cached,
            num_nodes=nodes,
        )

    def _walk(self, tokens: list[int], tree: list[int], parents: list[int]) -> tuple[list[int], int]:
        path: list[int] = []
        context = tokens[-self._order :]
        at = -1
        while True:
            token = self.next_token(context)
            child = next((i for i in range(at + 1, len(tree)) if parents[i] == at and tree[i] == token), None)
            if child is None:
                return path, token
            path.append(child)
            context = [*context, token]
            at = child


class Wheel(ToyTarget):
    """Says every token once before it says one again."""

    def next_token(self, tokens):
        return (tokens[-1] + 38) % self.vocab_size


def _num_kept(sequence: _Sequence, token_ids: list[int]) -> int:
    """Number of new tokens that were draft nodes of the last round: their KV is there already."""
    at, kept = -1, 0
    for token in token_ids:
        tree, parents = sequence.tree, sequence.parents
        child = next((i for i in range(at + 1, len(tree)) if parents[i] == at and tree[i] == token), None)
        if child is None or sequence.computed + kept >= len(sequence.tokens) + len(token_ids) - 1:
            break
        at = child
        kept += 1
    return kept

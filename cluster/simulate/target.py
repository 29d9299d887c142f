"""A target group that answers from scripts: deltas, KV blocks and the prefix cache as a real engine keeps them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from actors.engine.block_pool import BlockPool, block_hash, root_hash
from actors.messages import SequenceStart, Successors, Verdict, VerifyBatch, VerifyItem, VerifyResult, WorkerInfo
from cluster.simulate.forward_time import ForwardTimes, profile_of
from cluster.simulate.scripts import Script, Scripts

_CERTAINTY = 0.9  # probability that the target reports for its next token; it reports none behind wrong drafts


class _Sequence:
    __slots__ = ("blocks", "computed", "first", "hashes", "num_cached", "parents", "script", "tokens", "tree")

    def __init__(self, script: Script, begin: SequenceStart) -> None:
        self.script = script
        self.first = begin.num_prompt_tokens  # position of the answer's first token
        self.tokens: list[int] = []
        self.computed = 0
        self.num_cached = 0
        self.blocks: list[int] = []
        self.hashes: list[bytes] = [root_hash(begin.namespace)]  # of the root, and of published blocks
        self.tree: list[int] = []  # draft nodes of the last round, whose KV is still there
        self.parents: list[int] = []

    def child(self, node: int, token: int) -> int | None:
        tree, parents = self.tree, self.parents
        return next((i for i in range(node + 1, len(tree)) if parents[i] == node and tree[i] == token), None)

    def num_kept(self, token_ids: list[int]) -> int:
        """How many of the new tokens were draft nodes of the last round."""
        node = -1
        for kept, token in enumerate(token_ids[:-1]):
            child = self.child(node, token)
            if child is None:
                return kept
            node = child
        return len(token_ids) - 1


class ScriptedTarget:
    def __init__(
        self,
        scripts: Scripts,
        times: ForwardTimes,
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        inspect: Callable[[VerifyItem, Script], object] = lambda item, script: None,
    ) -> None:
        """inspect: sees every item that is verified."""
        self._scripts = scripts
        self._times = times
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._pool = BlockPool(num_blocks, block_size)
        self._inspect = inspect
        self._sequences: dict[int, _Sequence] = {}
        self._incarnation = 0

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            role="target",
            incarnation=self._incarnation,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            block_size=self._pool.block_size,
            total_blocks=self._pool.num_blocks,
            step_times=profile_of(self._times),
            row_steps=list(self._times.row_steps),
        )

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def forget_all(self) -> None:
        """Free all sequences, as after a while without their router; the prefix cache stays."""
        for seq_id in list(self._sequences):
            self._forget(seq_id)

    def restart(self) -> None:
        """Come back as a new incarnation, with nothing."""
        self._sequences.clear()
        self._pool.clear()
        self._incarnation += 1

    def verify(self, batch: VerifyBatch) -> VerifyResult:
        for seq_id in batch.finished:
            self._forget(seq_id)
        verdicts: list[Verdict] = []
        stale: list[int] = []
        starved: list[int] = []
        for item in batch.items:
            sequence = self._found(item)
            if sequence is None:
                stale.append(item.delta.seq_id)
            elif (verdict := self._verify_item(sequence, item)) is None:
                starved.append(item.delta.seq_id)
            else:
                verdicts.append(verdict)
        rows = sum(verdict.rows for verdict in verdicts)
        unscored = rows - sum(1 + verdict.num_nodes for verdict in verdicts if verdict.next_token >= 0)
        context = sum(verdict.num_computed for verdict in verdicts)
        return VerifyResult(
            round_id=batch.round_id,
            verdicts=verdicts,
            stale_seq_ids=stale,
            starved_seq_ids=starved,
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.num_blocks,
            rows=rows,
            elapsed_s=self._times.seconds(rows, len(verdicts), context, unscored) if rows else 0.0,
            successors=self._successors(verdicts, batch.num_successors) if batch.num_successors else None,
        )

    def _found(self, item: VerifyItem) -> _Sequence | None:
        """The item's sequence before its delta, a new one for start == 0; None if the delta is stale."""
        delta = item.delta
        if delta.start == 0:
            self._forget(delta.seq_id)
            assert item.begin is not None
            return _Sequence(self._scripts[item.begin.sampling.seed], item.begin)
        known = self._sequences.get(delta.seq_id)
        if known is None or len(known.tokens) != delta.start:
            self._forget(delta.seq_id)
            return None
        return known

    def _verify_item(self, sequence: _Sequence, item: VerifyItem) -> Verdict | None:
        """None, and nothing has changed, if there are not enough blocks."""
        self._inspect(item, sequence.script)
        delta, tree, block_size = item.delta, item.tree, self._pool.block_size
        new = delta.token_ids.tolist()
        length = len(sequence.tokens) + len(new)
        if delta.start:
            computed = sequence.computed + (sequence.num_kept(new) if new else 0)
        else:
            found, hashes = self._pool.find_prefix(item.begin.namespace if item.begin else "", delta.token_ids[:-1])
            sequence.blocks, sequence.hashes = found, sequence.hashes + hashes
            computed = sequence.num_cached = len(found) * block_size
        rows = min(item.max_rows, length - computed)
        needed = -(-(computed + rows + len(tree)) // block_size) - len(sequence.blocks)
        taken = self._pool.allocate(needed) if needed > 0 else []
        if taken is None:
            if not delta.start:
                self._pool.release(sequence.blocks)
            return None
        sequence.tokens += new
        sequence.blocks += taken
        sequence.computed = computed + rows
        self._sequences[delta.seq_id] = sequence
        self._publish(sequence)
        sequence.tree, sequence.parents = tree.token_ids.tolist(), tree.parents.tolist()
        if sequence.computed < length:
            return Verdict(delta.seq_id, sequence.computed, rows, -1, num_cached=sequence.num_cached)
        path, next_token = self._walk(sequence)
        return Verdict(
            seq_id=delta.seq_id,
            num_computed=sequence.computed,
            rows=rows + len(tree),
            next_token=next_token,
            path=np.array(path, np.int32),
            num_cached=sequence.num_cached,
            num_nodes=len(tree),
        )

    def _walk(self, sequence: _Sequence) -> tuple[list[int], int]:
        path: list[int] = []
        node, position = -1, len(sequence.tokens) - sequence.first
        while True:
            token = sequence.script.token(position)
            child = sequence.child(node, token)
            if child is None:
                return path, token
            path.append(child)
            node, position = child, position + 1

    def _publish(self, sequence: _Sequence) -> None:
        """Let others find the blocks that are full and computed."""
        size = self._pool.block_size
        for index in range(len(sequence.hashes) - 1, sequence.computed // size):
            token_ids = np.array(sequence.tokens[index * size : (index + 1) * size], np.int32)
            content = block_hash(sequence.hashes[-1], token_ids)
            sequence.hashes.append(content)
            self._pool.publish(sequence.blocks[index], content)

    def _successors(self, verdicts: list[Verdict], count: int) -> Successors:
        """Its own next token at rows on the accepted path, nothing at the others."""
        rows = [verdict for verdict in verdicts if verdict.next_token >= 0]
        num_rows = sum(1 + verdict.num_nodes for verdict in rows)
        token_ids, probs = np.zeros((num_rows, count), np.int32), np.zeros((num_rows, count), np.float32)
        first = 0
        for verdict in rows:
            sequence = self._sequences[verdict.seq_id]
            said = [sequence.tree[node] for node in verdict.path.tolist()] + [verdict.next_token]
            right = [first, *(first + 1 + node for node in verdict.path.tolist())]
            token_ids[right, 0], probs[right, 0] = said, _CERTAINTY
            first += 1 + verdict.num_nodes
        return Successors(token_ids.reshape(-1), probs.reshape(-1), count)

    def _forget(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._pool.release(sequence.blocks)

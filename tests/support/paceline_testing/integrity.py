"""Invariants of engines, their sequences, KV blocks, guesses and phrases, checked on the private state."""

from collections import Counter
from functools import singledispatch

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.known_guesses import KnownGuesses
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.draft_model.retokenized_sequence import _INSIDE, RetokenizedSequence
from actors.engine.block_pool import BlockPool
from actors.engine.sequence_table import SequenceTable
from actors.engine.target_engine import TargetEngine
from actors.lookahead.phrase_pool import PhrasePool


@singledispatch
def check_integrity(state: object) -> None:
    """Raises AssertionError at the first contradiction."""
    raise TypeError(f"no invariants are known of a {type(state).__name__}")


@check_integrity.register
def _(engine: TargetEngine) -> None:
    check_integrity(engine._table)


@check_integrity.register
def _(engine: DraftEngine) -> None:
    for sequence, known in engine._known.items():
        check_integrity(known)
        assert len(sequence.tree_tokens) == len(known.nodes), f"guesses and draft nodes of {sequence.seq_id} differ"
    check_integrity(engine._table)
    if engine._ouroboros is not None:
        check_integrity(engine._ouroboros.pool)


@check_integrity.register
def _(engine: RetokenizedDraftEngine) -> None:
    for sequence in engine._sequences.values():
        check_integrity(sequence)
    check_integrity(engine._inner)


@check_integrity.register
def _(known: KnownGuesses) -> None:
    """Each node has guesses (with a parallel model, a node without them leads to one that has), a known parent, and its
    index."""
    paths = known.nodes.keys() | {()}
    assert known.guesses.keys() <= paths
    leading = {path[:length] for path in known.later for length in range(1, len(path) + 1)}
    assert known.nodes.keys() <= known.guesses.keys() | leading
    assert known.later.keys() <= known.guesses.keys()
    assert [*known.nodes.values()] == [*range(len(known.nodes))]
    assert {path[:-1] for path in known.nodes} <= paths


@check_integrity.register
def _(sequence: RetokenizedSequence) -> None:
    assert len(sequence._ends) == len(sequence.draft_ids) >= sequence.num_sent
    known = [end for end in sequence._ends if end != _INSIDE]
    assert known == sorted(known), f"token ends {known}"
    assert not known or known[-1] <= len(sequence._text)


@check_integrity.register
def _(table: SequenceTable) -> None:
    for sequence in table._sequences.values():
        assert 0 <= sequence.num_computed <= sequence.length, f"tokens of sequence {sequence.seq_id}"
        room = sequence.num_blocks * table._pool.block_size
        assert sequence.num_computed <= room, f"blocks of sequence {sequence.seq_id}"
    check_blocks(table._pool, [sequence.blocks.tolist() for sequence in table._sequences.values()])


@check_integrity.register
def _(pool: PhrasePool) -> None:
    assert len(pool) <= pool._max_phrases
    assert sum(map(len, pool._phrases.values())) == len(pool)
    order = {entry: age for age, entry in enumerate(pool._ages)}
    for (scope, token), phrases in pool._phrases.items():
        assert 1 <= len(phrases) <= pool._per_token, f"{len(phrases)} phrases after token {token}"
        ages = [order[scope, token, phrase] for phrase in phrases]
        assert ages == sorted(ages), f"phrases after token {token}"
        assert all(len(phrase) == pool.length for phrase in phrases), f"phrases after token {token}"


def check_blocks(pool: BlockPool, held: list[list[int]]) -> None:
    """Compare the pool with the block tables that exist. Raises AssertionError at the first contradiction."""
    for table in held:
        assert len(set(table)) == len(table), f"a block table names a block twice: {table}"
    counts = Counter(number for table in held for number in table)
    for number, block in enumerate(pool._blocks):
        assert block.references == counts[number], f"references of block {number}"
        assert (block.references == 0) == (number in pool._free), f"block {number}"
        assert block.hash is None or pool._by_hash.get(block.hash) == number, f"hash of block {number}"
    for number in pool._states:
        assert pool._blocks[number].hash is not None, f"states of block {number}"
    for content, number in pool._by_hash.items():
        assert pool._blocks[number].hash == content, f"hash of block {number}"

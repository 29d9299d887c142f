"""Emission of a verdict: the accepted path, where the request ends, and the chunk for the client."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal

import msgspec
import numpy as np

from actors.errors import InvalidRequest
from actors.messages import TARGET, RequestTimes, RoundTimes, TokenChunk, Verdict
from cluster.router.prompt_scores import completed
from cluster.router.round import Round, RoundEntry
from cluster.router.sequence import Sequence


def accepted_path(entry: RoundEntry, verdict: Verdict | None, vocab_size: int) -> list[int] | None:
    """The accepted nodes of a verdict, None for an invalid verdict."""
    if verdict is None or verdict.next_token < -1 or verdict.next_token >= vocab_size:
        return None
    if verdict.path.dtype.kind != "i" or verdict.path.ndim != 1:
        return None
    path: list[int] = verdict.path.tolist()
    if verdict.next_token < 0:
        return None if path or not 0 <= verdict.num_computed < entry.num_tokens else path
    if entry.sequence.begin.num_logprobs >= 0 and (verdict.logprobs is None or len(verdict.logprobs) != len(path) + 1):
        return None
    if not 0 <= verdict.num_nodes <= len(entry.tree.token_ids):
        return None
    if path:
        parents = entry.tree.parents[: verdict.num_nodes].tolist()
        previous = -1
        for node in path:
            if not previous < node < len(parents) or parents[node] != previous:
                return None
            previous = node
    return path


def within_masks(entry: RoundEntry, path: list[int], verdict: Verdict) -> tuple[list[int], Verdict]:
    """Accepted nodes and verdict without what was drawn behind nodes that have no mask. The token of the first such
    node was drawn within a mask, behind its parent: it is the next token. The target learns that from the next delta.
    """
    masked = len(entry.tree.token_ids) - entry.num_unmasked
    kept = [node for node in path if node < masked]
    if len(kept) == len(path):
        return path, verdict
    token = int(entry.tree.token_ids[path[len(kept)]])
    return kept, msgspec.structs.replace(verdict, path=np.array(kept, np.int32), next_token=token)


def cut_at_end(
    tokens: SequenceOf[int], stop_tokens: frozenset[int], num_left: int
) -> tuple[int, Literal["stop", "length"] | None]:
    """How many of the tokens are emitted, and the finish reason if the request ends. A stop token is not emitted."""
    if not stop_tokens.isdisjoint(tokens):
        end = next(index for index, token in enumerate(tokens) if token in stop_tokens)
        if end < num_left:
            return end, "stop"
    return (num_left, "length") if len(tokens) >= num_left else (len(tokens), None)


def emit_tokens(
    round: Round, entry: RoundEntry, path: list[int], verdict: Verdict, *, source_names: SequenceOf[str], now: float
) -> TokenChunk:
    """Append a round's tokens to the entry's sequence and make their chunk. An answer that its grammar does not let go
    on ends without an end-of-sequence token.

    path: accepted nodes of the verdict. Raises InvalidRequest, with nothing appended, if the sequence's grammar cannot
    be followed any further.
    """
    sequence, progress = entry.sequence, entry.sequence.progress
    tokens: list[int] = entry.tree.token_ids[path].tolist() if path else []
    sources = sources_of(round, entry, path, source_names)
    tokens.append(verdict.next_token)
    sources.append(TARGET)
    count, finish = cut_at_end(tokens, sequence.stop_tokens, sequence.num_left)
    del tokens[count:], sources[count:]
    if sequence.grammar is not None:
        if not sequence.grammar.follow(tokens):
            answered = sequence.num_tokens - sequence.begin.num_prompt_tokens
            limit = "behind them it is too complex to be followed"
            raise InvalidRequest(sequence.request.grammar_field, f"{answered} tokens of the answer", limit)
        finish = "stop" if sequence.grammar.is_complete else finish
    sequence.append(tokens)
    sequence.target.advance(entry.num_tokens + len(path))
    stats = progress.stats
    stats.rounds += 1
    stats.draft_tokens += entry.num_verified
    for source in sources:
        if source is not TARGET:
            stats.accepted_tokens[source] = stats.accepted_tokens.get(source, 0) + 1
    if progress.times is not None:
        _note_times(round, entry, progress.times, num_tokens=len(tokens), now=now)
    tells_stats = finish is not None or sequence.request.wants_stats
    chunk = TokenChunk(
        request_id=sequence.request_id,
        index=progress.chunk_index,
        token_ids=tuple(tokens),
        finish_reason=finish,
        sources=tuple(sources),
        num_cached_tokens=sequence.target.num_cached if progress.chunk_index == 0 else 0,
        stats=msgspec.structs.replace(stats, accepted_tokens=dict(stats.accepted_tokens)) if tells_stats else None,
        times=progress.times if tells_stats else None,
        logprobs=None if verdict.logprobs is None else verdict.logprobs.first(len(tokens)),
        prompt_logprobs=completed(sequence),
    )
    progress.chunk_index += 1
    return chunk


def note_rows(sequence: Sequence, entry: RoundEntry, verdict: Verdict) -> None:
    """Count the rows that the target computed, and the prompt tokens it found in its prefix cache."""
    sequence.progress.stats.target_rows += max(0, verdict.rows)
    if entry.target_known == 0 and sequence.progress.chunk_index == 0:
        sequence.target.num_cached = min(max(0, verdict.num_cached), sequence.num_prompt)


def sources_of(round: Round, entry: RoundEntry, nodes: list[int], source_names: SequenceOf[str]) -> list[str]:
    """For each of these nodes of the entry's tree, the source with the highest confidence."""
    if entry.num_chain:
        return [source_names[entry.chain_source]] * len(nodes)
    if not nodes:
        return []
    assert round.chosen is not None
    best = round.chosen.nodes["best_source"][entry.node_start : entry.node_end]
    return [source_names[source] for source in best[nodes].tolist()]


def _note_times(round: Round, entry: RoundEntry, times: RequestTimes, *, num_tokens: int, now: float) -> None:
    """Add the times of a round that emits; the first such round ends the prefill."""
    progress = entry.sequence.progress
    arrived_at = progress.arrived_at
    times.ended_s = now - arrived_at
    if progress.chunk_index == 0:
        times.started_s = (progress.started_at or arrived_at) - arrived_at
        times.first_token_s = times.ended_s
        return
    drafted_at = round.assembled_at or round.planned_at
    times.draft_s += drafted_at - round.planned_at
    times.verify_s += now - drafted_at
    if len(times.rounds) < entry.sequence.request.timed_rounds:
        times.rounds.append(
            RoundTimes(
                planned_s=round.planned_at - arrived_at,
                drafted_s=drafted_at - arrived_at,
                verified_s=times.ended_s,
                num_tokens=num_tokens,
                num_drafted=entry.num_verified,
            )
        )

"""Penalties of the rows of draft trees are, bit by bit, those that counting each row's own tokens gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.draft_trees import logit_places, offsets_of, tree_paths
from actors.messages import SamplingParams
from actors.sampling.rows import Paths, rows_for
from actors.sampling.sequence_sampling import ADJUSTMENT, SequenceSampling

_Entry = tuple[bytes, bytes, bytes]

all_params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.15, 0.9]),
    logit_bias=st.sampled_from([(), ((1, 0.5), (6, -2.0)), ((3, 0.1), (3, 0.2))]),
)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[SamplingParams, list[int], int, list[int], list[int]]:
    """Parameters, tokens, how many of them are the prompt, and a draft tree: tokens and parents."""
    tokens = draw(st.lists(st.integers(0, 9), max_size=30))
    tree = draw(st.lists(st.integers(0, 14), max_size=12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(tree))]
    return draw(all_params), tokens, draw(st.integers(0, 30)), tree, parents


def counted(params: SamplingParams, prompt: list[int], output: list[int]) -> dict[int, _Entry]:
    """Bits of the divisor, subtrahend and bias of each token, as one passes over all of a row's tokens."""
    seen, counts = np.zeros(20, np.bool_), np.zeros(20, np.int64)
    bias = np.zeros(20, np.float32)
    for token, value in params.logit_bias:
        bias[token] += np.float32(value)
    if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        seen[prompt + output] = True
        np.add.at(counts, output, 1)
    divisor = np.where(seen, np.float32(params.repetition_penalty), np.float32(1.0))
    subtrahend = (params.presence_penalty * (counts > 0) + params.frequency_penalty * counts).astype(np.float32)
    told = sorted(set(np.flatnonzero(seen).tolist()) | {token for token, _ in params.logit_bias})
    return {token: (divisor[token].tobytes(), subtrahend[token].tobytes(), bias[token].tobytes()) for token in told}


def test_rows_without_noise_are_those_of_temperature_zero():
    hot, cold = ({"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0.0})
    rows = []
    for options in (hot, cold):
        sampling = SequenceSampling(SamplingParams(seed=3, presence_penalty=0.5, **options), 0)
        sampling.extend(np.array([4, 2, 4]))
        rows.append(rows_for([sampling], np.zeros(2, np.int64), np.array([3, 4]), [np.array([1]), np.array([4, 1])]))
    one = rows[0].without_noise(np.array([False, True]))
    assert (one.is_hot.tolist(), one.truncates.tolist()) == ([True, False], [True, False])
    assert one.records[0] == rows[0].records[0]
    for name in ("temperature", "flags", "begin", "end", "own_begin", "own_end"):
        assert one.records[1][name] == rows[1].records[1][name]
    assert one.adjustments is rows[0].adjustments
    assert rows[0].is_hot.all()


@given(st.lists(sequences(), min_size=1, max_size=5), st.lists(st.integers(1, 7), max_size=8))
def test_rows_of_trees_have_the_bits_of_counting_their_own_tokens(drawn, pieces):
    samplings = [SequenceSampling(params, num_prompt) for params, _, num_prompt, _, _ in drawn]
    for sampling, (_, tokens, *_) in zip(samplings, drawn, strict=True):
        told = np.array(tokens, np.int32)
        for piece in pieces:
            sampling.extend(told[:piece])
            told = told[piece:]
        sampling.extend(told)
    tokens = np.array([token for *_, tree, _ in drawn for token in tree], np.int32)
    parents = np.array([parent for *_, tree_parents in drawn for parent in tree_parents], np.int32)
    offsets = offsets_of([len(tree) for *_, tree, _ in drawn])
    row_sequence, positions = logit_places(parents, offsets, np.array([len(tokens) for _, tokens, *_ in drawn]))
    rows = rows_for(samplings, row_sequence, positions, Paths(*tree_paths(tokens, parents, offsets)))

    row = 0
    for params, known, num_prompt, tree, tree_parents in drawn:
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree, tree_parents, strict=True):
            paths.append([*paths[parent + 1], token])
        for path in paths:
            record, found = rows.records[row], {}
            for begin, end in (("begin", "end"), ("own_begin", "own_end")):  # the latter take the place of the former
                adjustments = rows.adjustments[record[begin] : record[end]]
                told = adjustments["token"].tolist()
                assert len(set(told)) == len(told)
                bits = zip(*(adjustments[name] for name in ("divisor", "subtrahend", "bias")), strict=True)
                found |= zip(told, [tuple(value.tobytes() for value in values) for values in bits], strict=True)
            assert found == counted(params, known[:num_prompt], known[num_prompt:] + path)
            row += 1
    assert row == len(rows)
    assert rows.adjustments.dtype == ADJUSTMENT

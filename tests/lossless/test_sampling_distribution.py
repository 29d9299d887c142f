"""Speculative decoding draws from the target's distribution: whole token sequences, every rule, hostile drafters.

The model is a Markov table of logits, so the probability of every sequence is known exactly. Many sequences with seeds
0, 1, 2, ... are decoded in rounds of drafting and verification, and the frequencies of pairs of neighbouring tokens are
compared with the exact products of probabilities.

Each check: n = 25,000 sequences; chi-square over the pairs with at least 5 expected (the others pooled), so degrees of
freedom = number of cells - 1, at most 195; and total variation distance against its expectation plus the McDiarmid
bound. Both have a false alarm rate of 1e-7 for a perfect sampler, some 120 checks in the file: 1.2e-5 in all. Seeds are
fixed, so a pass stays a pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from actors.draft_tree import TopProbs
from actors.messages import SamplingParams
from actors.sampling.sampler import RowSampling, SequenceSampling, draft_with_probs, rows_for, sample_tokens
from actors.sampling.verification import verify_rejections, walk_trees
from paceline_testing.chi_square import chi_square_tail

VOCAB = 14
NUM_SEQUENCES = 25_000
FALSE_ALARM = 1e-7
LENGTH = 3  # tokens a sequence
ROOM = LENGTH + 4  # tokens of a sequence with those that are drafted beyond its end
START = 5  # index of the first drawn token
CONTEXT = 2  # the last prompt token of every sequence

_generator = torch.Generator().manual_seed(2024)
TARGET = torch.randn(VOCAB, VOCAB, generator=_generator) * 1.5
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=_generator)  # agrees about half the time

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.08},
    {"temperature": 0.3, "top_k": 6, "top_p": 0.97, "min_p": 0.001},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]
QUICK = (2, 4, 6, 8)  # a temperature alone, two ways to truncate, all of them


def exact_probabilities(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Next-token probabilities by context, float64 [V, V], in plain Python."""
    table = np.zeros((VOCAB, VOCAB))
    for context, logits in enumerate(TARGET.tolist()):
        weights = [math.exp(logit / temperature) for logit in logits]
        order = sorted(range(VOCAB), key=lambda token: -weights[token])
        order = order[: top_k or VOCAB]
        total, before = sum(weights[token] for token in order), 0.0
        for token in order:
            if before < top_p * total and weights[token] >= min_p * weights[order[0]]:
                table[context, token] = weights[token]
            before += weights[token]
    return table / table.sum(axis=-1, keepdims=True)


def assert_distributed(outputs: np.ndarray, table: np.ndarray) -> None:
    """outputs: int [n, LENGTH]. Checks the pairs at (0, 1) and (1, 2)."""
    first = table[CONTEXT]
    for at, marginal in ((0, first), (1, first @ table)):
        expected = (marginal[:, None] * table).ravel()
        counts = np.bincount(outputs[:, at] * VOCAB + outputs[:, at + 1], minlength=VOCAB * VOCAB)
        pvalue, distance, limit = compare(counts, expected)
        assert counts[expected == 0].sum() == 0, "a token outside the support was emitted"
        assert pvalue > FALSE_ALARM, f"chi-square at {at}: p = {pvalue:.2g}, total variation {distance:.4f}"
        assert distance < limit, f"total variation at {at}: {distance:.4f}, limit {limit:.4f}"


def compare(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float, float]:
    """Chi-square p-value, total variation distance, and the distance a perfect sampler exceeds at FALSE_ALARM."""
    n = int(counts.sum())
    large = expected * n >= 5.0
    observed, wanted = counts[large].astype(float), expected[large] * n
    if expected[~large].sum() * n > 0:
        observed = np.append(observed, counts[~large].sum())
        wanted = np.append(wanted, expected[~large].sum() * n)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    distance = 0.5 * float(np.abs(counts / n - expected).sum())
    # E|share - p| <= sqrt(p (1 - p) / n); one draw moves the distance by at most 1 / n.
    limit = 0.5 * float(np.sqrt(expected * (1 - expected) / n).sum()) + math.sqrt(-math.log(FALSE_ALARM) / (2 * n))
    return chi_square_tail(statistic, len(wanted) - 1), distance, limit


@lru_cache(maxsize=2)
def seeded_rows(params: tuple[tuple[str, Any], ...], count: int) -> RowSampling:
    """ROOM rows of each of `count` sequences with seeds 0, 1, 2, ..., one sequence after another."""
    sequences = [SequenceSampling(SamplingParams(seed=seed, **dict(params)), START) for seed in range(count)]
    at = np.arange(count * ROOM)
    return rows_for(sequences, at // ROOM, START + at % ROOM)


class Batch:
    """Sequences under way: committed tokens [n, room], and how many each has."""

    def __init__(self, params: dict[str, Any], count: int) -> None:
        self._rows = seeded_rows(tuple(params.items()), count)
        self.tokens = np.zeros((count, ROOM), np.int64)
        self.lengths = np.zeros(count, np.int64)

    def unfinished(self) -> np.ndarray:
        return np.flatnonzero(self.lengths < LENGTH)

    def contexts(self, active: np.ndarray) -> np.ndarray:
        last = self.tokens[active, np.maximum(self.lengths[active] - 1, 0)]
        return np.where(self.lengths[active] > 0, last, CONTEXT)

    def rows(self, active: np.ndarray, depths: list[int]) -> RowSampling:
        """Rows at the given depths below the last committed token, sequence after sequence."""
        places = (active * ROOM + self.lengths[active])[:, None] + np.array(depths)
        return self._rows.take(places.ravel())

    def commit(self, active: np.ndarray, counts: np.ndarray, accepted: np.ndarray, next_tokens: np.ndarray) -> None:
        """accepted: those of the first sequence, then of the second, ...; counts: how many each has, int [A]."""
        ends = counts.cumsum()
        of = np.repeat(np.arange(len(active)), counts)
        at = self.lengths[active]
        self.tokens[active[of], at[of] + np.arange(len(accepted)) - (ends - counts)[of]] = accepted
        self.tokens[active, at + counts] = next_tokens
        self.lengths[active] += counts + 1

    def outputs(self) -> np.ndarray:
        return self.tokens[:, :LENGTH]


def walk(drawn: np.ndarray, tokens: np.ndarray, parents: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the coupled rule accepts of A trees of the same shape. drawn: int [A, n + 1]; tokens: int [A, n].

    Returns counts, accepted and next_tokens as `Batch.commit` takes them."""
    count, size = tokens.shape
    nodes, ends, next_tokens = walk_trees(
        drawn.astype(np.int64).ravel(),
        tokens.astype(np.int32).ravel(),
        np.tile(np.array(parents, np.int32), count),
        np.arange(count + 1) * size,
    )
    counts = np.diff(ends)
    return counts, tokens[np.repeat(np.arange(count), counts), nodes], next_tokens


Proposal = tuple[np.ndarray, list[int]]  # tokens int [A, n], parents


def plain(batch: Batch, active: np.ndarray) -> Proposal:
    """No speculation."""
    return np.empty((len(active), 0), np.int64), []


def chain(batch: Batch, active: np.ndarray) -> Proposal:
    """A draft model that draws with the target's own noise."""
    contexts = batch.contexts(active)
    drawn = []
    for depth in range(3):
        contexts = sample_tokens(DRAFT[contexts], batch.rows(active, [depth])).numpy()
        drawn.append(contexts)
    return np.stack(drawn, axis=1), [-1, 0, 1]


def tree(batch: Batch, active: np.ndarray) -> Proposal:
    """The two likeliest children of every node, two levels: no noise at all."""
    best = DRAFT.topk(2, dim=-1).indices.numpy()
    first = best[batch.contexts(active)]
    second = best[first].reshape(len(active), 4)
    return np.concatenate([first, second], axis=1), [-1, -1, 0, 0, 1, 1]


def adversary(batch: Batch, active: np.ndarray) -> Proposal:
    """Knows what the target will say, and says it where that is an even token, another token where it is odd."""
    contexts = batch.contexts(active)
    drawn = []
    for depth in range(3):
        truth = sample_tokens(TARGET[contexts], batch.rows(active, [depth])).numpy()
        contexts = np.where(truth % 2 == 0, truth, (truth + 1) % VOCAB)
        drawn.append(contexts)
    return np.stack(drawn, axis=1), [-1, 0, 1]


def decode_coupled(
    params: dict[str, Any], count: int, propose: Callable[[Batch, np.ndarray], Proposal]
) -> tuple[np.ndarray, float]:
    """Outputs int [count, LENGTH], and the share of first draft tokens that were accepted."""
    batch = Batch(params, count)
    proposed = accepted = 0
    while len(active := batch.unfinished()) > 0:
        tokens, parents = propose(batch, active)
        depths = [0]
        for parent in parents:
            depths.append(depths[parent + 1] + 1)
        contexts = np.concatenate([batch.contexts(active)[:, None], tokens], axis=1)
        drawn = sample_tokens(TARGET[contexts.ravel()], batch.rows(active, depths)).numpy().reshape(contexts.shape)
        counts, path_tokens, next_tokens = walk(drawn, tokens, parents)
        batch.commit(active, counts, path_tokens, next_tokens)
        proposed += len(active)
        accepted += int((counts > 0).sum())
    return batch.outputs(), accepted / proposed


# Each seed has the same tokens with any drafter (below), so one drafter for each setting is enough.
@pytest.mark.parametrize(
    ("params", "propose"),
    [
        pytest.param(params, propose, marks=() if number in QUICK else pytest.mark.slow)
        for number, (params, propose) in enumerate(zip(SETTINGS, itertools.cycle([chain, tree, adversary])))
    ],
)
def test_the_coupled_rule_draws_from_the_target_with_any_drafter(
    params: dict[str, Any], propose: Callable[[Batch, np.ndarray], Proposal]
) -> None:
    outputs, accepted_share = decode_coupled(params, NUM_SEQUENCES, propose)
    assert_distributed(outputs, exact_probabilities(**params))
    assert accepted_share > 0.1  # the draft tokens matter to what is tested


@pytest.mark.parametrize(
    "params",
    [
        *(pytest.param(p, marks=() if number in QUICK else pytest.mark.slow) for number, p in enumerate(SETTINGS)),
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_each_seed_yields_the_same_tokens_with_any_drafter_under_the_coupled_rule(params: dict[str, Any]) -> None:
    expected, _ = decode_coupled(params, 3_000, plain)
    for propose in (chain, tree, adversary):
        outputs, _ = decode_coupled(params, 3_000, propose)
        assert np.array_equal(outputs, expected)


def decode_rejection(
    params: dict[str, Any], count: int, draft: torch.Tensor, k: int, gamma: int = 2
) -> tuple[np.ndarray, float]:
    """Outputs int [count, LENGTH], and the share of first draft tokens that were accepted."""
    batch = Batch(params, count)
    proposed = accepted_first = 0
    while len(active := batch.unfinished()) > 0:
        contexts = [batch.contexts(active)]
        ids, probs = [], []
        for depth in range(gamma):
            drawn, step_ids, step_probs = draft_with_probs(draft[contexts[-1]], batch.rows(active, [depth]), k)
            contexts.append(drawn.numpy())
            ids.append(step_ids.numpy().astype(np.int32))
            probs.append(step_probs.numpy())
        tokens = np.stack(contexts[1:], axis=1)
        q_ids = np.stack(ids, axis=1).reshape(len(active), -1)
        q_probs = np.stack(probs, axis=1).reshape(len(active), -1)
        q = [TopProbs(own_ids, own_probs, k) for own_ids, own_probs in zip(q_ids, q_probs, strict=True)]
        rows = batch.rows(active, list(range(gamma + 1)))
        logits = TARGET[np.stack(contexts, axis=1).ravel()]
        accepted, next_tokens = verify_rejections(logits, rows, list(tokens), q)
        batch.commit(active, accepted, tokens[np.arange(gamma) < accepted[:, None]], next_tokens)
        proposed += len(active)
        accepted_first += int((accepted > 0).sum())
    return batch.outputs(), accepted_first / proposed


@pytest.mark.parametrize(
    ("params", "k"),
    [
        *((p, 3) for p in SETTINGS[2::3]),
        (SETTINGS[0], VOCAB),
        *(pytest.param(p, 3, marks=pytest.mark.slow) for n, p in enumerate(SETTINGS) if n % 3 != 2),
        *(pytest.param(p, VOCAB, marks=pytest.mark.slow) for p in SETTINGS[1:4]),
    ],
    ids=str,
)
def test_the_rejection_rule_draws_from_the_target(params: dict[str, Any], k: int) -> None:
    outputs, accepted_share = decode_rejection(params, NUM_SEQUENCES, DRAFT, k)
    assert_distributed(outputs, exact_probabilities(**params))
    assert 0.2 < accepted_share < 1.0


@pytest.mark.parametrize(
    ("draft", "k"), [(-TARGET, VOCAB), (-TARGET, 1), (DRAFT * 20, 1), (TARGET * 0, 4)],
    ids=["likes what the target dislikes", "certain of the unlikely", "one-hot", "blind"],
)  # fmt: skip
def test_the_rejection_rule_draws_from_the_target_with_hostile_drafters(draft: torch.Tensor, k: int) -> None:
    params = SETTINGS[2]
    outputs, _ = decode_rejection(params, NUM_SEQUENCES, draft, k)
    assert_distributed(outputs, exact_probabilities(**params))


def one_hot(tokens: np.ndarray) -> list[TopProbs]:
    """Point masses: distributions of chains int [A, n] whose tokens are certain."""
    return [TopProbs(own.astype(np.int32), np.ones(len(own), np.float32), 1) for own in tokens]


@pytest.mark.parametrize(("params", "token"), [(SETTINGS[1], int(TARGET[CONTEXT].argmax())), (SETTINGS[3], 0)], ids=str)
def test_coupling_is_the_rejection_rule_for_drafts_that_are_certain(params: dict[str, Any], token: int) -> None:
    """Either accepts a token x with probability p(x), within 5.5 standard deviations (4e-8), and else draws from p
    without x, chi-square with 12 degrees of freedom at most; n = 20,000."""
    count = 20_000
    batch = Batch(params, count)
    active = batch.unfinished()
    p = exact_probabilities(**params)[CONTEXT]
    tokens = np.full((count, 1), token)
    rows = batch.rows(active, [0, 1])
    logits = TARGET[np.full(2 * count, CONTEXT)]
    by_ratio, next_by_ratio = verify_rejections(logits, rows, list(tokens), one_hot(tokens))
    drawn = sample_tokens(logits, rows).numpy().reshape(-1, 2)
    counts, _, next_by_coupling = walk(drawn, tokens, [-1])
    for accepted, following in ((by_ratio > 0, next_by_ratio), (counts > 0, next_by_coupling)):
        sigma = math.sqrt(p[token] * (1 - p[token]) / count)
        assert abs(accepted.mean() - p[token]) < 5.5 * sigma
        rest = np.where(np.arange(VOCAB) == token, 0.0, p)
        replaced = np.bincount(following[~accepted], minlength=VOCAB)
        assert replaced[token] == 0
        assert compare(replaced, rest / rest.sum())[0] > FALSE_ALARM


def test_rounds_of_either_rule_draw_from_the_target_together() -> None:
    """As in a sequence whose draft workers are late now and then: chains that are drawn in some rounds, in the others
    trees that hold what the same seed gives without drafts, so that they know the noise of the coupled rule.
    n = 25,000."""
    params, count = SETTINGS[2], NUM_SEQUENCES
    known = decode_coupled(params, count, plain)[0]
    batch, is_drawn, k = Batch(params, count), np.random.default_rng(7).random((99, 2)) < 0.5, 3
    round_id = 0
    while len(active := batch.unfinished()) > 0:
        round_id += 1
        chains = active[is_drawn[round_id, active % 2]]
        certain = np.setdiff1d(active, chains)
        if len(chains):
            contexts = batch.contexts(chains)
            drawn, ids, probs = draft_with_probs(DRAFT[contexts], batch.rows(chains, [0]), k)
            tokens = drawn.numpy()[:, None]
            q = [TopProbs(*pair, k) for pair in zip(ids.numpy().astype(np.int32), probs.numpy(), strict=True)]
            logits = TARGET[np.stack([contexts, tokens[:, 0]], axis=1).ravel()]
            accepted, following = verify_rejections(logits, batch.rows(chains, [0, 1]), list(tokens), q)
            batch.commit(chains, accepted, tokens[accepted > 0, 0], following)
        if len(certain):
            tokens = known[certain, batch.lengths[certain]]
            logits = TARGET[np.stack([batch.contexts(certain), tokens], axis=1).ravel()]
            drawn = sample_tokens(logits, batch.rows(certain, [0, 1])).numpy().reshape(-1, 2)
            batch.commit(certain, *walk(drawn, tokens[:, None], [-1]))
    assert_distributed(batch.outputs(), exact_probabilities(**params))


@pytest.mark.parametrize(
    "params", [pytest.param(p, marks=pytest.mark.slow if p in SETTINGS[1:3] else ()) for p in SETTINGS[:4]], ids=str
)
def test_the_rejection_rule_accepts_as_often_as_theory_says(params: dict[str, Any]) -> None:
    """Sum of min(p, q) over tokens, at the first position, n = 25,000: within 5.5 standard deviations (4e-8)."""
    batch = Batch(params, NUM_SEQUENCES)
    active = batch.unfinished()
    rows = batch.rows(active, [0])
    tokens, ids, probs = draft_with_probs(DRAFT[batch.contexts(active)], rows, VOCAB)
    q = np.zeros(VOCAB)
    q[ids[0].numpy()] = probs[0].numpy()
    expected = np.minimum(exact_probabilities(**params)[CONTEXT], q).sum()
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert compare(counts, q / q.sum())[0] > FALSE_ALARM  # the draft itself is drawn from q
    accepted, _ = verify_rejections(
        TARGET[np.full(2 * NUM_SEQUENCES, CONTEXT)],
        batch.rows(active, [0, 1]),
        list(tokens.numpy()[:, None]),
        [TopProbs(ids[0].numpy().astype(np.int32), probs[0].numpy(), VOCAB)] * NUM_SEQUENCES,
    )
    sigma = math.sqrt(expected * (1 - expected) / NUM_SEQUENCES)
    assert abs((accepted > 0).mean() - expected) < 5.5 * sigma


def test_one_seed_draws_from_the_distribution_over_its_positions() -> None:
    """One long answer instead of many short ones: n = 25,000 positions in one context, 13 degrees of freedom."""
    params = SETTINGS[2]
    for seed in (0, 1, 2**64 - 1):
        sequence = SequenceSampling(SamplingParams(seed=seed, **params), 0)
        rows = rows_for([sequence], np.zeros(NUM_SEQUENCES, np.int64), np.arange(NUM_SEQUENCES))
        drawn = sample_tokens(TARGET[np.full(NUM_SEQUENCES, CONTEXT)], rows).numpy()
        counts = np.bincount(drawn, minlength=VOCAB)
        assert compare(counts, exact_probabilities(**params)[CONTEXT])[0] > FALSE_ALARM
        successors = drawn[:-1] * VOCAB + drawn[1:]  # and one position tells nothing of the next
        marginal = exact_probabilities(**params)[CONTEXT]
        pairs = np.bincount(successors, minlength=VOCAB * VOCAB)
        assert compare(pairs, np.outer(marginal, marginal).ravel())[0] > FALSE_ALARM


@pytest.mark.parametrize("params", [{}, {"top_k": 12}, {"temperature": 1.3, "top_p": 0.9}], ids=str)
def test_the_fast_path_of_wide_vocabularies_draws_from_the_distribution(params: dict[str, Any]) -> None:
    """n = 8,000 rows of 4,096 columns in chunks; 20 tokens hold most of the mass, the rest is one cell."""
    width, chunk = 4_096, 1_000
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(width, generator=generator) - 6.0
    likely = torch.randperm(width, generator=generator)[:20]
    logits[likely] = torch.randn(20, generator=generator) + 3.0
    sequences = [SequenceSampling(SamplingParams(seed=77, **params), 0)]
    counts = np.zeros(width, np.int64)
    for start in range(0, 8_000, chunk):
        rows = rows_for(sequences, np.zeros(chunk, np.int64), np.arange(start, start + chunk))
        counts += np.bincount(sample_tokens(logits.expand(chunk, width), rows).numpy(), minlength=width)
    weights = (logits.double() / params.get("temperature", 1.0)).softmax(dim=-1).numpy()
    order = np.argsort(-weights)
    kept = np.cumsum(weights[order]) - weights[order] < params.get("top_p", 1.0)
    kept &= np.arange(width) < params.get("top_k", width)
    weights[order[~kept]] = 0.0
    weights /= weights.sum()
    assert counts[weights == 0].sum() == 0
    assert compare(counts, weights)[0] > FALSE_ALARM


def wrong_residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What comes out when a rejected token is replaced by a draw from p instead of from the residual."""
    accepted = np.minimum(p, q)
    return accepted + (1 - accepted.sum(axis=-1, keepdims=True)) * p


def wrong_first_token(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What comes out when temperature is forgotten for the first token."""
    forgotten = p.copy()
    forgotten[CONTEXT] = TARGET[CONTEXT].double().softmax(dim=-1).numpy()
    return forgotten


@pytest.mark.parametrize("mistake", [wrong_residual, wrong_first_token])
def test_the_statistics_notice_the_classic_mistakes(mistake: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    params = SETTINGS[1]
    table = exact_probabilities(**params)
    wrong = mistake(table, (DRAFT / params["temperature"]).double().softmax(dim=-1).numpy())
    generator = np.random.default_rng(1)
    outputs = np.full((NUM_SEQUENCES, LENGTH), CONTEXT)
    for at in range(LENGTH):
        source = wrong if at == 0 or mistake is wrong_residual else table
        cumulative = source[outputs[:, at - 1] if at else np.full(NUM_SEQUENCES, CONTEXT)].cumsum(axis=-1)
        outputs[:, at] = (generator.random((NUM_SEQUENCES, 1)) > cumulative).sum(axis=-1).clip(max=VOCAB - 1)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distributed(outputs, table)

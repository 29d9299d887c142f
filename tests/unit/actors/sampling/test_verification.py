"""The tree walk equals a naive reference; greedy rejection is argmax equality; penalties count each token once."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import TopProbs
from actors.messages import SamplingParams
from actors.sampling import noise
from actors.sampling.sampler import RowSampling, SequenceSampling, draft_with_probs, rows_for, sample_tokens
from actors.sampling.verification import verify_rejections, walk_tree

VOCAB = 6  # few tokens, so that paths match often; token 0 is a token like any other


def verify_rejection(logits, rows, draft_tokens, probs) -> tuple[int, int]:
    """One chain: (accepted, next token)."""
    ((accepted,), (next_token,)) = verify_rejections(logits, rows, [draft_tokens], [probs])
    return int(accepted), int(next_token)


def reference_walk(target: list[int], tokens: list[int], parents: list[int]) -> tuple[list[int], int]:
    """From the definition: descend to the child that says what the target says, until there is none."""
    path: list[int] = []
    node = -1
    while True:
        wanted = target[node + 1]
        children = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == wanted]
        if not children:
            return path, wanted
        (node,) = children
        path.append(node)


@st.composite
def trees(draw: st.DrawFn, vocab: int = VOCAB, max_nodes: int = 24) -> tuple[list[int], list[int]]:
    """Tokens and parents of a valid tree: parents first, siblings distinct."""
    tokens: list[int] = []
    parents: list[int] = []
    for index in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, index - 1))
        taken = {tokens[i] for i in range(index) if parents[i] == parent}
        free = [token for token in range(vocab) if token not in taken]
        if not free:
            break
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
    return tokens, parents


@settings(max_examples=300)
@given(trees(), st.lists(st.integers(0, VOCAB - 1), min_size=25, max_size=25))
def test_the_walk_equals_the_naive_reference_on_any_tree(tree: tuple[list[int], list[int]], drawn: list[int]) -> None:
    tokens, parents = tree
    target = drawn[: len(tokens) + 1]
    path, next_token = walk_tree(np.array(target), np.array(tokens, np.int32), np.array(parents, np.int32))
    assert path.dtype == np.int32
    assert (path.tolist(), next_token) == reference_walk(target, tokens, parents)


@pytest.mark.parametrize("length", [0, 1, 64])
def test_a_full_match_yields_the_bonus_token_also_when_every_token_is_zero(length: int) -> None:
    chain = np.arange(-1, length - 1)
    path, next_token = walk_tree(np.array([0] * length + [5]), np.zeros(length, np.int32), chain)
    assert path.tolist() == list(range(length))
    assert next_token == 5


def test_a_leaf_is_never_left_through_a_child_that_is_not_there() -> None:
    # The target says 0 after the leaf; no padding of shorter paths may be taken for that 0.
    path, next_token = walk_tree(np.array([3, 0, 0, 0]), np.array([3, 1, 2]), np.array([-1, -1, 1]))
    assert (path.tolist(), next_token) == ([0], 0)


def test_a_later_sibling_and_its_children_are_found() -> None:
    tokens, parents = np.array([1, 2, 1, 4, 4]), np.array([-1, -1, 0, 1, 2])
    path, next_token = walk_tree(np.array([2, 0, 4, 0, 1, 0]), tokens, parents)
    assert (path.tolist(), next_token) == ([1, 3], 1)


class Toy:
    """A target whose logits depend on the last two tokens; decoding it plainly, in plain Python, is the oracle."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        self.table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 1.5

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.table[tokens[-2], tokens[-1]]

    def decode(self, params: SamplingParams, prompt: list[int], count: int) -> list[int]:
        """Penalties by counting the whole sequence anew for each token."""
        tokens = list(prompt)
        for _ in range(count):
            scores = np.array(self.logits(tokens).tolist(), np.float32)
            output = tokens[len(prompt) :]
            for token in range(len(scores)):
                if token in tokens:
                    factor = np.float32(params.repetition_penalty)
                    scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
                if token in output:
                    penalty = params.presence_penalty + params.frequency_penalty * output.count(token)
                    scores[token] -= np.float32(penalty)
            if params.temperature > 1e-6:
                key = torch.tensor([noise.signed_seed(params.seed)]), torch.tensor([len(tokens)])
                gumbel = noise.gumbel(*key, torch.arange(len(scores)))[0]
                scores = scores / np.float32(params.temperature) + gumbel.numpy()
            tokens.append(int(scores.argmax()))
        return tokens[len(prompt) :]


def paths_of(tokens: list[int], parents: list[int]) -> list[np.ndarray]:
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return [np.array(path, np.int32) for path in paths]


def speculate(
    toy: Toy, params: SamplingParams, prompt: list[int], count: int, drafts: list[tuple], stop: int | None = None
) -> list[int]:
    """Decode by verifying the given trees, one a round, then empty ones. The stop token is the last one returned."""
    sequence = SequenceSampling(params, len(prompt))
    tokens = list(prompt)
    sequence.extend(np.array(prompt, np.int32))
    round_index = 0
    while len(tokens) < len(prompt) + count:
        node_tokens, parents = drafts[round_index] if round_index < len(drafts) else ([], [])
        round_index += 1
        paths = paths_of(node_tokens, parents)
        logits = torch.stack([toy.logits([*tokens, *path.tolist()]) for path in paths])
        positions = np.array([len(tokens) + len(path) for path in paths])
        rows = rows_for([sequence], np.zeros(len(paths), np.int64), positions, paths)
        drawn = sample_tokens(logits, rows).numpy()
        accepted, next_token = walk_tree(drawn, np.array(node_tokens), np.array(parents))
        emitted = [node_tokens[node] for node in accepted] + [next_token]
        sequence.extend(np.array(emitted, np.int32))
        if stop in emitted:
            return [*tokens[len(prompt) :], *emitted[: emitted.index(stop) + 1]][:count]
        tokens += emitted
    return tokens[len(prompt) : len(prompt) + count]


toy_params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.6]),
)


@settings(max_examples=60)
@given(st.integers(0, 1000), toy_params, st.lists(trees(max_nodes=10), max_size=6))
def test_output_of_a_seed_is_the_same_under_any_drafts_and_penalties_count_each_token_once(
    toy_seed: int, params: SamplingParams, drafts: list[tuple[list[int], list[int]]]
) -> None:
    toy = Toy(toy_seed)
    prompt = [1, 0, 3]
    expected = toy.decode(params, prompt, 16)
    assert speculate(toy, params, prompt, 16, []) == expected
    assert speculate(toy, params, prompt, 16, drafts) == expected


@settings(max_examples=60)
@given(st.integers(0, 1000), toy_params, st.integers(0, VOCAB - 1), st.integers(1, 5))
def test_a_stop_token_anywhere_in_a_perfect_draft_cuts_the_output_where_plain_decoding_ends(
    toy_seed: int, params: SamplingParams, stop: int, width: int
) -> None:
    toy = Toy(toy_seed)
    prompt = [1, 0, 3]
    expected = toy.decode(params, prompt, 16)
    # Chains that say exactly what comes: the stop token turns up inside, at the end and as the bonus token.
    drafts, at = [], 0
    while at < 16:
        chain = expected[at : at + width]
        drafts.append((chain, list(range(-1, len(chain) - 1))))
        at += width + 1
    until = expected.index(stop) + 1 if stop in expected else 16
    assert speculate(toy, params, prompt, 16, drafts, stop) == expected[:until]
    assert speculate(toy, params, prompt, 16, [], stop) == expected[:until]


def rows_for_chain(params: SamplingParams, start: int, count: int) -> RowSampling:
    return rows_for([SequenceSampling(params, 0)], np.zeros(count, np.int64), np.arange(start, start + count))


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], TopProbs]:
    """A chain with any truncated draft distributions, some of them nonsense."""
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
    k = draw(st.integers(1, 4))
    ids = draw(st.lists(st.integers(-1, VOCAB), min_size=len(tokens) * k, max_size=len(tokens) * k))
    values = st.sampled_from([0.0, 0.25, 1.0, -1.0, math.nan, math.inf])
    probs = draw(st.lists(values, min_size=len(tokens) * k, max_size=len(tokens) * k))
    return tokens, TopProbs(np.array(ids, np.int32), np.array(probs, np.float32), k)


@settings(max_examples=200)
@given(chains(), st.integers(0, 10_000))
def test_greedy_rejection_is_argmax_equality_when_the_draft_states_one_hot_distributions(
    chain: tuple[list[int], TopProbs], seed: int
) -> None:
    tokens = chain[0]
    probs = TopProbs(np.array(tokens, np.int32), np.ones(len(tokens), np.float32), 1)
    logits = torch.randn(len(tokens) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)).round()
    rows = rows_for_chain(SamplingParams(seed=seed, temperature=0.0), 7, len(tokens) + 1)
    path, next_token = walk_tree(
        logits.argmax(dim=-1).numpy(), np.array(tokens, np.int32), np.arange(-1, len(tokens) - 1)
    )
    assert verify_rejection(logits, rows, np.array(tokens, np.int32), probs) == (len(path), next_token)


def test_greedy_rejection_ignores_how_likely_target_and_draft_found_the_token() -> None:
    # Under the stochastic rule this draft passes with probability 0.9 and the residual would be its own argmax.
    logits = torch.tensor([[0.51, 0.46, 0.03], [0.1, 0.2, 0.7]]).log()
    rows = rows_for_chain(SamplingParams(seed=1, temperature=0.0), 0, 2)
    probs = TopProbs(np.array([1, 0], np.int32), np.array([0.5, 0.5], np.float32), 2)
    assert verify_rejection(logits, rows, np.array([1]), probs) == (0, 0)
    assert verify_rejection(logits, rows, np.array([0]), probs) == (1, 2)


@settings(max_examples=100)
@given(st.lists(chains(), min_size=1, max_size=5), st.lists(toy_params, min_size=5, max_size=5))
def test_chains_are_verified_together_as_they_are_alone_and_nonsense_never_breaks_them(
    parts: list[tuple[list[int], TopProbs]], params: list[SamplingParams]
) -> None:
    sequences = [SequenceSampling(part, 0) for part in params]
    row_sequence = np.concatenate([np.full(len(tokens) + 1, index) for index, (tokens, _) in enumerate(parts)])
    positions = np.concatenate([np.arange(len(tokens) + 1) + 3 * index for index, (tokens, _) in enumerate(parts)])
    paths = [np.array(tokens[:depth]) for tokens, _ in parts for depth in range(len(tokens) + 1)]
    rows = rows_for(sequences, row_sequence, positions, paths)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(rows))) * 2
    tokens = [np.array(part, np.int32) for part, _ in parts]
    accepted, next_tokens = verify_rejections(logits, rows, tokens, [probs for _, probs in parts])
    at = 0
    for index, (part, probs) in enumerate(parts):
        own = np.arange(at, at + len(part) + 1)
        at += len(part) + 1
        alone = verify_rejection(logits[own], rows.take(own), tokens[index], probs)
        assert alone == (accepted[index], next_tokens[index])
        assert 0 <= alone[0] <= len(part)
        assert 0 <= alone[1] < VOCAB


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_a_draft_from_the_target_itself_is_always_accepted_whole(temperature: float) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(8))
    for seed in range(300):
        rows = rows_for_chain(SamplingParams(seed=seed, temperature=temperature), 11, 5)
        tokens, ids, probs = draft_with_probs(logits, rows, 40)
        q = TopProbs(ids[:4].reshape(-1).numpy().astype(np.int32), probs[:4].reshape(-1).numpy(), 40)
        accepted, next_token = verify_rejection(logits, rows, tokens[:4].numpy(), q)
        assert accepted == 4
        assert next_token == sample_tokens(logits, rows)[4]


def test_an_empty_chain_is_ordinary_sampling() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(8))
    rows = rows_for_chain(SamplingParams(seed=3), 0, 3)
    accepted, next_tokens = verify_rejections(logits, rows, [np.empty(0, np.int32)] * 3, [None] * 3)
    assert accepted.tolist() == [0, 0, 0]
    assert next_tokens.tolist() == sample_tokens(logits, rows).tolist()
    mixed = rows_for_chain(SamplingParams(seed=3), 0, 3)
    probs = TopProbs(np.array([5], np.int32), np.array([1.0], np.float32), 1)
    _, next_tokens = verify_rejections(logits, mixed, [np.empty(0, np.int32), np.array([5])], [None, probs])
    assert next_tokens[0] == sample_tokens(logits, rows)[0]


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([2, 3], [0.5, 0.5]),
        ([1, 2], [0.0, 1.0]),
        ([1, -1], [0.5, 0.5]),
        ([1, 9], [0.5, 0.5]),
        ([1, 2], [math.nan, 1.0]),
    ],
    ids=["token not in q", "token has no mass", "id below 0", "id beyond the vocabulary", "not a number"],
)
def test_a_node_without_a_usable_distribution_is_drawn_as_if_there_were_no_draft(
    ids: list[int], probs: list[float]
) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(9))
    q = TopProbs(np.array(ids, np.int32), np.array(probs, np.float32), 2)
    for seed in range(50):
        rows = rows_for_chain(SamplingParams(seed=seed), 0, 2)
        assert verify_rejection(logits, rows, np.array([1]), q) == (0, sample_tokens(logits, rows)[0])


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    rows = rows_for_chain(SamplingParams(seed=1), 0, 2)
    q = TopProbs(np.array([1, 2], np.int32), np.array([0.5, 0.5], np.float32), 2)
    with pytest.raises(ValueError, match="one row more"):
        verify_rejection(torch.zeros(2, VOCAB), rows, np.array([1, 2]), q)
    with pytest.raises(ValueError, match="need 1 of each"):
        verify_rejection(torch.zeros(2, VOCAB), rows, np.array([1]), TopProbs(q.token_ids, q.probs, 1))
    with pytest.raises(ValueError, match="probs is None"):
        verify_rejections(torch.zeros(2, VOCAB), rows, [np.array([1])], [None])

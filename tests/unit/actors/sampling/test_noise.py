"""Noise is a pure function of seed, position, token and stream, and looks like independent draws from its law.

Statistical tests use fixed inputs; each states its sample size, and the chance that a perfect generator fails it.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.sampling import noise
from paceline_testing.chi_square import uniform_pvalue

MASK = (1 << 64) - 1
GOLDEN = [-0.40234342217445374, -1.8083332777023315, 2.605772018432617]  # seed 2**64 - 1, position 17
FALSE_ALARM = 1e-6  # of each statistical assertion
STREAMS = (noise.SAMPLE, noise.ACCEPT, noise.RESIDUAL, noise.DRAFT)


def mix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def uniform_by_hand(seed: int, position: int, token: int, stream: int) -> float:
    """The generator in Python's unbounded integers."""
    key = mix((seed + 0x6A09E667F3BCC909) & MASK)
    key = mix((key - stream * 0x4498517A7B3558C5) & MASK)
    key = mix((key + position * 0x3C6EF372FE94F82B) & MASK)
    bits = mix((key + token * 0x9E3779B97F4A7C15) & MASK)
    return ((bits >> 12) + 0.5) / 2.0**52


def gumbel_of(seed: int, position: int, tokens: list[int], stream: int) -> torch.Tensor:
    seeds, positions = torch.tensor([noise.signed_seed(seed)]), torch.tensor([position])
    return noise.gumbel(seeds, positions, torch.tensor(tokens), stream)[0]


def uniforms(seeds: np.ndarray, positions: np.ndarray, tokens: np.ndarray, stream: int) -> np.ndarray:
    """Uniform marginals of gumbel noise, float64 [R, V]."""
    drawn = noise.gumbel(torch.from_numpy(seeds), torch.from_numpy(positions), torch.from_numpy(tokens), stream)
    return np.exp(-np.exp(-drawn.numpy().astype(np.float64)))


@given(
    st.integers(0, MASK),
    st.integers(0, 10_000_000),
    st.lists(st.integers(0, 300_000), min_size=1, max_size=5),
    st.sampled_from(STREAMS),
)
def test_noise_equals_the_generator_written_with_unbounded_integers(
    seed: int, position: int, tokens: list[int], stream: int
) -> None:
    drawn = gumbel_of(seed, position, tokens, stream).tolist()
    expected = [-math.log(-math.log(uniform_by_hand(seed, position, token, stream))) for token in tokens]
    assert drawn == pytest.approx(expected, rel=2e-7, abs=1e-7)
    single = noise.uniform(torch.tensor([noise.signed_seed(seed)]), torch.tensor([position]), stream)
    assert single.item() == uniform_by_hand(seed, position, -1, stream)


def test_noise_of_a_seed_never_changes_between_releases() -> None:
    drawn = gumbel_of(2**64 - 1, 17, [0, 1, 151_935], noise.SAMPLE)
    assert (drawn.dtype, drawn.tolist()) == (torch.float32, GOLDEN)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 70))
def test_noise_has_the_same_bits_in_any_batch_shape_and_memory_layout(start: int, num_rows: int, width: int) -> None:
    seeds = torch.arange(start, start + num_rows) * 7919
    positions = torch.arange(num_rows) + start
    tokens = torch.arange(width) * 3
    together = noise.gumbel(seeds, positions, tokens)
    for row in range(num_rows):
        alone = noise.gumbel(seeds[row : row + 1], positions[row : row + 1], tokens)
        assert torch.equal(alone[0], together[row])
    own_ids = tokens.expand(num_rows, width)
    assert torch.equal(noise.gumbel(seeds, positions, own_ids), together)
    assert torch.equal(noise.gumbel(seeds, positions, tokens.flip(0)).flip(1), together)
    strided = torch.arange(3 * width)[::3]
    assert torch.equal(noise.gumbel(seeds, positions, strided), together)


def test_uniform_noise_is_never_zero_nor_one_and_gumbel_noise_always_finite() -> None:
    extremes = noise._unit(torch.tensor([0, -1, 1 << 62, -(1 << 63), (1 << 63) - 1]))
    assert ((extremes > 0.0) & (extremes < 1.0)).all()
    gumbels = -torch.log(-torch.log(extremes))
    assert gumbels.isfinite().all()
    assert gumbels.max() <= noise.MAX_NOISE


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_does_not_fit_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed is"):
        noise.signed_seed(seed)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_noise_follows_its_law_along_every_axis(axis: str, stream: int) -> None:
    """Chi-square, n = 500,000, 200 equal bins, 199 degrees of freedom, and Kolmogorov-Smirnov on the first 100,000."""
    n, one = 500_000, np.array([1], np.int64)
    line = np.arange(n, dtype=np.int64)
    if axis == "tokens":
        values = uniforms(one, one, line, stream)[0]
    elif axis == "positions":
        values = uniforms(np.full(n, 1, np.int64), line, one, stream)[:, 0]
    else:
        values = uniforms(line, np.full(n, 1, np.int64), one, stream)[:, 0]
    counts = np.histogram(values, bins=200, range=(0.0, 1.0))[0]
    assert uniform_pvalue(counts) > FALSE_ALARM
    part = np.sort(values[:100_000])
    below = np.arange(len(part) + 1) / len(part)  # share of the values
    distance = max(np.abs(part - below[1:]).max(), np.abs(part - below[:-1]).max())
    assert distance < math.sqrt(math.log(2 / FALSE_ALARM) / (2 * len(part)))  # Dvoretzky, Kiefer, Wolfowitz


def _independent(left: np.ndarray, right: np.ndarray) -> bool:
    """Chi-square of pairs on a 16 x 16 grid of equal cells, 255 degrees of freedom, and no linear correlation."""
    counts = np.histogram2d(left, right, bins=16, range=((0.0, 1.0), (0.0, 1.0)))[0]
    correlation = np.corrcoef(left, right)[0, 1] * math.sqrt(len(left))  # standard normal for independent draws
    limit = NormalDist().inv_cdf(1 - FALSE_ALARM / 2)
    return uniform_pvalue(counts) > FALSE_ALARM and abs(correlation) < limit


@pytest.mark.parametrize("lag", [1, 2, 3, 64])
def test_noise_is_independent_across_tokens_positions_and_seeds(lag: int) -> None:
    """n = 3 x 400,000 pairs. Small neighbouring seeds and positions are the hard case for a hash."""
    line = np.arange(640, dtype=np.int64)
    by_position = uniforms(np.full(640, 5, np.int64), line, line, noise.SAMPLE)
    assert _independent(by_position[:, :-lag].ravel(), by_position[:, lag:].ravel())
    assert _independent(by_position[:-lag].ravel(), by_position[lag:].ravel())
    by_seed = uniforms(line, np.full(640, 9, np.int64), line, noise.SAMPLE)
    assert _independent(by_seed[:-lag].ravel(), by_seed[lag:].ravel())
    # The same token one position on with the seed one less: cancels in hashes that only add.
    assert _independent(by_position[lag:].ravel(), by_seed[:-lag].ravel())


def test_streams_are_independent_of_each_other() -> None:
    """n = 6 x 409,600 pairs of gumbel noise, and 6 x 200,000 pairs of the uniforms."""
    line = np.arange(640, dtype=np.int64)
    seeds, positions = torch.arange(200_000) % 447, torch.arange(200_000) // 447
    values = [uniforms(line, line, line, stream).ravel() for stream in STREAMS]
    singles = [noise.uniform(seeds, positions, stream).numpy() for stream in STREAMS]
    for left in STREAMS:
        for right in STREAMS[left + 1 :]:
            assert _independent(values[left], values[right])
            assert _independent(singles[left], singles[right])
    for stream in STREAMS:  # the uniform of a row is no token's noise either
        first_token = noise.gumbel(seeds, positions, torch.zeros(1, dtype=torch.int64), stream)[:, 0]
        assert _independent(singles[stream], np.exp(-np.exp(-first_token.numpy().astype(np.float64))))


def test_every_input_bit_flips_every_output_bit_half_the_time() -> None:
    """n = 4,096 inputs; 3 x 64 input bits, 64 output bits: 12,288 shares within 6.5 sigma, false alarm 1e-6 in all."""
    generator = np.random.default_rng(3)
    count = 4_096
    inputs = [torch.from_numpy(generator.integers(0, 2**17, count)) for _ in range(3)]  # small, as they are in life

    def hashed(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
        keys = noise.row_keys(seeds, positions)
        bits = noise._mix(keys + tokens * noise._TOKEN_STEP).numpy()
        return np.unpackbits(bits.view(np.uint8).reshape(count, 8), axis=1)

    base = hashed(*inputs)
    for which in range(3):
        for bit in range(64):
            changed = list(inputs)
            changed[which] = inputs[which] ^ noise.signed(1 << bit)
            share = (hashed(*changed) != base).mean(axis=0)
            assert np.abs(share - 0.5).max() < 6.5 * 0.5 / math.sqrt(count), f"input {which}, bit {bit}"

"""Counter-based noise: a function of (seed, position, token, stream), equal in every batch, process and device.

SplitMix64 is used as a hash: seed, stream and position are absorbed one after the other with a full finalizer in
between, which gives the row's key; the token is the counter. It is wrapping int64 arithmetic, so every device computes
the same bits. Noise is Gumbel(0, 1): argmax(log p + noise) is a draw from p (Maddison, Tarlow, Minka:
"A* sampling", 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_service.splitmix64 import MIX_1, MIX_2, STEP, signed

SAMPLE = 0  # the token itself: coupled sampling, bonus tokens
ACCEPT = 1  # accept tests of rejection sampling
RESIDUAL = 2  # replacements of rejected draft tokens
DRAFT = 3  # draft tokens for rejection sampling

SEED_SALT = 0x6A09E667F3BCC909
_STREAM_STEP = -0x4498517A7B3558C5  # odd, so distinct streams give distinct keys
POSITION_STEP = 0x3C6EF372FE94F82B  # odd, likewise
_TOKEN_STEP, _MIX_1, _MIX_2 = map(signed, (STEP, MIX_1, MIX_2))

UNIFORM_SHIFT = 12  # 52 bits and a half below them: neither 0 nor 1, and exact in float64
UNIFORM_SCALE = 2.0**-52

MAX_NOISE = 36.75  # no value of `gumbel` is larger: -log(2**-53) = 36.74


def row_keys(seeds: Tensor, positions: Tensor, stream: int = SAMPLE) -> Tensor:
    """Hash state of rows, int64 [R], before the token is mixed in. seeds, positions: int64 [R]."""
    keys = _mix(seeds + SEED_SALT)
    keys = _mix(keys + signed(stream * _STREAM_STEP))
    return _mix(keys + positions * POSITION_STEP)


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int = SAMPLE) -> Tensor:
    """Standard Gumbel noise, float32 [R, V], finite, on the device of `seeds`.

    seeds: int64 [R], 64-bit seeds reinterpreted as signed; positions: int64 [R], index of the token to be drawn;
    token_ids: int64 [V] or [R, V]; stream: which of the independent uses.
    """
    keys = row_keys(seeds, positions, stream)
    bits = _mix(keys.unsqueeze(-1) + token_ids * _TOKEN_STEP)
    # The logarithms are taken in float64: devices differ in its last bit, which rounding to float32 then hides.
    return _unit(bits).log_().neg_().log_().neg_().to(torch.float32)


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Uniform noise in the open interval (0, 1), float64 [R]. Arguments as for `gumbel`."""
    # Token -1, so that no hash value is shared with gumbel noise of the same stream.
    return _unit(_mix(row_keys(seeds, positions, stream) - _TOKEN_STEP))


def signed_seed(seed: int) -> int:
    """The int64 with the same 64 bits. Raises ValueError unless 0 <= seed < 2**64."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; it must be in [0, 2**64)")
    return signed(seed)


def _unit(bits: Tensor) -> Tensor:
    mantissa = (bits >> UNIFORM_SHIFT) & ((1 << (64 - UNIFORM_SHIFT)) - 1)
    return mantissa.to(torch.float64).add_(0.5).mul_(UNIFORM_SCALE)


def _mix(bits: Tensor) -> Tensor:
    """`splitmix64.finalize` of int64 tensors."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)

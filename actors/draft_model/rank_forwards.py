"""A draft model on several ranks: rank 0 drafts, and broadcasts every forward to the others.

Only rank 0 has sequences and blocks, and decides what to compute. The others have their part of the model and of the KV
cache. They receive the rows of each forward with their slots, and the cache moves since the last forward. A message is
complete before its forward begins, so an error between two forwards leaves the ranks consistent. An error within a
forward ends the group, because another rank may wait in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Sequences
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engine.arena import Part
from actors.engine.batch import PackedBatch
from actors.engine.device_inputs import DeviceInputs
from actors.engine.kv_cache import KvCache, LayerShape
from actors.engine.model_runner import ModelRunner
from actors.engine.rank_group import Leader, told
from actors.engine.shared_ring import RingReader
from actors.errors import EngineBroken
from actors.options import AttentionBackend

_Result = TypeVar("_Result")


class _Forward(NamedTuple):
    """What the other ranks are told. Arguments as of `ModelRunner.send` and `launch`, or `forward` on a host."""

    moves: list[np.ndarray]  # int64 [2, n] each: arguments of `KvCache.move` since the last forward
    batch: PackedBatch
    logit_rows: np.ndarray
    num_logits: int = 0
    more: Sequences[Part] = ()
    key: Hashable = None
    may_record: bool = False


def encode_forward(forward: _Forward) -> bytes:
    encoded: bytes = msgspec.msgpack.encode(forward, enc_hook=_array_parts)
    return encoded


def decode_forward(payload: bytes) -> _Forward:
    return _decoder.decode(payload)


def _array_parts(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise TypeError(f"{getattr(value, 'dtype', type(value).__name__)} cannot be told")
    return value.dtype.str, value.shape, value.tobytes()


def _restored(expected: type, value: Any) -> Any:
    if expected is np.ndarray:
        dtype, shape, data = value
        # A copy: numba would compile another version for read-only arrays, while rank 0 waits.
        return np.frombuffer(data, dtype).reshape(shape).copy()
    return _hashable(value)


def _hashable(value: Any) -> Hashable:
    """A key of a launch, whose tuples have become lists."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


_decoder = msgspec.msgpack.Decoder(_Forward, dec_hook=_restored)


class _ToldCache(KvCache):
    """Records moves in the cache until they are sent to the other ranks."""

    def __init__(self, num_slots: int, device: torch.device, layers: Sequences[LayerShape]) -> None:
        super().__init__(num_slots, device, layers)
        self._untold: list[np.ndarray] = []

    def move(self, moves: np.ndarray) -> None:
        self._untold.append(moves)
        super().move(moves)

    def drop_moves(self) -> None:
        self._untold = []
        super().drop_moves()

    def take_untold(self) -> list[np.ndarray]:
        """The moves since the last call."""
        untold, self._untold = self._untold, []
        return untold


class LeadingRunner(ModelRunner):
    """Rank 0's part of the model. Raises EngineBroken where a forward fails, on any rank."""

    cache_type = _ToldCache
    kv: _ToldCache

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        leader: Leader,
        *,
        attention: AttentionBackend | None = None,
        is_eager: bool = False,
    ) -> None:
        """As of `ModelRunner`."""
        super().__init__(model, num_slots, attention=attention, is_eager=is_eager)
        self._leader = leader
        self._sent: _Forward | None = None

    def forward(self, batch: PackedBatch, logit_rows: np.ndarray) -> torch.Tensor:
        with _ends_the_group():
            if not self.has_device_inputs:  # else `send` and `launch` tell it
                self._tell(_Forward(self.kv.take_untold(), batch, logit_rows))
            return super().forward(batch, logit_rows)

    def send(
        self, batch: PackedBatch, logit_rows: np.ndarray, num_logits: int, more: Sequences[Part] = ()
    ) -> DeviceInputs:
        self._sent = _Forward(self.kv.take_untold(), batch, logit_rows, num_logits, more)
        with _ends_the_group():
            return super().send(batch, logit_rows, num_logits, more)

    def launch(
        self, inputs: DeviceInputs, key: Hashable, launch: Callable[[], _Result], *, may_record: bool = True
    ) -> _Result:
        assert self._sent is not None
        with _ends_the_group():
            self._tell(self._sent._replace(key=key, may_record=may_record))
            return super().launch(inputs, key, launch, may_record=may_record)

    def _tell(self, forward: _Forward) -> None:
        self._leader.tell(encode_forward(forward))


@contextmanager
def _ends_the_group() -> Iterator[None]:
    try:
        yield
    except EngineBroken:
        raise
    except Exception as error:
        raise EngineBroken(f"a forward of the draft model: {type(error).__name__}: {error}") from error


def follow_forwards(runner: ModelRunner, ring: RingReader) -> None:
    """The loop of ranks 1 to N - 1: compute the forwards of rank 0 until it stops. ring: of `join_group`.

    Raises RuntimeError if another rank is gone, TimeoutError if rank 0 is silent.
    """
    for payload in told(ring):
        _compute(runner, decode_forward(payload))


def _compute(runner: ModelRunner, forward: _Forward) -> None:
    for moves in forward.moves:
        runner.kv.move(moves)
    if not runner.has_device_inputs:
        runner.forward(forward.batch, forward.logit_rows)
        return
    # Launches are recorded by the same keys as on rank 0, and so at the same time.
    inputs = runner.send(forward.batch, forward.logit_rows, forward.num_logits, forward.more)
    runner.launch(inputs, forward.key, lambda: runner.compute_whole(inputs), may_record=forward.may_record)

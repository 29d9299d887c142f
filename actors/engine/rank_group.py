"""A tensor-parallel group: every rank runs the same batches in the same order. Rank 0 distributes them and samples."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d

from actors.engine.shared_ring import RingReader, RingWriter
from actors.engine.target_engine import TargetEngine
from actors.errors import EngineBroken, LinkError
from actors.messages import (
    Failure,
    MasksSource,
    RoundMasks,
    VerifyBatch,
    VerifyResult,
    decode_message,
    encode_message,
)

logger = logging.getLogger(__name__)

_ROUND_TIMEOUT = timedelta(seconds=120)
# Interval of empty messages from an idle rank 0, so that the others notice when it is gone.
_KEEPALIVE_S = 10.0
_RING = "ring"  # key of its path


def open_meeting(host: str, timeout_s: float) -> dist.TCPStore:
    """On rank 0: a store that listens on `host` at `store.port`, by which the ranks find each other. timeout_s: for
    each of its answers."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def find_meeting(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store on the other ranks."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join_group(
    meeting: dist.TCPStore, rank: int, world_size: int, device: str, timeout_s: float
) -> RingWriter | RingReader:
    """Enter the process group; blocks until all ranks have entered. nccl on CUDA, gloo on CPU. Returns where rank 0
    writes and the others read what the group is to do; so all are on one machine.

    timeout_s: for this, and for every collective until `begin_rounds`. Ranks load at different speeds: one may wait
    for as long as another loads.
    """
    # What ranks agree on goes through gloo, so that nothing waits for a device stream.
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(
        backend, store=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    readers = world_size - 1
    ring: RingWriter | RingReader
    if rank:
        ring = RingReader(Path(meeting.get(_RING).decode()), rank - 1, readers)
    else:
        ring = writer = RingWriter(readers)
        meeting.set(_RING, str(writer.path))
    least_of_ranks(0)
    if isinstance(ring, RingWriter):
        ring.hide()
    return ring


def begin_rounds(timeout: timedelta = _ROUND_TIMEOUT) -> None:
    """From now on ranks wait for each other as long as for one round. To be called on all ranks, after loading."""
    distributed_c10d._set_pg_timeout(timeout)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def least_of_ranks(value: int) -> int:
    """The least of the values that the ranks pass; blocks until all have. Raises RuntimeError if a rank is gone."""
    least = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


_STOP = b"stop"


class Leader:
    """Rank 0's end of the ring, by which the other ranks hear what to do."""

    def __init__(self, ring: RingWriter) -> None:
        """ring: of `join_group`."""
        self._ring = ring
        self._told_at = time.monotonic()

    def tell(self, payload: bytes) -> None:
        """To all other ranks, which get it from `told`. Raises RuntimeError if one has ended, TimeoutError if one
        hangs."""
        self._ring.write(payload, _ROUND_TIMEOUT.total_seconds())
        self._told_at = time.monotonic()

    def keep_alive(self) -> None:
        """Raises RuntimeError if another rank has ended."""
        if time.monotonic() - self._told_at > _KEEPALIVE_S:
            self._ring.check_readers()
            self.tell(b"")

    def stop(self) -> None:
        """End `told` on all other ranks."""
        self.tell(_STOP)


def told(ring: RingReader) -> Iterator[bytes]:
    """What rank 0 tells, until it stops. ring: of `join_group`.

    Raises RuntimeError if rank 0 is gone, TimeoutError if it is silent.
    """
    while (payload := ring.read(_ROUND_TIMEOUT.total_seconds())) != _STOP:
        if payload:
            yield payload


class LeadingRank(Leader):
    """Rank 0: the worker loop's `Engine` of the whole group.

    A failed round ends the group: another rank may still be in a collective of it, and rank 0's next one would be
    paired with that, which gives wrong tokens and no error. Only where masks do not come in time do all ranks drop the
    round at the same place, after the forward and before the draw, and go on without sequences.
    """

    def __init__(self, engine: TargetEngine, ring: RingWriter) -> None:
        """ring: of `join_group`."""
        super().__init__(ring)
        self._engine = engine

    def answer(self, batch: VerifyBatch, masks: MasksSource | None = None) -> VerifyResult:
        """Raises LinkError if masks do not come in time, EngineBroken when the round fails otherwise, on any rank."""
        try:
            self.tell(encode_message(batch))
            return self._engine.verify(batch, None if masks is None else partial(self._pass_on, batch.round_id, masks))
        except LinkError:
            raise
        except Exception as error:
            raise EngineBroken(f"round {batch.round_id}: {type(error).__name__}: {error}") from error

    def _pass_on(self, round_id: int, masks: MasksSource) -> RoundMasks:
        """The masks, which the other ranks are sent; or all ranks learn that there are none."""
        try:
            found = masks()
        except LinkError as error:
            self.tell(encode_message(Failure(round_id, type(error).__name__)))
            raise
        self.tell(encode_message(found))
        return found

    def clear(self) -> None:
        """Called when masks did not come: the other ranks clear their engines, too."""
        self._engine.clear()


def follow(engine: TargetEngine, ring: RingReader) -> None:
    """The loop of ranks 1 to N - 1: run the batches of rank 0 until it stops. ring: of `join_group`.

    Raises RuntimeError if another rank is gone, TimeoutError if rank 0 is silent.
    """
    for payload in told(ring):
        message = decode_message(payload)
        if isinstance(message, VerifyBatch):
            masks = partial(_read_masks, ring) if message.masks_follow else None
            try:
                engine.verify(message, masks)
            except LinkError:
                engine.clear()
        elif isinstance(message, Failure):  # of masks that this rank, which draws nothing, did not wait for
            engine.clear()


def _read_masks(ring: RingReader) -> RoundMasks:
    """What rank 0 passes on. Raises LinkError if it has not received them."""
    message = decode_message(ring.read(_ROUND_TIMEOUT.total_seconds()))
    if not isinstance(message, RoundMasks):
        raise LinkError("rank 0 has received no masks in time")
    return message

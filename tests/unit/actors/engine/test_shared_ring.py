"""Messages through shared memory, between real processes: whole, in order, to all; and who is gone is noticed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from actors.engine.shared_ring import PeerGone, RingReader, RingWriter

CAPACITY = 1 << 12
SIZES = [0, 1, 7, 100, 1000, CAPACITY // 2 - 16, CAPACITY // 2, CAPACITY, 3 * CAPACITY + 5]


def messages(seed: int, count: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(int(rng.choice(SIZES))) for _ in range(count)]


def read_all(path, index: int, seed: int, count: int, ready, slow: bool) -> None:
    ring = RingReader(path, index, 2, CAPACITY)
    ready.release()
    for number, message in enumerate(messages(seed, count)):
        if slow and number % 10 == 0:
            time.sleep(0.01)
        assert ring.read(10.0) == message
    ring.close()


def readers_of(ring: RingWriter, target, *arguments):
    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    readers = [context.Process(target=target, args=(ring.path, index, *arguments[:2], ready, *arguments[2:]))
               for index in range(2)]  # fmt: skip
    for process in readers:
        process.start()
    for _ in readers:
        assert ready.acquire(timeout=60)
    ring.hide()
    assert not ring.path.exists()
    return readers


@pytest.mark.parametrize("slow", [False, True])
def test_all_readers_get_all_messages_in_order_whatever_their_size(slow):
    ring = RingWriter(2, CAPACITY)
    readers = readers_of(ring, read_all, 7, 400, slow)
    for message in messages(7, 400):
        ring.write(message, 10.0)
    for process in readers:
        process.join(timeout=60)
    assert [process.exitcode for process in readers] == [0, 0]
    ring.close()


def never_read(path, index: int, seed: int, count: int, ready) -> None:
    _ring = RingReader(path, index, 2, CAPACITY)
    ready.release()
    time.sleep(60)


def test_a_reader_that_does_not_read_stops_the_writer_in_time_and_one_that_was_killed_at_once():
    ring = RingWriter(2, CAPACITY)
    readers = readers_of(ring, never_read, 0, 0)
    ring.check_readers()
    with pytest.raises(TimeoutError, match=r"nothing for 0\.3 s"):
        ring.write(bytes(2 * CAPACITY), 0.3)
    os.kill(readers[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerGone, match=f"process {readers[1].pid} has ended"):  # though nobody has waited for it
        ring.write(bytes(CAPACITY // 2), 30.0)
    assert time.monotonic() - started < 5.0
    with pytest.raises(PeerGone):
        ring.check_readers()
    for process in readers:
        process.kill()
        process.join()


def write_some_and_end(paths) -> None:
    ring = RingWriter(1, CAPACITY)
    paths.put(ring.path)
    while not ring._processes[1]:
        time.sleep(0.01)
    ring.write(b"first", 10.0)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_readers_notice_that_the_writer_has_ended_and_wait_no_longer_than_they_are_told():
    context = multiprocessing.get_context("spawn")
    paths = context.Queue()
    writer = context.Process(target=write_some_and_end, args=(paths,))
    writer.start()
    ring = RingReader(paths.get(timeout=60), 0, 1, CAPACITY)
    assert ring.read(10.0) == b"first"
    with pytest.raises(TimeoutError):
        ring.read(0.1)
    with pytest.raises(PeerGone):
        ring.read(60.0)
    writer.join()


@pytest.mark.parametrize("torn", [0, 4, 8, 15, 18], ids=["checksum", "bytes", "left", "left, last", "message"])
def test_a_piece_that_is_not_all_there_yet_is_not_read(torn):
    writer = RingWriter(1, CAPACITY)
    reader = RingReader(writer.path, 0, 1, CAPACITY)
    writer.hide()
    writer.write(b"a message", 1.0)
    writer._bytes[torn] ^= 1
    with pytest.raises(TimeoutError):
        reader.read(0.1)
    writer._bytes[torn] ^= 1
    assert reader.read(1.0) == b"a message"

"""Results on their way to the host: through one buffer, which is read when the device has copied."""

from __future__ import annotations

import numpy as np
import torch

from actors.engine.host_copy import HostCopy


def test_results_are_read_after_one_wait_each_from_a_buffer_that_grows_as_needed():
    results = [torch.arange(size) * 3 for size in (5, 2, 0, 8, 9, 4)]
    waited_for: list[list[int]] = []
    copy = HostCopy(torch.device("cpu"), lambda: waited_for.append(copy._buffer.tolist()))
    addresses = []
    with torch.inference_mode():  # a buffer made here is written outside, too
        assert copy.read(results[0]).tolist() == results[0].tolist()
    for result in results[1:]:
        numbers = copy.read(result)
        assert numbers.dtype == np.int64
        assert numbers.tolist() == result.tolist()
        addresses.append(copy._buffer.data_ptr())
    assert [buffer[: len(result)] for buffer, result in zip(waited_for, results, strict=True)] == [
        result.tolist() for result in results
    ]
    assert [len(buffer) for buffer in waited_for] == [8, 8, 8, 8, 16, 16]
    assert len(set(addresses)) == 2


def test_a_device_whose_copies_block_is_read_without_a_buffer():
    copy = HostCopy(torch.device("cpu"))
    assert copy.read(torch.tensor([7, 8])).tolist() == [7, 8]
    assert len(copy._buffer) == 0

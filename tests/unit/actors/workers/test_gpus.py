"""From the GPU that Ray assigns to the device that torch computes on."""

import pytest

from actors.errors import Unavailable
from actors.workers.gpus import local_index, rank_device, use_device


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        (["0"], None, 0),
        (["3"], None, 3),
        (["3"], "0,1,2,3", 3),
        (["6"], "4, 6", 1),  # Ray was started with these two
        (["4"], "4,6", 0),
        (["GPU-8f1c"], "GPU-77aa,GPU-8f1c", 1),
        (["MIG-5b"], "MIG-5b", 0),
    ],
)
def test_the_assigned_gpu_is_found_among_the_visible_ones(assigned, visible, index):
    assert local_index(assigned, visible) == index


@pytest.mark.parametrize(
    ("assigned", "visible", "message"),
    [
        ([], None, "needs one GPU, Ray has assigned 0: none"),
        (["0", "1"], None, "needs one GPU, Ray has assigned 2: 0, 1"),
        (["2"], "4,6", "assigned GPU 2; CUDA_VISIBLE_DEVICES is '4,6', which does not have it"),
        (["2"], "", "assigned GPU 2; CUDA_VISIBLE_DEVICES is ''"),
        (["GPU-8f1c"], None, "assigned GPU GPU-8f1c"),
    ],
)
def test_another_gpu_than_the_assigned_one_is_never_taken(assigned, visible, message):
    with pytest.raises(Unavailable, match=message):
        local_index(assigned, visible)


def test_a_rank_on_a_cpu_asks_nobody():
    assert rank_device("cpu") == "cpu"
    use_device("cpu")

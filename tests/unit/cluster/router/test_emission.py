import pytest

from cluster.router.emission import cut_at_end

STOPS = frozenset((49, 7))


@pytest.mark.parametrize(
    ("tokens", "num_left", "expected"),
    [
        ([5, 6], 3, (2, None)),
        ([5, 6], 2, (2, "length")),
        ([5, 6, 8], 2, (2, "length")),
        ([5, 49, 6], 3, (1, "stop")),
        ([49], 1, (0, "stop")),
        ([5, 7, 49], 9, (1, "stop")),
        ([5, 6, 49], 2, (2, "length")),  # the stop token is beyond the last place
    ],
)
def test_a_request_ends_at_its_first_stop_token_or_its_last_place(tokens, num_left, expected):
    assert cut_at_end(tokens, STOPS, num_left) == expected

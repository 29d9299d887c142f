"""Which of several draft models a round ends up asking, against the best of all choices."""

import itertools
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.router.draft_wait import RoundTimes
from cluster.router.pool_wait import PoolWait

VERIFY_S, OVERHEAD_S = 0.02, 0.001
PLAIN_TOKENS, TEXTS = 10, 12  # tokens of a round without drafts; kinds of text, each worth one token to who knows it
ROUNDS, LAST = 800, 100


class Pools:
    """Draft models that know kinds of text each, and let a round wait for some time."""

    def __init__(self, known, waits_s):
        self.known, self.waits_s = known, waits_s

    def gained(self, asked):
        return len(set().union(*(self.known[pool] for pool in asked)))

    def wait_s(self, asked):
        return max((self.waits_s[pool] for pool in asked), default=0.0)

    def tokens_per_s(self, asked):
        return (PLAIN_TOKENS + self.gained(asked)) / (VERIFY_S + self.wait_s(asked))

    def choices(self):
        pools = range(len(self.known))
        return [asked for count in range(len(pools) + 1) for asked in itertools.combinations(pools, count)]

    def share_of_best(self):
        """Tokens a second of what is asked in the end / those of the best choice; and how many choices were tried."""
        wait, asked = PoolWait(len(self.known)), Counter()
        for number in range(ROUNDS):
            pools = wait.pools_to_ask(1, range(len(self.known)))
            gained, outside_s = self.gained(pools), OVERHEAD_S + self.wait_s(pools)
            tokens = PLAIN_TOKENS + gained
            wait.observe(1, pools, tokens, gained, RoundTimes(outside_s, VERIFY_S - OVERHEAD_S))
            asked[pools] += number >= ROUNDS - LAST
        ((last, _),) = asked.most_common(1)
        return self.tokens_per_s(last) / max(map(self.tokens_per_s, self.choices())), len(asked)


texts = st.frozensets(st.integers(0, TEXTS - 1), max_size=6)


@settings(max_examples=15)
@given(st.lists(texts, min_size=1, max_size=4), st.floats(0, VERIFY_S))
def test_of_draft_models_that_take_equally_long_all_are_asked_that_know_something_of_their_own(known, wait_s):
    """Each further one has to bring 2 %, so that up to three are left out for less."""
    share, _ = Pools(known, [wait_s] * len(known)).share_of_best()
    assert share > 0.98**3


def test_choices_are_nearly_the_best_of_all_subsets():
    rng = random.Random(7)
    shares = []
    for _ in range(20):
        known = [[text for text in range(TEXTS) if rng.random() < rng.choice([0.1, 0.3, 0.5])] for _ in range(4)]
        share, tried = Pools(known, [rng.uniform(0, VERIFY_S) for _ in known]).share_of_best()
        shares.append(share)
        assert tried <= len(known) * (len(known) + 1)
    assert sum(shares) / len(shares) > 0.99
    assert min(shares) > 0.8


def test_two_of_three_are_asked_where_the_third_only_costs_time():
    pools = Pools([{0, 1, 2, 3}, {4, 5, 6}, {0, 1}], [0.002, 0.002, 0.012])
    share, _ = pools.share_of_best()
    assert share == 1.0
    assert max(pools.choices(), key=pools.tokens_per_s) == (0, 1)


def test_a_pool_that_is_away_is_not_asked_in_company_either():
    wait, asked = PoolWait(3), Counter()
    for _ in range(100):
        pools = wait.pools_to_ask(1, [0, 2])
        gained = 5 * len(pools)
        wait.observe(1, pools, 10 + gained, gained, RoundTimes(0.002, VERIFY_S))
        asked[pools] += 1
    assert asked.keys() == {(0,), (2,), (0, 2)}
    assert asked[0, 2] > 50
    assert set(wait.pools_to_ask(1, [1])) <= {1}

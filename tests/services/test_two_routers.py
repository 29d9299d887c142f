"""Two routers at once that share one cache: what one has just said, the other drafts within a second."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from actors.drafters.registry import create_drafters
from cache_service.store.connection import ConnectionSettings
from cluster.cache.shared_cache import SharedCache, settings_of
from cluster.config import CacheConfig
from paceline_testing.rounds import learning_core, serve, texts_of, toy_info, toy_request
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 5_000
NEW_TOKENS = 64
WITHIN_S = 5.0  # on a machine that is busy with other things; a tenth of it is what it takes

pytestmark = pytest.mark.usefixtures("drafts_pay")

_numbers = itertools.count()


class Router:
    """One with the settings that `paceline serve` has."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.cache = SharedCache(settings, "toy", settings=settings_of(CacheConfig(index_directory=None), VOCAB_SIZE))
        self.cache.follow([""])
        self._target = ToyTarget(VOCAB_SIZE, 1024, 16, 4096)
        drafters = create_drafters(("cache",), index=self.cache.index)
        self.core = learning_core(toy_info(VOCAB_SIZE, 1024, 16), drafters, token_sink=self.cache)

    def ask(self, prompt: np.ndarray, cache: str = "read_write") -> tuple[list[int], int, int]:
        """The answer, its rounds, and how many tokens of it the cache has drafted."""
        request = toy_request(str(next(_numbers)), prompt, NEW_TOKENS, cache=cache)
        self.core.add(request, 0.0)
        events = serve(self.core, self._target.verify)
        answer = texts_of(events)[request.request_id]
        assert answer == self._target.complete(request)[0]
        return answer, events[-1].stats.rounds, events[-1].stats.accepted_tokens.get("cache", 0)


@contextmanager
def router(settings: ConnectionSettings) -> Iterator[Router]:
    router = Router(settings)
    try:
        yield router
    finally:
        assert router.cache.close(20)
        assert router.cache.publisher.counters.faults == router.core.counters.sink_faults == 0


def test_what_one_has_said_the_other_drafts_within_a_second(shared_server):
    with router(shared_server.settings) as one, router(shared_server.settings) as other:
        prompts = np.random.default_rng(0).integers(0, VOCAB_SIZE, (6, 8)).astype(np.int32)
        delays = []
        for prompt, (writer, reader) in zip(prompts, itertools.cycle([(one, other), (other, one)]), strict=False):
            _, rounds, accepted = writer.ask(prompt)
            said = time.monotonic()
            assert (rounds, accepted) == (NEW_TOKENS, 0)
            # These are not written to the cache: what is drafted for them, the other one has said.
            while reader.ask(prompt, cache="read")[2] == 0:
                assert time.monotonic() < said + WITHIN_S
                time.sleep(0.005)
            delays.append(time.monotonic() - said)
            time.sleep(0.6)  # so that nobody looks more often than without traffic
            _, rounds, accepted = reader.ask(prompt, cache="read")
            assert accepted > NEW_TOKENS / 2
            assert rounds < NEW_TOKENS / 2
        shown = ", ".join(f"{delay:.2f}" for delay in delays)
        print(f"from the last token said here to the first draft of it there: {shown} s")

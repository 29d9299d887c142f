"""Drafters that learn as they go begin with what the shared cache holds: the same answers in fewer rounds, in the
namespaces that a request may read, and as before when those have been purged."""

from contextlib import ExitStack

import numpy as np
import pytest

from actors.drafters.registry import create_drafters
from cache_service.admin.administration import CacheAdministration
from cache_service.automata.shared_phrases import SharedPhrases
from cache_service.formats.store_keys import StoreKeys
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.log.publisher import PublisherSettings
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.offline.engine import LocalEngine
from paceline_testing.cache_stores import until
from paceline_testing.rounds import learning_core, serve, texts_of, toy_info, toy_request
from paceline_testing.tiny_models import save_tiny_model
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 997
PROMPTS = [np.random.default_rng(row).integers(0, 8, 12).astype(np.int32) for row in range(2)]


class Process:
    """A router that has just been started, with its own part of the cache."""

    def __init__(self, server, directory, fingerprint="model", vocab_size=VOCAB_SIZE):
        settings = SharedCacheSettings(
            publisher=PublisherSettings(flush_s=0.01),
            index=WarmIndexSettings(directory=directory, vocab_size=vocab_size, base_tokens=64),
        )
        self.cache = SharedCache(server.settings, fingerprint, settings=settings)

    def router(self, name):
        return Router(create_drafters((name,), index=self.cache.index), self.cache)

    def knows(self, namespace, tokens):
        """Whether these have arrived, wherever in the index they are."""
        self.cache.index.follow(namespace)
        phrases = SharedPhrases(self.cache.index)
        last = np.array(tokens[-4:-1], np.int32)
        return until(lambda: [p[:1] for p in phrases.behind([namespace], last, 1, 8)].count((tokens[-1],)) > 0)


class Router:
    def __init__(self, drafters, cache=None):
        self.core = learning_core(toy_info(VOCAB_SIZE, 4096, 16), drafters, token_sink=cache)
        self.target = ToyTarget(VOCAB_SIZE, 4096, 16, 1 << 16, order=2)

    def answer(self, prompt, namespace="a", **fields):
        """Tokens, and how many of them were drafted."""
        before = sum(self.core.counters.accepted_tokens.values())
        self.core.add(toy_request(prompt=prompt, max_new_tokens=64, namespace=namespace, **fields), 0.0)
        events = serve(self.core, self.target.verify, between=lambda: self.core.exchange(0.0))
        (tokens,) = texts_of(events).values()
        assert self.core.counters.drafter_errors == {}
        return tokens, sum(self.core.counters.accepted_tokens.values()) - before


@pytest.fixture
def started(server, tmp_path):
    with ExitStack() as stack:

        def start(**options):
            process = Process(server, tmp_path / "index", **options)
            stack.callback(process.cache.close, 20)
            return process

        yield start


@pytest.mark.parametrize("name", ["token_recycling", "lookahead"])
def test_a_new_process_drafts_at_once_what_another_has_answered(started, name):
    first = started().router(name)
    answers = [first.answer(prompt)[0] for prompt in PROMPTS]
    process = started()
    assert all(process.knows("a", answer) for answer in answers)
    similar = [
        np.array([*prompt[::-1], *answer[8:12]], np.int32) for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    for kind, prompts in (("repeated", PROMPTS), ("similar", similar)):
        cold = [alone(name).answer(prompt) for prompt in prompts]
        warm = [process.router(name).answer(prompt, cache="read") for prompt in prompts]
        assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
        drafted = [sum(count for _, count in some) for some in (cold, warm)]
        print(f"{name}, {kind}: of {64 * len(prompts)} tokens {drafted[0]} were drafted cold, {drafted[1]} warm")
        assert drafted[1] > 1.5 * drafted[0] + 10
    for scope in ({"cache": "off"}, {"namespace": "b", "cache": "read"}):
        assert process.router(name).answer(prompts[0], **scope) == cold[0]
    reading = {"namespace": "b", "readable": ("a",), "cache": "read"}
    assert process.router(name).answer(prompts[0], **reading) == warm[0]
    # What is purged is as if it had never been.
    CacheAdministration(process.cache._connection).purge(StoreKeys("model", "a"))
    assert until(lambda: process.cache.index.stats().tokens == 0)
    assert process.router(name).answer(prompts[0], cache="read") == cold[0]


def alone(name):
    """A router without a cache."""
    return Router(create_drafters((name,)))


def test_the_phrases_of_a_draft_model_begin_warm_where_it_has_no_part_in_the_cache(started, tmp_path):
    directory = save_tiny_model(tmp_path / "model", max_positions=512)

    def engine(process):
        cache = None if process is None else process.cache
        return LocalEngine(
            str(directory), draft_model=str(directory), drafters=("ouroboros",), gamma=2, max_draft_tokens=16,
            cache=cache,
        )  # fmt: skip

    plain = engine(None)
    info = plain.info
    process = started(fingerprint=info.fingerprint, vocab_size=info.vocab_size)
    prompts = [[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]]
    options = {"max_new_tokens": 48, "ignore_eos": True}
    cold = plain.generate(prompts, **options)
    first = engine(process).generate(prompts, **options)
    assert all(process.knows("", one.token_ids) for one in first)
    warm = engine(process).generate(prompts, **options)
    assert [one.token_ids for one in warm] == [one.token_ids for one in first] == [one.token_ids for one in cold]
    rounds = [sum(one.rounds for one in some) for some in (cold, warm)]
    print(f"ouroboros: {rounds[0]} rounds cold, {rounds[1]} warm")
    assert rounds[1] < rounds[0]

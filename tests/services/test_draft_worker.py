"""A draft worker over a real link, with a draft model whose vocabulary is not the target's."""

import asyncio

import numpy as np
from llguidance import LLMatcher

from actors.draft_tree import DraftTree
from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.messages import DraftBatch, DraftItem, DraftResult, SamplingParams, SequenceDelta, SequenceStart
from actors.models.source import ModelSource
from actors.options import DraftPoolOptions
from actors.workers.draft_worker import DraftWorker
from actors.workers.settings import DraftSettings
from paceline_testing.other_vocabularies import save_renumbered_pair
from paceline_testing.tiny_models import make_byte_tokenizer, save_tiny_model

OPTIONS = DraftPoolOptions(device="cpu", kv_cache_tokens=1024)


async def drafts_of(settings: DraftSettings, text: str) -> DraftTree:
    keys = LinkKeys.generate()
    worker = DraftWorker(settings, 1, "127.0.0.1")
    try:
        worker.server.allow([keys.public])
        link = AsyncLink(worker.server.address, keys)
        try:
            token_ids = np.array(make_byte_tokenizer().encode(text), np.int32)
            begin = SequenceStart(SamplingParams(seed=1, temperature=0.0), len(token_ids))
            item = DraftItem(SequenceDelta(1, 0, token_ids), 4, begin, 4)
            answer = await link.call(DraftBatch(1, [item]), 20.0)
        finally:
            link.close()
    finally:
        worker.stop()
    assert isinstance(answer, DraftResult)
    assert answer.seq_ids == [1]
    return answer.trees[0]


async def test_a_worker_speaks_the_targets_tokens_whatever_its_model_speaks(tmp_path):
    target, draft = (ModelSource(path.name, path.name, path) for path in save_renumbered_pair(tmp_path))
    wanted = await drafts_of(DraftSettings(target, OPTIONS, target), "say oak and elm")
    realigned = await drafts_of(DraftSettings(draft, OPTIONS, target), "say oak and elm")
    assert 0 < len(realigned) <= 4
    shared = min(len(realigned), len(wanted))
    assert realigned.token_ids[:shared].tolist() == wanted.token_ids[:shared].tolist()
    same = save_tiny_model(tmp_path / "same", layers=1, hidden_size=16)
    plain = ModelSource("same", "same", same)
    assert len(await drafts_of(DraftSettings(plain, OPTIONS), "say oak")) > 0


async def test_a_worker_drafts_within_a_grammar_that_the_router_has_compiled(tmp_path):
    """It compiles the grammar itself, between requests."""
    source = ModelSource("same", "same", save_tiny_model(tmp_path / "same", layers=1, hidden_size=16))
    keys, tokens = LinkKeys.generate(), np.array([5, 6, 7], np.int32)
    worker = DraftWorker(DraftSettings(source, OPTIONS, source), 1, "127.0.0.1")
    link = AsyncLink(worker.server.address, keys)
    wanted, drafted = make_byte_tokenizer().encode("ab!", add_special_tokens=False), []
    begin = SequenceStart(SamplingParams(seed=1, temperature=0.0), 3, grammar=LLMatcher.grammar_from_regex("ab!"))
    try:
        worker.server.allow([keys.public])
        async with asyncio.timeout(30):
            while drafted[:3] != wanted:
                answer = await link.call(DraftBatch(1, [DraftItem(SequenceDelta(1, 0, tokens), 3, begin)]), 20.0)
                assert isinstance(answer, DraftResult)
                drafted = answer.trees[0].token_ids.tolist()
    finally:
        link.close()
        worker.stop()


async def test_a_worker_drafts_ahead_between_requests(tmp_path):
    source = ModelSource("same", "same", save_tiny_model(tmp_path / "same", layers=1, hidden_size=16))
    keys = LinkKeys.generate()
    trees = []
    for ahead in (0, 2):
        options = OPTIONS.model_copy(update={"ahead": ahead})
        worker = DraftWorker(DraftSettings(source, options), 1, "127.0.0.1")
        link = AsyncLink(worker.server.address, keys)
        try:
            worker.server.allow([keys.public])
            text = [5, 6, 7]
            start = 0
            for round_id in range(1, 5):
                begin = SequenceStart(SamplingParams(seed=1, temperature=0.0), 3) if start == 0 else None
                item = DraftItem(SequenceDelta(1, start, np.array(text[start:], np.int32)), 4, begin, 2, 2)
                answer = await link.call(DraftBatch(round_id, [item]), 20.0)
                assert isinstance(answer, DraftResult)
                assert answer.num_ahead == (ahead > 0 and start > 0)
                assert 0 <= answer.num_ready <= answer.num_ahead
                trees.append((answer.trees[0].token_ids.tolist(), answer.trees[0].parents.tolist()))
                start = len(text)
                text += [int(answer.trees[0].token_ids[0]), 9]
        finally:
            link.close()
            worker.stop()
    assert trees[:4] == trees[4:]

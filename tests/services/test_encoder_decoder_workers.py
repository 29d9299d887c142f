"""An encoder-decoder model behind the links of a target worker and of a draft worker."""

import numpy as np

from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.messages import (
    DraftBatch,
    DraftItem,
    Hello,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyBatch,
    VerifyItem,
)
from actors.models.source import ModelSource
from actors.options import DraftPoolOptions, TargetGroupOptions
from actors.workers.draft_worker import DraftWorker
from actors.workers.settings import DraftSettings, TargetSettings
from actors.workers.target_worker import TargetWorker
from paceline_testing.tiny_models import save_tiny_model


async def test_what_one_worker_drafts_the_other_one_accepts(tmp_path):
    source = ModelSource("bart", "bart", save_tiny_model(tmp_path, "bart", 5, layers=1, max_positions=100))
    keys = LinkKeys.generate()
    target_options = TargetGroupOptions(device="cpu", kv_cache_tokens=1024)
    target = TargetWorker(TargetSettings(source, target_options), 0, incarnation=1)
    target.load(None)
    target.start("127.0.0.1")
    draft_options = DraftPoolOptions(device="cpu", kv_cache_tokens=1024)
    draft = DraftWorker(DraftSettings(source, draft_options, target=source), 1, "127.0.0.1")
    links = []
    try:
        for worker in (target, draft):
            worker.server.allow([keys.public])
            links.append(AsyncLink(worker.server.address, keys))
        to_target, to_draft = links
        info = await to_target.call(Hello(), 20.0)
        assert (info.max_model_len, info.vocab_size) == (200, 259)
        prompt = np.array([72, 101, 108, 108, 111], np.int32)
        begin = SequenceStart(SamplingParams(seed=1, temperature=0.0), len(prompt))
        delta = SequenceDelta(1, 0, prompt)
        (tree,) = (await to_draft.call(DraftBatch(1, [DraftItem(delta, 4, begin)]), 20.0)).trees
        item = VerifyItem(delta, len(prompt), tree, begin)
        (verdict,) = (await to_target.call(VerifyBatch(1, [item]), 20.0)).verdicts
        assert len(tree.token_ids) > 0
        assert verdict.path.tolist() == list(range(len(tree.token_ids)))
    finally:
        for link in links:
            link.close()
        draft.stop()
        target.stop()

"""What a target worker tells its router of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.messages import Hello
from actors.models.random_model import random_model
from actors.models.source import ModelSource
from actors.models.tiny_config import config_of_type, tiny_config
from actors.options import TargetGroupOptions
from actors.workers.settings import TargetSettings
from actors.workers.target_worker import TargetWorker
from paceline_testing.tiny_models import save_tiny_model


def save_recurrent(directory: Path) -> Path:
    random_model(tiny_config(config_of_type("lfm2"))).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("save", "options", "has_one"),
    [
        (save_recurrent, {}, True),
        (save_recurrent, {"prefix_cache": False}, False),
        (lambda path: save_tiny_model(path, "bart", layers=1, max_positions=100), {}, False),
    ],
    ids=["recurrent", "off", "encoder-decoder"],
)
async def test_whether_it_has_a_prefix_cache(tmp_path, save, options, has_one):
    options = TargetGroupOptions(device="cpu", kv_cache_tokens=2048, enforce_eager=True, **options)
    worker = TargetWorker(TargetSettings(ModelSource("m", "m", save(tmp_path)), options), 0, incarnation=1)
    worker.load(None)
    worker.start("127.0.0.1")
    keys = LinkKeys.generate()
    assert worker.server is not None
    worker.server.allow([keys.public])
    link = AsyncLink(worker.server.address, keys)
    try:
        assert (await link.call(Hello(), 20.0)).has_prefix_cache == has_one
    finally:
        link.close()
        worker.stop()

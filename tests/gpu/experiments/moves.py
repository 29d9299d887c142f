"""Accepted paths that are moved into place, for all layers of an 8B at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from actors.engine.kv_cache import KvCache, LayerShape
from tests.gpu.experiments.setting import Setting


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    layers, heads, dim = setting.of((32, 8, 128), (2, 2, 16))
    kv = KvCache(setting.of(65536, 256), setting.device, [LayerShape(heads, dim, dim, setting.dtype)] * layers)
    for count in setting.of((1, 8, 32, 128), (1, 4)):
        slots = torch.randperm(kv.num_slots, device=setting.device)[: 2 * count].view(2, count)
        ms = setting.time(lambda slots=slots: kv.copy_slots(slots))
        yield {
            "slots": count,
            "layers": layers,
            "us": ms.median * 1e3,
            "MB": 4 * count * layers * heads * dim * 2 / 2**20,
        }

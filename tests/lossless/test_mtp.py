"""MTP heads only draft: the text is the target's own, and a head that knows the target saves most rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.errors import ModelError
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation
from paceline_testing import mtp_checkpoints
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import save_tiny_model

FAMILIES = ("deepseek_v3", "glm4_moe", "mimo", "qwen3_next", "qwen3_5")  # the last two draft chains
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm")]
PROMPTS.append(list(b"a longer prompt that comes in several parts " * 4))
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}

pytestmark = pytest.mark.usefixtures("drafts_pay")


def local_engine(path: Path, head: str = "mtp", **options) -> LocalEngine:
    options = {
        "drafters": ("eagle",) if head == "mtp" else ("none",),
        "kv_cache_tokens": 1024,
        "eagle_depth": 3,
        "eagle_top_k": 3,
        "dtype": "float32",
    } | options
    return LocalEngine(str(path), draft_model="none", eagle_head=head, batch_size=5, device="cpu", **options)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize(
    ("family", "sampling"), [*((family, {}) for family in FAMILIES), ("deepseek_v3", SAMPLED)], ids=str
)
def test_the_text_is_that_of_the_target_alone(tmp_path, family, sampling):
    path = getattr(mtp_checkpoints, family)().save(tmp_path)
    wanted = tokens(local_engine(path, "none").generate(PROMPTS, **OPTIONS, **sampling))
    local = local_engine(path, drafters=("auto",) if sampling else ("eagle",))  # auto: beside the others
    assert tokens(local.generate(PROMPTS, **OPTIONS, **sampling)) == wanted
    assert local.core.counters.drafted_tokens["eagle"] > 0
    assert not local.core.counters.invalid_trees
    check_integrity(local.target)


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo", "qwen3_next"])
def test_a_head_that_knows_the_target_saves_most_rounds(tmp_path, family):
    path = getattr(mtp_checkpoints, family)().save_knowing(tmp_path)
    plain = local_engine(path, "none").generate(PROMPTS, **OPTIONS)
    drafted = local_engine(path).generate(PROMPTS, **OPTIONS)
    assert tokens(drafted) == tokens(plain)
    for generation in drafted:
        assert generation.accepted_tokens["eagle"] + generation.rounds == OPTIONS["max_new_tokens"]
        assert generation.rounds <= 5


def test_a_target_without_a_head_is_refused_by_name(tmp_path):
    path = save_tiny_model(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"the checkpoint has no MTP head, which would have one of the keys"):
        local_engine(path)
    assert tokens(local_engine(path, "none").generate([[65, 66]], max_new_tokens=2))

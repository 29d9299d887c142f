"""How many draft rows a round may have, by what rounds have taken."""

import numpy as np
import pytest

from actors.draft_tree import DraftTree
from actors.drafters.contract import CpuDrafter
from actors.engine.row_tiers import power_tier, row_tier
from actors.engine.warm_up import recordable_shapes
from cluster.config import MOST_DRAFT_ROWS, RouterConfig, SpeculationConfig
from cluster.router.draft_budget import USUAL_DRAFT_ROWS, draft_rows, most_draft_rows
from cluster.router.prefill_budget import round_limits
from cluster.router.step_time import StepTimeCurve
from paceline_testing.rounds import toy_core, toy_info, toy_request, toy_round
from paceline_testing.toy_target import ToyTarget

VOCAB = 97
# Measured: an 8B model in bf16 on an H200
GPU = ((1, 5.00e-3), (4, 5.11e-3), (8, 5.21e-3), (16, 5.28e-3), (32, 5.57e-3), (64, 5.70e-3))
CPU = tuple((rows, 30e-3 + 4e-3 * rows) for rows in (1, 4, 16, 64))


@pytest.mark.parametrize(
    ("profile", "given", "most", "rows"),
    [
        (GPU, None, 256, 256),
        (GPU, None, 100, 100),
        (GPU, 40, 512, 40),
        ((*GPU, (128, 6.3e-3), (256, 8e-3), (512, 12e-3)), None, MOST_DRAFT_ROWS, MOST_DRAFT_ROWS),
        ((*GPU, (128, 6.3e-3), (256, 12e-3), (512, 24e-3)), None, MOST_DRAFT_ROWS, 128),
        (CPU, None, 512, USUAL_DRAFT_ROWS),
        (CPU, 512, 512, 512),
    ],
)
def test_as_many_as_make_rows_cheaper_unless_given(profile, given, most, rows):
    assert draft_rows(StepTimeCurve(profile), given, most) == rows


@pytest.mark.parametrize(
    ("router", "speculation", "most"),
    [
        ({}, {}, 256),
        ({"max_running": 64}, {}, MOST_DRAFT_ROWS),
        ({"max_running": 1}, {}, USUAL_DRAFT_ROWS),
        ({"max_running": 64}, {"max_rows": 1000}, 1000),
        ({"max_running": 64}, {"max_rows": 8}, 8),
    ],
)
def test_memory_is_kept_for_the_most_that_there_may_be(router, speculation, most):
    router, speculation = RouterConfig(**router), SpeculationConfig(**speculation)
    assert most_draft_rows(router, speculation) == round_limits(router, speculation).draft_rows == most


def test_all_shapes_of_rounds_are_recorded_ahead():
    """No shape is left out, and none is of a round that there cannot be: one sequence with the drafts of all."""
    limits = round_limits(RouterConfig(max_running=32), SpeculationConfig())
    shapes = recordable_shapes(limits)
    padded = {(power_tier(sequences), row_tier(rows)) for sequences, rows in shapes}
    assert len(padded) == len(shapes)
    assert padded == {
        (power_tier(sequences), row_tier(sequences + drafts))
        for sequences in range(1, 33)
        for drafts in range(min(16 * sequences, MOST_DRAFT_ROWS) + 1)
    }
    assert max(rows for _, rows in shapes) == 32 + MOST_DRAFT_ROWS
    assert max(rows for sequences, rows in shapes if sequences == 1) == 17


class RightChains(CpuDrafter):
    name = "right"

    def _propose_one(self, context):
        target = ToyTarget(VOCAB)
        text = target.text_after(context.tokens.tolist(), context.max_nodes)
        return DraftTree.chain(np.array(text, np.int32), np.full(len(text), 0.99, np.float32))


@pytest.mark.parametrize(("profile", "least", "most"), [(GPU, 240, 256), (CPU, 1, USUAL_DRAFT_ROWS)])
def test_right_drafts_of_many_sequences_are_all_verified_where_rows_are_nearly_free(profile, least, most):
    """With 64 rows for all, 32 sequences had 3 tokens a round each, of 16 that their drafts had right."""
    (few, before_s), (many, last_s) = profile[-2:]
    row_s = (last_s - before_s) / (many - few)  # also beyond the profile
    target = ToyTarget(
        VOCAB, seconds=lambda rows: float(np.interp(rows, *zip(*profile, strict=True))) + row_s * max(0, rows - many)
    )
    info = toy_info(VOCAB, step_times=list(profile))
    requests = [toy_request(f"r{i}", prompt=(i + 1, i + 2), max_new_tokens=100) for i in range(16)]
    core = toy_core(
        info, *requests, drafters={"right": RightChains()}, config=RouterConfig(max_running=16),
        speculation=SpeculationConfig(drafters=("right",)),
    )  # fmt: skip
    results = [toy_round(core, target.verify, number * 0.05).result for number in range(3)]
    assert least <= sum(verdict.num_nodes for verdict in results[-1].verdicts) <= most

"""The comparison of two checkouts' tokens runs, and sees a difference."""

from __future__ import annotations

import pytest

from tests.bench import same_tokens
from tests.bench.same_tokens import HERE, Case, cases_of, compare, differences, prompts_of, tiny_models


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkout_emits_its_own_tokens_with_drafts_and_without(tmp_path):
    model, draft_model = map(str, tiny_models(tmp_path))
    cases = cases_of(["suffix", "draft_model"], ["float32"], ["default"])
    task = {"model": model, "draft_model": draft_model, "cases": cases, "tokens": 6, "prompts": prompts_of(None, 2, 40)}
    found, refused, (answers, tokens) = compare(HERE, task)
    assert found == refused == []
    assert len(cases) == 3 * len(same_tokens.DECODING)
    assert answers == 2 * len(cases)
    assert tokens > answers


def test_other_tokens_and_refusals_are_differences():
    plain, drafted = Case("default", "float32", "greedy", "none"), Case("default", "float32", "greedy", "suffix")
    rounded = Case("default", "bfloat16", "greedy", "suffix")
    assert differences([plain, drafted], [[[1, 2]], [[1, 2]]], [[[1, 2]], [[1, 2]]]) == []
    (found,) = differences([plain, drafted], [[[1, 2]], [[1, 3]]], [[[1, 2]], [[1, 3]]])
    assert (found.case, found.between, found.prompts) == (drafted, "drafts", 1)
    found = differences([plain, drafted], [[[1, 2]], [[1, 2]]], [[[1, 2]], "ModelError: no"])
    assert [(one.case, one.between) for one in found] == [(drafted, "checkouts")]
    of_other_dtype = differences(
        [plain, rounded._replace(drafter="none"), rounded], [[[1]], [[1]], [[2]]], [[[1]], [[1]], [[2]]]
    )
    assert of_other_dtype == []


def test_prompts_of_spec_bench_are_spread_over_its_rows(tmp_path):
    rows = "".join(f'{{"turns": ["question {index} of many"]}}\n' for index in range(10))
    (tmp_path / "question.jsonl").write_text(rows, encoding="utf-8")
    assert prompts_of(tmp_path, 5, 10) == [f"question {index}" for index in (0, 2, 4, 6, 8)]

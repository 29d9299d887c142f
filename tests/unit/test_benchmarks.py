"""The benchmarks run: few rounds of each, whose times say nothing here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.models.catalog import resolve_model
from actors.models.loader import load_model
from actors.models.source import ModelSource
from actors.training.target_text import write_answers
from cluster.offline.engine import LocalEngine
from cluster.simulate.events import Events
from cluster.simulate.forward_time import MeasuredTimes
from cluster.simulate.options import ForwardOptions
from paceline_testing.tiny_models import save_tiny_model
from tests.bench import bench_round_planning, bench_round_profile, draft_depth, train_demo_drafter
from tests.bench.simulate.calibrate import PhasedLoad
from tests.bench.simulate.constants import PROMPT_ROWS, MeanRound, at_one_pace, fit_forward, mean_padded, padded


@pytest.mark.parametrize("attention", ["triton_tree", "padded"])
@pytest.mark.parametrize("kind", bench_round_planning.KINDS)
def test_the_planning_of_a_round_is_taken_apart(kind, attention):
    if attention == "triton_tree":
        pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    found = bench_round_planning.measure(2, 7, kind, attention, rounds=4, context=40)
    assert list(found) == ["total", *bench_round_planning.PARTS]
    elsewhere = {"plan"} if attention == "triton_tree" else {"send"}
    assert all((time > 0.0) == (part not in elsewhere) for part, time in found.items()), found


@pytest.mark.parametrize("nodes", [0, 7])
def test_rounds_sent_ahead_are_taken_apart(nodes):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    found = bench_round_planning.measure_ahead(2, nodes, "penalties", rounds=4, context=40)
    assert list(found) == ["prepare", "between", "result"]
    assert all(time > 0.0 for time in found.values())


def test_the_profile_of_a_round_adds_up(tmp_path):
    model = save_tiny_model(tmp_path, "llama", 3, layers=1, max_positions=256)
    found = bench_round_profile.profile(str(model), 2, ("suffix",), rounds=8, prompt=16)
    parts = {name: found[name] for name in (*bench_round_profile.ROUTER_STAGES, *bench_round_profile.ENGINE_PARTS)}
    assert all(milliseconds > 0.0 for milliseconds in parts.values()), found
    assert sum(parts.values()) + found["link"] == pytest.approx(found["round"], rel=0.1)
    assert found["tokens"] >= 1.0


def test_depths_of_drafts_are_compared(tmp_path):
    spec = str(save_tiny_model(tmp_path, "llama", 3, layers=1, max_positions=256))
    plain = LocalEngine(spec, drafters=("none",), draft_model="none", dtype="float32")
    answers = plain.generate([[5, 6, 7], [9, 10]], max_new_tokens=12, temperature=0.0, ignore_eos=True)
    drafts = draft_depth.Drafts(load_model(resolve_model(spec, tmp_path)), answers)  # a copy: it is always right
    deep, tokens_a_round = draft_depth.speed(spec, answers, drafts, cost=0.01, fixed=8)
    shallow, _ = draft_depth.speed(spec, answers, drafts, cost=0.01, fixed=1)
    by_value, _ = draft_depth.speed(spec, answers, drafts, cost=0.01)
    assert tokens_a_round > 3.0
    assert shallow < min(deep, by_value)
    one, two = (draft_depth.speed(spec, answers * 2, drafts, 0.01, size, 8)[0] for size in (1, 2))
    assert one < two  # a sequence that ends is followed by the next one


def test_text_for_the_demos_drafter_is_what_the_target_would_write(tmp_path, monkeypatch):
    source = ModelSource("t", "t", save_tiny_model(tmp_path, "llama", 3, layers=2, max_positions=256))
    writer, prompts = train_demo_drafter.Writer(source), [[5, 6, 7], [9, 10, 11, 12, 13], [40] * 20, [8, 9], [3]]
    limits = (22, 20, 22, 4, 4)  # the short ones leave the batch when the others are at their ninth token
    wishes = [train_demo_drafter.Wish(prompt, 0.0, most) for prompt, most in zip(prompts, limits, strict=True)]
    monkeypatch.setattr(train_demo_drafter, "CACHE_TOKENS", 100)  # the longest is written by itself
    found = writer.write(wishes, torch.Generator())
    wanted = write_answers(writer.model, prompts, [0.0] * len(prompts), 22, [writer.end], 0)
    for mine, theirs, wish in zip(found, wanted, wishes, strict=True):
        own = theirs.token_ids[theirs.num_prompt_tokens :][: wish.most].tolist()
        assert len(mine) == len(own) or writer.end in (mine[-1], own[-1])
        same = [one == two for one, two in zip(mine, own, strict=False)]
        assert sum(same) > 0.5 * len(own)  # roundings in bfloat16 differ


def test_a_text_ends_with_its_end_token(tmp_path):
    source = ModelSource("t", "t", save_tiny_model(tmp_path, "llama", 3, layers=2, max_positions=256))
    writer = train_demo_drafter.Writer(source)
    wishes = [train_demo_drafter.Wish([row], 0.0, 40) for row in range(1, 9)]
    longest = writer.write(wishes, torch.Generator())
    writer.end = longest[0][6]
    found = writer.write(wishes, torch.Generator())
    assert found[0] == longest[0][: longest[0].index(writer.end) + 1]


def test_the_training_of_the_demos_drafter_ends_in_time(tmp_path, monkeypatch):
    source = ModelSource("t", "t", save_tiny_model(tmp_path, "llama", 3, layers=2, max_positions=256))
    epochs = 10**5  # hours
    recipe = replace(train_demo_drafter.RECIPE, layers=1, vocab_size=32, epochs=epochs, batch_tokens=64)
    monkeypatch.setattr(train_demo_drafter, "RECIPE", recipe)
    prompts = [[5, 6, 7 + row] for row in range(train_demo_drafter.HELD_OUT + 8)]
    answers = write_answers(load_model(source, "float32"), prompts, [0.8] * len(prompts), 12, [], 0)
    texts = [replace(answer, hidden=torch.empty(0), argmax=torch.empty(0)) for answer in answers]
    card = train_demo_drafter.train(source, texts, tmp_path / "draft", most_s=4.0)
    assert card.text_tokens == 8 * 12
    assert len(card.agreement_by_depth) == recipe.parallel
    draft = LocalEngine(str(source.path), drafters=("draft_model",), draft_model=str(tmp_path / "draft"))
    assert len(draft.generate([[5, 6, 7]], max_new_tokens=8, ignore_eos=True)[0].token_ids) == 8


def test_labels_are_those_of_the_writing_target(tmp_path):
    source = ModelSource("t", "t", save_tiny_model(tmp_path, "llama", 3, layers=2, max_positions=256))
    target = load_model(source, "float32")
    answers = write_answers(target, [[5, 6, 7], [9] * 5], [0.0, 0.8], 12, [], 0)
    texts = [replace(answer, hidden=torch.empty(0), argmax=torch.empty(0)) for answer in answers]
    for found, wanted in zip(train_demo_drafter.labelled(target, texts[::-1]), answers[::-1], strict=True):
        torch.testing.assert_close(found.hidden, wanted.hidden, atol=1e-5, rtol=0)
        assert torch.equal(found.argmax, wanted.argmax)


@pytest.mark.parametrize("row_steps", [(), (1, 2, 4, 8, 12, 16, 32)], ids=["any number of rows", "padded"])
def test_the_constants_of_a_target_are_found_in_its_rounds(row_steps):
    told = ForwardOptions(
        row_times=tuple((rows, 0.01 + 0.002 * rows) for rows in (1, 2, 4, *PROMPT_ROWS)),
        scored_row_s=0.001,
        sequence_s=0.0005,
        context_token_s=2e-6,
        row_steps=row_steps,
    )
    times = MeasuredTimes(told)

    def mean_round(rows: int, scored: int, sequences: int, context: int) -> MeanRound:
        seconds = times.seconds(rows, sequences, context, rows - scored)
        return MeanRound(f"{rows} {sequences}", 1, padded(rows, row_steps), scored, sequences, context, seconds)

    rounds = [mean_round(count, count, count, 30 * count) for count in (1, 2, 4, 8, 16)]
    rounds += [mean_round(2 * count, 2 * count, count, 30 * count) for count in (1, 2, 4, 8, 16)]
    rounds += [mean_round(8, 8, 8, 8 * 280), mean_round(28, 12, 12, 12 * 40)]
    rounds += [mean_round(rows, 1, 1, 0) for rows in PROMPT_ROWS]
    found = fit_forward(rounds, row_steps)
    assert found.row_steps == row_steps
    assert [seconds for _, seconds in found.row_times] == pytest.approx([seconds for _, seconds in told.row_times])
    assert found.scored_row_s == pytest.approx(told.scored_row_s)
    assert found.sequence_s == pytest.approx(told.sequence_s)
    assert found.context_token_s == pytest.approx(told.context_token_s)


def test_rows_are_counted_as_the_target_pads_them():
    steps = (1, 2, 4, 8, 12, 16)
    assert [padded(rows, steps) for rows in (1, 3, 8, 9, 17)] == [1, 4, 8, 12, 17]
    # Between two steps, each number of rows as often as the others.
    assert [mean_padded(rows, steps) for rows in (3.5, 10.5, 20.0)] == [3.5, 12.0, 20.0]
    assert [padded(9, ()), mean_padded(10.5, ())] == [9, 10.5]


def test_no_phase_has_more_requests_at_a_time_than_it_is_to_have_where_all_end_at_once():
    events, num_open, most = Events(), 0, Counter()  # most: at a time, by phase
    texts = SimpleNamespace(prompts=[np.zeros(3, np.int32)] * 20, answers=[np.zeros(2, np.int32)] * 20)

    def send(turn):
        nonlocal num_open
        num_open += 1
        phase = len(load.began)
        most[phase] = max(most[phase], num_open)
        events.at(int(events.now) + 1.0, end, turn)  # as all others

    def end(turn):
        nonlocal num_open
        num_open -= 1
        load.ended(turn, True)

    phases = [(number, list(range(first, last))) for number, first, last in ((4, 0, 8), (1, 8, 12), (4, 12, 20))]
    load = PhasedLoad(events, texts, phases, send)
    events.run(30.0)
    assert (most, num_open, len(load.began)) == ({1: 4, 2: 1, 3: 4}, 0, 4)


def test_the_pace_of_each_session_is_taken_out_of_its_rounds():
    plain = [MeanRound(f"decoding {count}", 1, count, count, count, 0.0, 0.01 * count) for count in (1, 2, 4, 8, 16)]
    drafts = [MeanRound("drafts of 4", 3, 12, 12, 4, 0.0, 0.2)]  # in the third session alone
    slow = [replace(told, session=2, target_s=1.3 * told.target_s) for told in plain]
    slowest = [replace(told, session=3, target_s=1.6 * told.target_s) for told in (*plain, *drafts)]
    found = {(told.kind, told.session): told.target_s for told in at_one_pace([*plain, *slow, *slowest])}
    for told in plain:
        for session in (1, 2, 3):
            assert found[told.kind, session] == pytest.approx(1.3 * told.target_s)  # the median session's
    assert found["drafts of 4", 3] == pytest.approx(1.3 * 0.2)

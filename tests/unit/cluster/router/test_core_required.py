"""Rows that drafters require, through the router: who gets them, what they cost, and lookahead decoding with them
(`cluster.router.cpu_drafting`), as a round's `trace` shows them."""

import numpy as np
import pytest

from actors.drafters.lookahead import LookaheadDrafter
from actors.errors import InvalidRequest
from actors.messages import GenerationRequest, VerifyBatch, VerifyResult
from cluster.config import SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.trace import trace_round
from paceline_testing.rounds import serve as toy_serve
from paceline_testing.rounds import texts_of, toy_core, toy_info, toy_request, toy_round
from paceline_testing.toy_target import ToyTarget, Wheel

VOCAB = 89
WINDOW = 19  # rows of the default window


def core_with(
    *requests: GenerationRequest, drafter: LookaheadDrafter | None = None, profile=(), **options
) -> RouterCore:
    info = toy_info(VOCAB, step_times=list(profile))
    drafters = {"lookahead": drafter or LookaheadDrafter()}
    speculation = SpeculationConfig(drafters=("lookahead",), **options)
    return toy_core(info, *requests, drafters=drafters, speculation=speculation)


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **fields) -> GenerationRequest:
    return toy_request(name, prompt, **{"max_new_tokens": 80} | fields)


def serve(core: RouterCore, target: ToyTarget) -> tuple[dict[str, list[int]], list[VerifyBatch]]:
    """Tokens of every request, and what was sent to the target."""
    batches: list[VerifyBatch] = []

    def verify(batch: VerifyBatch) -> VerifyResult:
        batches.append(batch)
        return target.verify(batch)

    texts = texts_of(toy_serve(core, verify))
    return texts, [batch for batch in batches if batch.items]


def nodes(batch: VerifyBatch) -> list[int]:
    return [len(item.tree) for item in batch.items]


def flat(rows: int) -> float:
    return 0.01 + 1e-6 * rows


def test_lookahead_writes_the_targets_text_in_fewer_rounds():
    target = Wheel(VOCAB, seconds=flat)
    one = request(prompt=(4, 9, 40, 62, 77, 23, 1))  # what windows are drawn from
    core = core_with(one)
    text, batches = serve(core, target)
    assert text["r"] == target.complete(one)[0]
    assert len(batches) < 60
    assert core.counters.accepted_tokens["lookahead"] == 80 - len(batches)
    assert core.counters.draft_tokens == sum(map(sum, map(nodes, batches))) == core.counters.rows - len(batches) - 6
    assert core.counters.invalid_trees.total() == core.counters.drafter_errors.total() == 0


@pytest.mark.parametrize("max_rows", [20, 64, 100])
def test_no_round_has_more_rows_than_allowed_and_windows_take_turns(max_rows):
    drafter = LookaheadDrafter()
    assert drafter.most_required == WINDOW
    target = Wheel(VOCAB, seconds=flat)
    requests = [request(f"r{index}", (index + 1, 7)) for index in range(6)]
    core = core_with(*requests, drafter=drafter, max_rows=max_rows, max_draft_tokens=3)
    text, batches = serve(core, target)
    assert text == {one.request_id: target.complete(one)[0] for one in requests}
    assert all(sum(nodes(batch)) <= max_rows for batch in batches)
    assert all(count <= WINDOW + 3 for batch in batches for count in nodes(batch))
    with_window = [[item.delta.seq_id for item in batch.items if len(item.tree) > 3] for batch in batches[1:13]]
    assert max(map(len, with_window)) == max(1, max_rows // 2 // WINDOW)
    turns = [sum(seq_id in round for round in with_window) for seq_id in {seq for one in with_window for seq in one}]
    assert len(turns) == 6
    assert max(turns) - min(turns) <= 1


def test_a_round_in_which_no_draft_could_pay_computes_no_window():
    def seconds(rows: int) -> float:
        return 0.01 * rows**2

    target = Wheel(VOCAB, seconds=seconds)
    profile = tuple((rows, seconds(rows)) for rows in (1, 8, 16, 32))
    core = core_with(*(request(f"r{index}", (index + 1,)) for index in range(8)), profile=profile)
    _, batches = serve(core, target)
    full = [batch for batch in batches if len(batch.items) == 8][8:]
    assert sum(any(nodes(batch)) for batch in full) < len(full) / 4  # now and then it is tried


def test_what_is_required_is_no_reason_to_verify_less():
    """Beside a window a further row costs a smaller share of the round."""
    target = Wheel(VOCAB, seconds=lambda rows: 0.01 * rows)
    core = core_with(request())
    text, batches = serve(core, target)
    assert text["r"] == target.complete(request())[0]
    assert all(count in (0, *range(5, 64)) for batch in batches for count in nodes(batch))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_draft_tokens": 0},
        {"drafters": ()},
        {"max_new_tokens": 1},
    ],
)
def test_a_request_without_drafts_has_no_window(fields):
    target = Wheel(VOCAB, seconds=flat)
    core = core_with(request(**fields))
    text, batches = serve(core, target)
    assert text["r"] == target.complete(request(**fields))[0]
    assert not any(map(sum, map(nodes, batches)))


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 20])
def test_pitfall_12_the_window_makes_no_token_too_many_and_stays_within_the_models_positions(count):
    target = Wheel(VOCAB, max_model_len=256, seconds=flat)  # refuses a node beyond its positions
    one = request(prompt=(tuple(range(80)) * 4)[: 256 - count], max_new_tokens=count)
    core = core_with(one)
    text, _ = serve(core, target)
    assert text["r"] == target.complete(one)[0]
    assert len(text["r"]) == count


def test_pitfall_1_a_stop_token_in_the_window_ends_the_answer_there_and_does_not_stop_the_window():
    target = Wheel(VOCAB, seconds=flat)
    whole = target.complete(request())[0]
    for stop in (whole[0], whole[1], whole[30], whole[79]):
        core = core_with(request(prompt=(stop, 1, 2, 3), stop_token_ids=(stop,)))  # windows are drawn from the prompt
        text, batches = serve(core, target)
        assert text["r"] == whole[: whole.index(stop)]
        sizes = [count for batch in batches[:3] for count in nodes(batch)]
        assert all(sizes)  # the base row holds stop tokens, and is computed


def test_pitfall_2_a_phrase_that_is_right_to_its_end_yields_the_targets_next_token_too():
    target = Wheel(VOCAB, seconds=flat)
    prompt = target.complete(request(max_new_tokens=VOCAB))[0]  # the text goes on as it began
    one = request(prompt=tuple(prompt), max_new_tokens=60)
    text, batches = serve(core_with(one), target)
    assert text["r"] == target.complete(one)[0]
    assert len(batches) <= 60 / 5 + 3  # four tokens of a phrase and the target's own


def test_the_trace_of_a_round_counts_a_window_and_calls_nothing_of_it_rejected():
    for prompt, num_guesses in (((1, 2, 3), 0), ((1, 2, 3, 4, 5, 1), 4)):  # a phrase of four tokens behind the last one
        target = Wheel(VOCAB, seconds=flat)
        core = core_with(request(prompt=prompt))
        outcome = toy_round(core, target.verify)
        assert outcome.round is not None
        assert outcome.round.chosen is not None
        chosen = outcome.round.chosen
        trace = trace_round(
            outcome.round, outcome.result, outcome.events, source_names=core.source_names, draft_s=0.0, verify_s=0.1
        )
        assert trace.verified == {"lookahead": len(chosen)}
        assert np.count_nonzero(chosen.nodes["sources"]) == num_guesses < chosen.nodes["is_required"].sum()
        assert len(trace.rejected) == num_guesses
        assert trace.depths == (((4, 0),) if num_guesses else ())


def test_a_window_that_no_round_has_room_for_is_refused_with_the_limit():
    with pytest.raises(InvalidRequest, match=r"^speculation\.max_rows is 64; it must be at least 120 "):
        core_with(drafter=LookaheadDrafter(window_size=20, lookahead_level=7))
    core_with(drafter=LookaheadDrafter(window_size=20, lookahead_level=7), max_rows=120)


def test_under_rejection_there_are_no_windows_that_rounds_need_room_for():
    one = request()
    core = core_with(one, drafter=LookaheadDrafter(window_size=20), max_rows=2, acceptance="rejection")
    target = Wheel(VOCAB, seconds=flat)
    text, batches = serve(core, target)
    assert text["r"] == target.complete(one)[0]
    assert 0 < max(max(nodes(batch)) for batch in batches) <= 2

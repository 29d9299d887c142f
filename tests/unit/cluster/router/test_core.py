"""The router with toy targets and drafters, round by round: `RouterCore` with its parts.

Those without a test file of their name: `cluster.router.scheduler`, `cluster.router.sequence`, `cluster.router.round`,
`cluster.router.open_requests`, `cluster.router.verdicts`, `cluster.router.target_blocks`, `cluster.router.drafting`,
`cluster.router.cpu_drafting`, `cluster.router.worker_drafting`, `cluster.router.draft_workers`,
`cluster.router.proposals`, `cluster.router.rejection_chain`, `cluster.router.counters`.
"""

import logging

import msgspec
import numpy as np
import pytest

from actors.draft_tree import DraftTree, TopProbs
from actors.errors import DeadlineExceeded, InvalidRequest, LinkError, ModelError, Overloaded
from actors.messages import (
    DraftResult,
    Refusal,
    SamplingParams,
    TokenChunk,
    Verdict,
    VerifyResult,
    decode_message,
    encode_message,
)
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.round import RequestFailed
from cluster.router.run_round import no_drafts
from cluster.router.worker_drafting import DraftShape
from paceline_testing.rounds import serve as toy_serve
from paceline_testing.rounds import toy_core, toy_info, toy_request, toy_round
from paceline_testing.toy_drafters import ChainDrafter, ToyDraftWorker, right
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 50
EOS = 49


class Scripted(ToyTarget):
    """Says the tokens of a script, by position."""

    def __init__(self, script, num_prompt=1, **options):
        super().__init__(VOCAB_SIZE, order=1 << 20, **options)
        self.script = script
        self.num_prompt = num_prompt

    def next_token(self, tokens):
        return self.script[len(tokens) - self.num_prompt]


@pytest.fixture
def target():
    return Scripted(list(range(2, 40)))


@pytest.fixture
def toy_target():
    return ToyTarget(VOCAB_SIZE)


@pytest.fixture
def worker(toy_target):
    return ToyDraftWorker(right(toy_target))


def request(request_id="r", prompt=(1,), **fields):
    return toy_request(request_id, prompt, **{"max_new_tokens": 20, "stop_token_ids": (EOS,)} | fields)


def make_core(
    *requests, chain=None, drafters=None, workers=(), max_model_len=256, branch=1, speculation=None, profile=(),
    **config,
):  # fmt: skip
    """chain: the guess of a drafter of chains. workers: names of draft workers."""
    info = toy_info(VOCAB_SIZE, max_model_len, 4, step_times=list(profile))
    drafters = drafters or ({"chain": ChainDrafter(chain)} if chain else {})
    limits, shape = RouterConfig(**config), DraftShape(4, branch)
    core = toy_core(
        info, *requests, drafters=drafters, config=limits, speculation=speculation, draft_shapes={"draft": shape}
    )
    core.set_draft_workers(list(workers))
    return core


def one_round(core, target, now=0.0, draft=no_drafts):
    outcome = toy_round(core, target.verify, now, draft)
    return outcome.events, outcome.batch


def assembled(core):
    """A round up to its batch, without draft workers."""
    round, _ = core.plan_round(0.0)
    core.draft_locally(round)
    return round, core.assemble(round, {})


def serve(core, target, draft=no_drafts):
    return toy_serve(core, target.verify, draft)


def text_of(events, request_id="r"):
    chunks = [event for event in events if event.request_id == request_id]
    assert all(isinstance(chunk, TokenChunk) for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].finish_reason


@pytest.mark.parametrize("end", range(9))
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_a_stop_token_ends_the_request_wherever_a_round_meets_it(end, count):
    script = [5, 6, 7, 8, 9, 10, 11, 12]
    target = Scripted([*script[:end], EOS, *range(20, 45)])
    core = make_core(request(), chain=right(target, count))
    assert text_of(serve(core, target)) == (script[:end], "stop")


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("count", [0, 2, 16])
def test_max_new_tokens_is_exact(target, max_new_tokens, count):
    core = make_core(request(max_new_tokens=max_new_tokens), chain=right(target, count))
    assert text_of(serve(core, target)) == (list(range(2, 2 + max_new_tokens)), "length")


@pytest.mark.parametrize("num_prompt", [1, 10, 14, 15])
def test_max_model_len_is_exact(num_prompt):
    target = Scripted(list(range(2, 40)), num_prompt, max_model_len=16)
    core = make_core(request(prompt=[1] * num_prompt, max_new_tokens=100), chain=right(target), max_model_len=16)
    assert text_of(serve(core, target)) == (list(range(2, 18 - num_prompt)), "length")


def test_a_prompt_without_room_for_a_token_is_refused_with_the_limit():
    core = make_core(max_model_len=16)
    for length in (0, 16, 17):
        with pytest.raises(InvalidRequest, match="at most 15 tokens"):
            core.add(request(prompt=[1] * length), 0.0)
    core.add(request(prompt=[1] * 15), 0.0)
    with pytest.raises(InvalidRequest, match="request_id"):
        core.add(request(), 0.0)
    assert core.num_waiting == 1


def test_a_full_queue_refuses_and_says_when_to_come_back(target):
    core = make_core(*(request(f"r{index}", max_new_tokens=4) for index in range(5)), max_running=2, max_waiting=3)
    with pytest.raises(Overloaded) as unknown:
        core.add(request("late"), 0.0)
    assert unknown.value.retry_after_s == 1.0
    now = 0.0
    while core.num_waiting > 1:
        now += 5.0
        one_round(core, target, now)
    for index in range(5, 7):
        core.add(request(f"r{index}"), now)
    with pytest.raises(Overloaded) as known:
        core.add(request("late"), now)
    assert 5.0 <= known.value.retry_after_s <= 60.0
    with pytest.raises(Overloaded) as second:  # the router asked before has room earlier
        core.add(request("late", refusal=Refusal("other", 2.0)), now)
    assert second.value.retry_after_s == 2.0
    with pytest.raises(Overloaded):  # another router is asked, which counts it
        core.add(request("late", asks_another=True), now)
    assert core.counters.refused == 3


def test_after_a_burst_clients_come_back_when_half_of_the_queue_is_served(target):
    core = make_core(max_running=4, max_waiting=16)
    now = 0.0

    def fill():
        for index in range(20 - core.num_running - core.num_waiting):
            core.add(request(f"{now}-{index}", max_new_tokens=4), now)
        with pytest.raises(Overloaded) as refused:
            core.add(request("late"), now)
        return refused.value.retry_after_s

    for index in range(8):  # few calls, far between
        now += 100.0
        core.add(request(f"alone {index}", max_new_tokens=4), now)
        while core.num_running or core.num_waiting:
            now += 0.5
            one_round(core, target, now)
    for _ in range(2):  # the second time, the rate of the burst itself is known
        told, began = fill(), now
        one_round(core, target, now)
        while core.num_waiting > 8:
            now += 0.5
            one_round(core, target, now)
        assert 0.5 * (now - began) <= told <= 2 * (now - began)


def test_a_stream_that_another_router_began_is_taken_beyond_a_full_queue_and_runs_next(target):
    core = make_core(max_running=2, max_waiting=1)
    for name in ("runs", "too", "waits"):
        core.add(request(name, max_new_tokens=2 if name == "runs" else 8), 0.0)
    one_round(core, target)
    with pytest.raises(Overloaded):
        core.add(request("late"), 0.0)
    core.add(request("begun", prompt=[1, 2], num_output_in_prompt=1), 0.0)
    assert core.num_waiting == 2
    one_round(core, target)  # the last one of "runs"
    assert [event.request_id for event in one_round(core, target)[0]] == ["too", "begun"]
    assert core.num_waiting == 1


def test_a_queue_of_no_length_still_lets_requests_run():
    core = make_core(request("a"), request("b"), max_running=2, max_waiting=0)
    with pytest.raises(Overloaded):
        core.add(request("c"), 0.0)
    core.plan_round(0.0)
    assert (core.num_running, core.num_waiting) == (2, 0)


def test_a_deadline_ends_running_and_waiting_requests_alike(target):
    core = make_core(
        request("runs", timeout_s=1.0),
        request("waits", timeout_s=0.5),
        request("stays", max_new_tokens=1),
        max_running=1,
    )
    assert [event.request_id for event in one_round(core, target, 0.4)[0]] == ["runs"]
    events, _ = one_round(core, target, 0.6)
    assert isinstance(events[0], RequestFailed)
    assert events[0].request_id == "waits"
    assert isinstance(events[0].error, DeadlineExceeded)
    events, batch = one_round(core, target, 1.1)
    assert [event.request_id for event in events] == ["runs", "stays"]
    assert len(batch.finished) == 1
    assert not core.num_running


def test_deadlines_of_ended_requests_do_not_pile_up():
    target = Scripted([5])
    core = make_core()
    for index in range(500):
        core.add(request(f"r{index}", max_new_tokens=1, timeout_s=3600.0), 0.0)
        one_round(core, target)
    assert not core.num_running
    assert len(core._requests._deadlines) < 100


@pytest.mark.parametrize("moment", ["waiting", "running", "planned", "assembled", "verified"])
def test_a_cancelled_request_ends_at_once_with_nothing_after_it(target, moment):
    core = make_core(max_running=1)
    if moment == "waiting":
        core.add(request("other", max_new_tokens=1), 0.0)
    core.add(request(), 0.0)
    events = []
    if moment not in ("waiting", "planned"):
        events += one_round(core, target)[0]
    if moment in ("waiting", "running"):
        assert core.cancel("r")
    round, more = core.plan_round(0.0)
    events += more
    if moment == "planned":
        assert core.cancel("r")
    batch = core.assemble(round, {})
    if moment == "assembled":
        assert core.cancel("r")
    result = target.verify(batch)
    if moment == "verified":
        assert core.cancel("r")
    events += core.commit(round, result, 0.0)
    events += serve(core, target)
    assert text_of(events)[1] == "cancelled"
    assert len(text_of(events)[0]) == (1 if moment in ("running", "assembled", "verified") else 0)
    assert target.num_sequences == 0
    assert not core.cancel("r")


def test_a_cancelled_request_that_waited_frees_its_place_at_once():
    core = make_core(request("a"), request("b"), max_running=1, max_waiting=1)
    core.cancel("b")
    core.add(request("c"), 0.0)
    assert core.num_waiting == 2


def test_chunks_carry_sources_and_the_last_one_the_statistics():
    target = Scripted([5, 6, 7, 8, 9, 10, 11, 12])
    core = make_core(
        request(max_new_tokens=6),
        drafters={"chain": ChainDrafter(right(target, 2)), "wrong": ChainDrafter(lambda tokens, _: [5, 48])},
    )
    first, _ = one_round(core, target)
    last, _ = one_round(core, target)
    assert [chunk.token_ids for chunk in first + last] == [(5, 6, 7), (8, 9, 10)]
    assert first[0].sources[1:] == ("chain", "target")
    assert last[0].sources == ("chain", "chain", "target")
    assert first[0].stats is None
    stats = last[0].stats
    assert stats.rounds == 2
    assert stats.target_rows == 2 + stats.draft_tokens
    assert sum(stats.accepted_tokens.values()) == 4


def test_every_chunk_has_the_statistics_so_far_where_the_request_wants_them():
    target = Scripted([5, 6, 7, 8, 9, 10])
    core = make_core(request(max_new_tokens=6, wants_stats=True), chain=right(target, 2))
    chunks = one_round(core, target)[0] + one_round(core, target)[0]
    assert [chunk.stats.rounds for chunk in chunks] == [1, 2]
    assert [chunk.stats.accepted_tokens for chunk in chunks] == [{"chain": 2}, {"chain": 4}]


def test_the_first_chunk_tells_how_much_of_the_prompt_was_cached():
    target = Scripted(list(range(2, 40)), 20, num_cached_tokens=12)
    core = make_core(request(prompt=[1] * 20))
    chunks = serve(core, target)
    assert [chunk.num_cached_tokens for chunk in chunks] == [12] + [0] * 19


def test_a_long_prompt_delays_neither_decoding_nor_shorter_prompts():
    target = ToyTarget(VOCAB_SIZE, 1024)
    core = make_core(request("decodes", max_new_tokens=200, stop_token_ids=()), max_model_len=1024, max_prefill_rows=16)
    one_round(core, target)
    core.add(request("long", prompt=[2] * 400, stop_token_ids=()), 0.0)
    core.add(request("short", prompt=[3] * 24, max_new_tokens=5, stop_token_ids=()), 0.0)
    finished = {}
    for index in range(60):
        events, batch = one_round(core, target)
        assert any(event.request_id == "decodes" for event in events)
        assert sum(item.max_rows for item in batch.items if item.max_rows > 1) <= 16
        for event in events:
            finished.setdefault(event.request_id, index)
    assert finished["short"] <= 3
    assert finished["long"] <= 30


def test_a_prompt_that_turns_out_to_be_cached_emits_before_it_was_expected_to():
    target = Scripted(list(range(2, 40)), 40, num_cached_tokens=36)
    core = make_core(request(prompt=[1] * 40, max_new_tokens=3), max_prefill_rows=8)
    events, _ = one_round(core, target)
    assert events[0].token_ids == (2,)
    assert text_of(events + serve(core, target)) == ([2, 3, 4], "length")


def test_a_stale_sequence_is_sent_again_from_the_start():
    target = Scripted(list(range(2, 40)), 3)
    core = make_core(request(prompt=[1, 1, 1]))
    one_round(core, target)
    target.lose_all()
    events, batch = one_round(core, target)
    assert not events
    assert (batch.items[0].delta.start, batch.items[0].begin) == (3, None)
    events, batch = one_round(core, target)
    assert batch.items[0].delta.token_ids.tolist() == [1, 1, 1, 2]
    assert batch.items[0].begin is not None
    assert events[0].token_ids == (3,)


@pytest.mark.parametrize("was_carried_out", [False, True])
def test_an_abandoned_round_loses_nothing_whether_the_target_took_it_or_not(target, was_carried_out):
    core = make_core(request(max_new_tokens=9), chain=right(target, 2))
    events, _ = one_round(core, target)
    round, batch = assembled(core)
    result = target.verify(batch) if was_carried_out else None
    core.abandon_round(round)
    if result is not None:
        assert core.commit(round, result, 0.0) == []
    events += serve(core, target)
    assert text_of(events) == (list(range(2, 11)), "length")
    assert core.counters.stale_sequences == was_carried_out


@pytest.mark.parametrize("is_declined", [False, True])
def test_a_round_that_the_target_declines_is_no_failure_of_its_sequences(target, is_declined):
    core = make_core(request(max_new_tokens=9))
    one_round(core, target)
    round, _ = assembled(core)
    core.abandon_round(round, is_declined=is_declined)
    assert [entry.sequence.target.num_failed_rounds for entry in round.entries] == [0 if is_declined else 1]


def test_freed_sequences_are_told_again_when_the_round_that_told_them_is_abandoned():
    target = Scripted([EOS])
    core = make_core(request())
    one_round(core, target)
    round, told = assembled(core)
    assert len(told.finished) == 1
    core.abandon_round(round)
    round, again = assembled(core)
    assert again.finished == told.finished
    core.commit(round, VerifyResult(round.round_id, []), 0.0)
    assert not core.has_work


@pytest.mark.parametrize("moment", ["between", "planned", "assembled"])
def test_a_new_target_takes_over_without_losing_or_repeating_a_token(moment):
    target = Scripted(list(range(2, 40)), 2)
    core = make_core(request(prompt=[1, 1]), chain=right(target, 1))
    events = one_round(core, target)[0] + one_round(core, target)[0]
    if moment == "between":
        core.target_lost()
    else:
        round, _ = core.plan_round(0.0)
        result = target.verify(core.assemble(round, {})) if moment == "assembled" else None
        core.target_lost()
        if result is not None:
            assert core.commit(round, result, 0.0) == []
    target.lose_all()
    round, batch = assembled(core)
    assert batch.items[0].delta.start == 0
    assert batch.items[0].begin.num_prompt_tokens == 2
    events += core.commit(round, target.verify(batch), 0.0) + serve(core, target)
    assert text_of(events) == (list(range(2, 22)), "length")


def serve_with_failures(core, target, is_failing, most_rounds=300):
    """All events until the router is idle, and the sequences of every batch; a failing target drops everything."""
    events, batches = [], []
    for _ in range(most_rounds):
        if not core.has_work:
            return events, batches
        round, more = core.plan_round(0.0)
        events += more
        if round is None:
            continue
        core.draft_locally(round)
        batch = core.assemble(round, {})
        batches.append([item.delta.seq_id for item in batch.items])
        if is_failing(batch):
            target.lose_all()
            core.abandon_round(round, is_cleared=True)
        else:
            events += core.commit(round, target.verify(batch), 0.0)
    raise AssertionError("the router does not come to an end")


@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.parametrize("poison_at", [30, 33])
def test_a_request_that_fails_the_target_fails_alone(poison_at, chunk):
    """Its prompt takes several rounds with chunk 4, so rounds that compute it again succeed before one fails."""
    target = ToyTarget(VOCAB_SIZE, eos_token_id=None)
    innocent = [request(f"i{index}", range(1, 2 + index), stop_token_ids=(), max_new_tokens=80) for index in range(6)]
    guilty = request("g", range(1, 31), stop_token_ids=())
    core = make_core(*innocent[:3], guilty, *innocent[3:], chain=right(target, 3), max_prefill_rows=chunk)
    fatal = core._requests.by_id["g"].seq_id
    rows = {}

    def is_failing(batch):
        for item in batch.items:
            if item.delta.seq_id == fatal:
                if item.delta.start == 0:
                    rows.clear()
                done = rows.get("done", 0)
                rows["done"] = min(item.delta.start + len(item.delta.token_ids), done + item.max_rows)
                if rows["done"] >= poison_at:
                    return True
        return False

    events, batches = serve_with_failures(core, target, is_failing)
    for one in innocent:
        assert text_of(events, one.request_id) == target.complete(one)
    ends = [event for event in events if isinstance(event, RequestFailed)]
    assert [(end.request_id, type(end.error)) for end in ends] == [("g", ModelError)]
    assert 4 <= core.counters.abandoned_rounds <= 6
    last = max(index for index, batch in enumerate(batches) if fatal in batch)
    assert batches[last] == [fatal]
    assert not core.has_work


def test_sequences_that_were_only_beside_a_failure_are_together_again_soon(target):
    core = make_core(*(request(str(index), max_new_tokens=12) for index in range(4)))
    failures = iter([True, True])
    events, batches = serve_with_failures(core, target, lambda batch: next(failures, False))
    sizes = [len(batch) for batch in batches if batch]
    assert sizes[:2] == [4, 4]
    assert sizes[2] == 1
    assert 4 in sizes[3:12]  # each has emitted something alone, and is beyond suspicion
    for index in range(4):
        assert text_of(events, str(index)) == (list(range(2, 14)), "length")


def test_new_requests_do_not_wait_until_all_that_are_isolated_have_been_tried(target):
    core = make_core(request("slow", [1], max_new_tokens=2), max_prefill_rows=1)
    for _ in range(2):
        core.abandon_round(core.plan_round(0.0)[0])
    core.add(request("new", max_new_tokens=3), 0.0)
    slow, new = (core._requests.by_id[name].seq_id for name in ("slow", "new"))
    events, batches = serve_with_failures(core, target, lambda batch: slow in [one.delta.seq_id for one in batch.items])
    assert batches[:4] == [[slow], [new], [slow], [new]]
    ends = {event.request_id: getattr(event, "finish_reason", "failed") for event in events}
    assert ends == {"slow": "failed", "new": "length"}


def test_a_result_of_another_round_is_an_error_and_changes_nothing(target):
    core = make_core(request())
    round, batch = assembled(core)
    result = target.verify(batch)
    with pytest.raises(LinkError, match="expected 1"):
        core.commit(round, msgspec.structs.replace(result, round_id=7), 0.0)
    with pytest.raises(RuntimeError, match="open"):
        core.plan_round(0.0)
    assert core.commit(round, result, 0.0)[0].token_ids == (2,)


@pytest.mark.parametrize(
    ("token", "path", "nodes"),
    [(VOCAB_SIZE, [], 3), (-2, [], 3), (-1, [0], 3), (2, [], 4), (2, [], -1), (2, [0, 1], 1)]
    + [(2, path, 3) for path in ([1], [0, 0], [0, 2], [3], [-1])],
)
def test_a_verdict_that_cannot_be_true_is_not_believed_and_the_first_one_is_logged(target, token, path, nodes, caplog):
    core = make_core(request(), chain=lambda tokens, _: [2, 3, 4])
    round, batch = assembled(core)
    assert batch.items[0].tree.parents.tolist() == [-1, 0, 1]
    seq_id = batch.items[0].delta.seq_id
    target.verify(batch)
    verdict = Verdict(seq_id, 1, 4, token, np.array(path, np.int32), 0, nodes)
    assert not core.commit(round, VerifyResult(round.round_id, [verdict]), 0.0)
    round, _ = assembled(core)
    assert not core.commit(round, VerifyResult(round.round_id, [verdict]), 0.0)
    (logged,) = caplog.messages
    assert f"sequence {seq_id} is absent or impossible" in logged
    target.lose_all()
    assert text_of(serve(core, target)) == (list(range(2, 22)), "length")


def test_a_sequence_that_can_never_fit_fails_and_says_why():
    target = Scripted(list(range(2, 40)), 12, total_blocks=4, block_size=4)
    core = make_core(request(prompt=[1] * 12), request("small", max_new_tokens=2))
    events = serve(core, target)
    failed = [event for event in events if isinstance(event, RequestFailed)]
    assert [event.request_id for event in failed] == ["r"]
    assert "16 tokens" in str(failed[0].error)
    said = [chunk.token_ids[0] for chunk in events if chunk.request_id == "r" and chunk not in failed]
    assert said == [2, 3, 4, 5, 6]


def test_a_sequence_that_would_fit_waits_for_blocks_held_for_a_router_that_is_gone():
    target = ToyTarget(VOCAB_SIZE, total_blocks=8, block_size=4)
    lost, heir = make_core(), make_core()
    lost.add(request("lost", prompt=[1] * 20, stop_token_ids=()), 0.0)
    one_round(lost, target)
    held = list(target._sequences)
    one = request("heir", prompt=[2] * 16, max_new_tokens=8, stop_token_ids=())
    heir.add(one, 0.0)
    events = [event for index in range(50) for event in one_round(heir, target, index * 0.05)[0]]
    assert events == []
    target.lose(held[0])  # idle for too long
    assert text_of(serve(heir, target), "heir") == target.complete(one)


def test_the_youngest_makes_room_for_the_oldest_and_comes_back_first():
    target = ToyTarget(VOCAB_SIZE, total_blocks=8, block_size=4)
    requests = [request(name, prompt=[1] * 8, stop_token_ids=()) for name in ("old", "young", "waits")]
    core = make_core(*requests, max_running=2)
    events = serve(core, target)
    ends = [event.request_id for event in events if event.finish_reason]
    assert ends == ["old", "young", "waits"]
    assert core.counters.preempted >= 1
    for one in requests:
        assert text_of(events, one.request_id) == target.complete(one)


def test_drafts_are_given_up_before_anyone_is_preempted():
    target = Scripted(list(range(2, 40)), 8, total_blocks=8, block_size=4)
    core = make_core(
        request("few", prompt=[1] * 8, max_new_tokens=8),
        request("many", prompt=[1] * 8, max_new_tokens=16),
        chain=lambda tokens, most: [48] * min(most, 16),
        max_running=2,
    )
    starved = []

    def verify(batch):
        result = target.verify(batch)
        starved.extend(result.starved_seq_ids)
        return result

    events = toy_serve(core, verify)
    assert text_of(events, "few") == (list(range(2, 10)), "length")
    assert text_of(events, "many") == (list(range(2, 18)), "length")
    assert starved
    assert core.counters.preempted == 0


def test_a_drafter_that_fails_is_logged_once_and_counted_always(target, caplog):
    def fail(tokens, most):
        raise RuntimeError("bug")

    core = make_core(request(), drafters={"bad": ChainDrafter(fail), "good": ChainDrafter(right(target, 1))})
    with caplog.at_level(logging.WARNING):
        assert text_of(serve(core, target)) == (list(range(2, 22)), "length")
    assert len(caplog.records) == 1
    assert core.counters.drafter_errors["bad"] >= 10
    assert core.counters.accepted_tokens["good"] >= 9


def test_requests_choose_their_drafters_and_how_much_they_draft(toy_target):
    one, two = ChainDrafter(right(toy_target)), ChainDrafter(right(toy_target))
    core = make_core(drafters={"one": one, "two": two}, speculation=SpeculationConfig(drafters=("one",)))
    for name, fields in (
        ("default", {}),
        ("none", {"drafters": ()}),
        ("other", {"drafters": ("two",)}),
        ("all", {"drafters": ("auto",)}),
        ("few", {"max_draft_tokens": 1}),
        ("zero", {"max_draft_tokens": 0}),
    ):
        core.add(request(name, prompt=[len(name)], stop_token_ids=(), **fields), 0.0)
    _, batch = one_round(core, toy_target)
    assert [len(ids) for ids in (one.asked[0], two.asked[0])] == [3, 2]
    counts = [len(item.tree) for item in batch.items]
    assert counts[1] == counts[5] == 0
    assert counts[4] == 1
    assert min(counts[0], counts[2], counts[3]) > 1


def test_a_target_at_full_load_gets_no_drafts_and_the_drafters_rest():
    profile = [(rows, 0.01 * rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
    target = ToyTarget(VOCAB_SIZE, seconds=lambda rows: 0.01 * rows)
    drafter = ChainDrafter(right(target))
    requests = [request(f"r{index}", prompt=[index], stop_token_ids=(), max_new_tokens=200) for index in range(4)]
    core = make_core(*requests, drafters={"chain": drafter}, profile=profile)
    now = 0.0
    for _ in range(150):
        _, batch = one_round(core, target, now)
        now += 0.01 * sum(item.max_rows + len(item.tree) for item in batch.items)
    # Only the rounds that explore draft at all.
    assert 1 <= len(drafter.asked) <= 6


def test_drafts_that_are_never_right_stop_costing_rows_when_rows_cost():
    target = ToyTarget(VOCAB_SIZE, seconds=lambda rows: 0.02 + 0.004 * rows)
    core = make_core(
        request(stop_token_ids=(), max_new_tokens=200),
        chain=lambda tokens, most: [(target.next_token(tokens) + 1) % VOCAB_SIZE],
    )
    now, spent = 0.0, []
    for _ in range(190):
        _, batch = one_round(core, target, now)
        now += 0.03
        spent.append(len(batch.items[0].tree))
    assert spent[0] == 1
    assert sum(spent[100:]) <= 12


def asking(workers):
    return lambda name, batch: workers[name].draft(batch)


def drafts_of(worker, round):
    return {name: worker.draft(batch) for name, batch in round.asked.batches.items()}


def test_sequences_stick_to_their_worker_and_move_when_it_goes(toy_target):
    workers = {name: ToyDraftWorker(right(toy_target)) for name in ("a", "b", "c")}
    requests = [request(f"r{index}", prompt=[index], stop_token_ids=(), max_new_tokens=60) for index in range(12)]
    core = make_core(*requests, workers=workers, max_running=12, speculation=SpeculationConfig(max_rows=200))
    events = []
    for _ in range(3):
        events += one_round(core, toy_target, draft=asking(workers))[0]
    held = {name: set(worker.sequences) for name, worker in workers.items()}
    assert sum(map(len, held.values())) == 12
    assert max(map(len, held.values())) <= 6
    assert min(map(len, held.values())) >= 1
    core.set_draft_workers(["a", "b"])
    for _ in range(2):
        events += one_round(core, toy_target, draft=asking(workers))[0]
    assert set(workers["a"].sequences) | set(workers["b"].sequences) == set.union(*held.values())
    assert held["a"] <= set(workers["a"].sequences)
    assert all(item.delta.start > 0 for item in workers["a"].batches[-1].items)
    workers["c"] = ToyDraftWorker(right(toy_target))
    core.set_draft_workers(["a", "b", "c"])
    events += serve(core, toy_target, draft=asking(workers))
    assert not workers["c"].batches
    assert not any(worker.sequences for worker in workers.values())
    for one in requests:
        assert text_of(events, one.request_id) == toy_target.complete(one)
    assert core.counters.accepted_tokens["draft_model"] > 200


@pytest.mark.parametrize(
    ("branch", "most", "wanted"), [(1, 16, (4, 4, 1)), (3, 16, (12, 4, 3)), (3, 8, (8, 4, 3)), (3, 2, (2, 4, 3))]
)
def test_draft_workers_are_asked_for_trees_of_the_depth_and_breadth_that_are_set(branch, most, wanted):
    core = make_core(request(stop_token_ids=(), max_draft_tokens=most), branch=branch, workers=["w"])
    round, _ = core.plan_round(0.0)
    (item,) = round.asked.batches["w"].items
    assert (item.max_nodes, item.max_depth, item.branch) == wanted


@pytest.mark.parametrize(("method", "source", "most"), [("lookahead", "ouroboros", 16), ("tree", "draft_model", 12)])
def test_a_draft_worker_drafts_by_lookahead_where_that_is_named(toy_target, worker, method, source, most):
    one = request(stop_token_ids=(), max_new_tokens=60)
    core = make_core(one, branch=3, speculation=SpeculationConfig(drafters=(source,)), workers=["w"])
    assert text_of(serve(core, toy_target, draft=asking({"w": worker}))) == toy_target.complete(one)
    items = [item for batch in worker.batches for item in batch.items]
    assert {item.method for item in items} == {method}
    assert max(item.max_nodes for item in items) == most
    assert set(core.counters.accepted_tokens) == {source}
    assert core.counters.accepted_tokens[source] > 20


SCRIPT = [7 * position % 48 for position in range(200)]


def wrong_first(target):
    """A worker whose first token is wrong in every other draft; those behind are what the target will say."""

    def guess(tokens, count):
        drafts = target.text_after(tokens, count)
        return [48, *drafts[1:]] if drafts and len(worker.batches) % 2 else drafts

    worker = ToyDraftWorker(guess)
    return worker


@pytest.mark.parametrize("is_drawn", [False, True])
def test_under_rejection_a_lookahead_worker_has_trees_but_none_of_drawn_tokens(is_drawn):
    """Its tokens follow from the text, so their confidence may end a draft, and the coupled rule judges them."""
    target = Scripted(list(range(5, 40)))
    core = make_core(rejection(), speculation=SpeculationConfig(drafters=("ouroboros",)), workers=["w"])
    tree = chain_with_probs([5, 6, 40], [0.9, 0.8, 0.7])
    round, _ = core.plan_round(0.0)
    (item,) = round.asked.batches["w"].items
    assert (item.method, item.max_nodes, item.max_depth) == ("lookahead", 16, 4)
    assert item.min_confidence > 0.0
    draft = answer_with(tree if is_drawn else msgspec.structs.replace(tree, probs=None))
    batch = core.assemble(round, {"w": draft("w", round.asked.batches["w"])})
    assert batch.items[0].tree.token_ids.tolist() == ([] if is_drawn else [5, 6, 40])
    assert batch.items[0].tree.probs is None
    assert core.counters.invalid_trees["ouroboros"] == is_drawn
    core.commit(round, target.verify(batch), 0.0)
    assert core.counters.accepted_tokens["ouroboros"] == (0 if is_drawn else 2)


def lookahead_core(*requests):
    return make_core(*requests, speculation=SpeculationConfig(drafters=("ouroboros",)), workers=["w"])


def test_a_lookahead_worker_is_told_once_what_the_target_had_in_mind_at_refused_drafts():
    target = Scripted(SCRIPT)
    worker = wrong_first(target)
    core = lookahead_core(request(stop_token_ids=(), max_new_tokens=60))
    told, refused = [], []
    while core.has_work:
        round, _ = core.plan_round(0.0)
        told += [item.corrections.tolist() for batch in round.asked.batches.values() for item in batch.items]
        assert all(not len(entry.sequence.drafts.pools[0].corrections) for entry in round.entries)
        batch = core.assemble(round, drafts_of(worker, round))
        drafted = [len(item.tree) for item in batch.items]
        assert batch.num_successors == max(map(bool, drafted), default=0)
        assert decode_message(encode_message(batch)).num_successors == batch.num_successors
        result = target.verify(batch)
        core.commit(round, result, 0.0)
        refused += [len(verdict.path) < verdict.num_nodes for verdict in result.verdicts]
    assert sum(refused) >= 3
    assert [bool(texts) for texts in told] == [False, *refused[: len(told) - 1]]
    for texts in filter(None, told):
        assert texts[-1] == -1
        assert len(texts) > 3
        text, part = [1, *SCRIPT], texts[:-1]
        assert any(text[begin : begin + len(part)] == part for begin in range(len(text)))


def test_only_lookahead_workers_are_told_what_the_target_had_in_mind():
    target = Scripted(SCRIPT)
    worker = wrong_first(target)
    core = make_core(
        request(stop_token_ids=(), max_new_tokens=40),
        speculation=SpeculationConfig(drafters=("draft_model",)),
        workers=["w"],
    )
    while core.has_work:
        _, batch = one_round(core, target, draft=asking({"w": worker}))
        assert batch.num_successors == 0
    assert not any(len(item.corrections) for batch in worker.batches for item in batch.items)


@pytest.mark.parametrize("event", ["purge", "purge of another namespace", "worker gone", "other worker", "end"])
def test_what_a_worker_was_to_be_told_is_forgotten_with_its_namespace_its_worker_or_its_sequence(event):
    target = Scripted(SCRIPT)
    worker = wrong_first(target)
    core = lookahead_core(request(stop_token_ids=(), max_new_tokens=60, namespace="a"))
    (sequence,) = core._requests._sequences.values()
    while not len(sequence.drafts.pools[0].corrections):
        one_round(core, target, draft=asking({"w": worker}))
    if event == "purge":
        core.drop("a")
    elif event == "purge of another namespace":
        core.drop("b")
    elif event == "end":
        core.cancel("r")
        core.end_overdue(0.0)
    else:
        core.set_draft_workers([] if event == "worker gone" else ["x"])
    assert bool(len(sequence.drafts.pools[0].corrections)) == (event == "purge of another namespace")


def test_a_stale_draft_worker_is_sent_the_sequence_from_the_start(toy_target, worker):
    core = make_core(request(stop_token_ids=()), workers=["w"])
    one_round(core, toy_target, draft=asking({"w": worker}))
    worker.sequences.clear()
    one_round(core, toy_target, draft=asking({"w": worker}))
    one_round(core, toy_target, draft=asking({"w": worker}))
    assert [batch.items[0].delta.start for batch in worker.batches][::2] == [0, 0]
    assert worker.batches[2].items[0].begin is not None
    assert core.counters.stale_drafts == 1


def test_drafts_that_a_worker_had_ready_and_had_not_are_counted(toy_target, worker):
    core = make_core(request(stop_token_ids=()), workers=["w"])
    for num_ahead, num_ready in ((0, 0), (1, 1), (1, 0), (1, 1)):

        def answer(name, batch, figures=(num_ahead, num_ready)):
            result = worker.draft(batch)
            return DraftResult(result.round_id, result.seq_ids, result.trees, [], 0.0, *figures)

        one_round(core, toy_target, draft=answer)
    assert (core.counters.ready_drafts, core.counters.missed_drafts) == (2, 1)


def test_a_worker_is_asked_for_sequences_that_emit_and_sent_other_prompts_only_when_nobody_waits(toy_target, worker):
    core = make_core(request("long", prompt=[1] * 20, stop_token_ids=()), max_prefill_rows=8, workers=["w"])
    round, _ = core.plan_round(0.0)
    assert round.asked.awaited == ()
    assert [item.max_nodes for item in round.asked.batches["w"].items] == [0]
    core.commit(round, toy_target.verify(core.assemble(round, {"w": worker.draft(round.asked.batches["w"])})), 0.0)
    core.add(request("short", prompt=[1] * 2, stop_token_ids=()), 0.0)
    for _ in range(2):
        round, _ = core.plan_round(0.0)
        for item in round.asked.batches["w"].items if round.asked.batches else []:
            entry = next(entry for entry in round.entries if entry.seq_id == item.delta.seq_id)
            assert entry.emits
            assert item.max_nodes == 4
        core.commit(round, toy_target.verify(core.assemble(round, drafts_of(worker, round))), 0.0)
    assert core.counters.stale_drafts == 0


def test_a_worker_that_does_not_answer_is_asked_ever_more_seldom(toy_target):
    core = make_core(request(stop_token_ids=(), max_new_tokens=100), workers=["w"])
    asked = [0]
    for _ in range(60):
        one_round(core, toy_target)
        asked.append(core.counters.awaited_drafts)
    assert np.flatnonzero(np.diff(asked)).tolist() == [0, 2, 5, 10, 19, 36]
    assert core.counters.late_drafts == core.counters.awaited_drafts == 6


def test_a_slow_draft_model_is_left_alone_and_tried_again_later():
    target = ToyTarget(VOCAB_SIZE, 16_384, seconds=lambda rows: 0.02)
    core = make_core(
        request(stop_token_ids=(), max_new_tokens=16_000, max_draft_tokens=4),
        chain=right(target),
        max_model_len=16_384,
        workers=["w"],
    )
    worker, now, asked = ToyDraftWorker(right(target)), 0.0, 0
    for index in range(2000):
        round, _ = core.plan_round(now)
        core.draft_locally(round)
        results = drafts_of(worker, round)
        now += 0.01 * bool(round.asked.awaited)
        asked += bool(round.asked.awaited) and index >= 20
        result = target.verify(core.assemble(round, results))
        now += 0.02
        core.commit(round, result, now)
    assert 1 <= asked <= 20


@pytest.mark.parametrize("fault", ["round", "lengths", "stranger", "arrays"])
def test_what_a_draft_worker_says_wrongly_is_left_out(toy_target, worker, fault):
    core = make_core(workers=["w"])

    def draft(name, batch):
        good = worker.draft(batch)
        tree = good.trees[0]
        bad = {
            "round": {"round_id": 99},
            "lengths": {"seq_ids": []},
            "stranger": {"seq_ids": [5]},
            "arrays": {"trees": [DraftTree(tree.confidence, tree.parents, tree.token_ids)]},
        }[fault]
        return msgspec.structs.replace(good, **bad)

    core.add(request(stop_token_ids=()), 0.0)
    events, batch = one_round(core, toy_target, draft=draft)
    assert not len(batch.items[0].tree)
    assert len(events[0].token_ids) == 1
    assert core.counters.invalid_trees["draft_model"] == (fault == "arrays")


def rejection(**fields):
    return request(sampling=SamplingParams(seed=1, acceptance="rejection"), **fields)


def chain_with_probs(tokens, confidence, probs=None, k=2):
    ids = np.array([[token, (token + 1) % VOCAB_SIZE] for token in tokens], np.int32).ravel()
    probs = np.tile(np.array([0.75, 0.25], np.float32), len(tokens)) if probs is None else probs
    return DraftTree.chain(np.array(tokens), np.array(confidence), TopProbs(ids, probs, k))


def answer_with(tree):
    def draft(name, batch):
        seq_ids = [item.delta.seq_id for item in batch.items]
        return DraftResult(batch.round_id, seq_ids, [tree] * len(seq_ids))

    return draft


def test_under_rejection_chains_of_the_draft_model_go_before_other_drafts():
    """Whatever the others propose: a choice by their content could depend on the noise of the next tokens."""
    target = Scripted([5, 6, 7, 8, 9])
    core = make_core(rejection(), drafters={"chain": ChainDrafter(right(target))}, workers=["w"])
    events, batch = one_round(core, target, draft=answer_with(chain_with_probs([5, 6, 40], [0.9, 0.8, 0.7])))
    item = batch.items[0]
    assert item.tree.token_ids.tolist() == [5, 6, 40]
    assert len(item.tree.probs.token_ids) == len(item.tree.probs.probs) == 6
    assert events[0].token_ids == (5, 6, 7)
    assert events[0].sources == ("draft_model", "draft_model", "target")


def test_under_rejection_drafts_whose_tokens_are_certain_are_verified_as_trees():
    """Here no draft worker has answered."""
    target = Scripted(list(range(5, 40)))
    core = make_core(rejection(), drafters={"chain": ChainDrafter(right(target))}, workers=["w"])
    events, batch = one_round(core, target)
    assert (batch.items[0].tree.token_ids.tolist()[:2], batch.items[0].tree.probs) == ([5, 6], None)
    assert events[0].token_ids[:3] == (5, 6, 7)
    assert events[0].sources[:2] == ("chain", "chain")
    assert core.counters.accepted_tokens["chain"] >= 2
    assert not core.counters.invalid_trees


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree(np.array([5], np.int32), np.array([-1], np.int32), np.array([0.9], np.float32)),
        chain_with_probs([5, 6], [0.9, 0.8], np.array([0.75, 0.25, 0.9, 0.9], np.float32)),
        chain_with_probs([5, 6], [0.9, 0.8], np.array([0.75, 0.25, 0.0, 1.0], np.float32)),
        chain_with_probs([5, 6], [0.9, 0.8], np.array([0.75, 0.25, np.nan, 1.0], np.float32)),
        chain_with_probs([5, 6], [0.9, 0.8], k=3),
        chain_with_probs([5, 6, 7, 8, 9], [0.9] * 5),
    ],
)
def test_under_rejection_a_chain_without_its_distribution_is_dropped(tree):
    target = Scripted([5, 6, 7, 8, 9])
    core = make_core(rejection(), workers=["w"])
    events, batch = one_round(core, target, draft=answer_with(tree))
    assert not len(batch.items[0].tree)
    assert batch.items[0].tree.probs is None
    assert events[0].token_ids == (5,)
    assert core.counters.invalid_trees["draft_model"] == 1


def test_a_cluster_set_to_rejection_judges_every_request_by_it():
    core = make_core(request(), speculation=SpeculationConfig(acceptance="rejection"))
    assert assembled(core)[1].items[0].begin.sampling == SamplingParams(seed=1, temperature=0.0, acceptance="rejection")


def test_under_rejection_a_nodes_own_token_has_no_say_in_whether_it_is_verified():
    """Else tokens that the draft model rarely draws would be judged by another law than those it often draws."""

    def verified(tokens, confidence):
        target = ToyTarget(VOCAB_SIZE, seconds=lambda rows: 0.01 * rows)
        core = make_core(
            rejection(stop_token_ids=(EOS,)),
            profile=[(rows, 0.02 + 0.004 * rows) for rows in (1, 2, 4, 8, 16)],
            workers=["w"],
        )
        _, batch = one_round(core, target, draft=answer_with(chain_with_probs(tokens, confidence)))
        return len(batch.items[0].tree)

    assert verified([5, 6, 7, 8], [1.0, 1.0, 1.0, 1.0]) == 4
    # The last node, sure or not, a stop token or not.
    for token in (8, EOS):
        assert verified([5, 6, 7, token], [1.0, 1.0, 1.0, 0.001]) == 4
    # What follows an unlikely node is cut, the unlikely node itself is not.
    assert verified([5, 6, 7, 8], [1.0, 0.01, 0.01, 0.01]) == 2


def test_under_rejection_the_tokens_of_a_draft_have_no_say_in_how_long_it_takes():
    """Else those of which the draft model is sure would be late more often, and late drafts are not verified."""
    core = make_core(
        rejection(request_id="by ratio", stop_token_ids=()),
        request(request_id="coupled", stop_token_ids=()),
        workers=["w"],
        max_running=2,
    )
    target, asked = ToyTarget(VOCAB_SIZE), []

    def slow(name, batch):
        asked.extend(batch.items)
        seq_ids = [item.delta.seq_id for item in batch.items]
        trees = [chain_with_probs([5], [0.5])] * len(seq_ids)
        return DraftResult(batch.round_id, seq_ids, trees, elapsed_s=0.004, num_forwards=1)

    for number in range(8):
        one_round(core, target, now=0.01 * number, draft=slow)
    is_by_ratio = {item.delta.seq_id: item.begin.sampling.acceptance == "rejection" for item in asked if item.begin}
    by_ratio, coupled = (
        [item for item in asked if is_by_ratio[item.delta.seq_id] == rule and item.begin is None]
        for rule in (True, False)
    )
    assert max(item.min_confidence for item in coupled) > 0.0
    assert {item.max_depth for item in coupled} == {4}
    assert {item.min_confidence for item in by_ratio} == {0.0}
    assert min(item.max_depth for item in by_ratio) < 4


def test_under_rejection_an_accepted_stop_token_ends_the_request():
    target = Scripted([5, EOS, 7, 8])
    core = make_core(rejection(), workers=["w"])
    events, _ = one_round(core, target, draft=answer_with(chain_with_probs([5, EOS, 7], [0.9, 0.8, 0.7])))
    assert events[0].token_ids == (5,)
    assert events[0].finish_reason == "stop"


def test_late_drafts_are_a_share_of_the_awaited_ones_however_many_workers_a_round_asks(toy_target):
    core = make_core(workers=["a", "b"])
    for name in "pqrs":
        core.add(request(name, stop_token_ids=()), 0.0)
    asked = []
    for _ in range(6):
        one_round(core, toy_target, draft=lambda name, batch: asked.append(name))
    assert set(asked) == {"a", "b"}
    assert core.counters.late_drafts == core.counters.awaited_drafts == len(asked)


def test_a_round_scores_few_rows_of_prompts_however_many_there_are():
    prompt = tuple(range(200))
    scored = [request(str(index), prompt, num_prompt_logprobs=1) for index in range(3)]
    core = make_core(*scored, request("free", prompt), max_running=8, max_prefill_rows=4096)
    round, _ = core.plan_round(0.0)
    rows = {entry.sequence.request_id: entry.rows for entry in round.entries}
    assert rows == {"0": 200, "1": 56, "free": 200}


def test_draft_workers_are_told_the_namespace_of_what_is_learnt_and_nothing_of_log_probabilities(toy_target, worker):
    wanted = {"namespace": "a.form-1", "prefix_namespace": "a", "num_logprobs": 2, "num_prompt_logprobs": 2}
    core = make_core(request(stop_token_ids=(), **wanted), workers=["w"])
    round, _ = core.plan_round(0.0)
    begin = round.asked.batches["w"].items[0].begin
    assert (begin.namespace, begin.num_logprobs, begin.num_prompt_logprobs) == ("a.form-1", -1, -1)
    core.draft_locally(round)
    begin = core.assemble(round, {}).items[0].begin
    assert (begin.namespace, begin.num_logprobs, begin.num_prompt_logprobs) == ("a", 2, 2)


def test_a_round_whose_launches_are_still_to_be_recorded_says_nothing_of_the_price_of_rows(toy_target):
    """Three slow rounds of a new shape would keep the planner from it, though all later ones are fast."""
    info = toy_info(VOCAB_SIZE, step_times=[(1, 0.005), (64, 0.006)])
    cores = [toy_core(info, toy_request()) for _ in range(2)]

    def verify(batch):
        result = toy_target.verify(batch)
        return msgspec.structs.replace(result, elapsed_s=0.05, is_new_shape=core is cores[0])

    for core in cores:
        for number in range(4):
            toy_round(core, verify, number * 0.05)
        toy_target.lose_all()
    slow, counted = (core.step_times.seconds(1) for core in cores)
    assert slow == pytest.approx(0.005)
    assert counted > 0.03

"""Events, arrivals and conversations of the simulator."""

from contextlib import closing
from itertools import islice, pairwise
from multiprocessing import active_children

import numpy as np
import pytest

from cluster.simulate.arrivals import arrival_times
from cluster.simulate.conversations import ConversationDraws, drawn_ahead
from cluster.simulate.events import Events, Server
from cluster.simulate.options import SimulationOptions, TrafficOptions
from cluster.simulate.records import Record
from cluster.simulate.texts import LengthsOnly, PhraseTexts
from cluster.simulate.traffic import Traffic


def test_events_happen_in_the_order_of_their_times_and_then_of_their_planning():
    events, seen = Events(), []
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "never")):
        events.at(time, seen.append, name)
    events.at(1.0, events.at, 0.5, seen.append, "late is now")
    events.run(3.0)
    assert seen == ["a", "b", "late is now", "c"]
    assert (events.now, events.num_done) == (3.0, 5)


def test_a_server_does_one_thing_after_the_other():
    events = Events()
    server, ended = Server(events), []
    for cost_s in (2.0, 1.0):
        server.run(cost_s, lambda: ended.append(events.now))
    events.run(10.0)
    assert ended == [2.0, 3.0]
    assert server.take(1.0, arrives=10.0) == 11.0
    assert server.busy_s == 4.0


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "mmpp", "diurnal"])
def test_conversations_come_at_the_mean_rate_and_bursts_are_bursts(arrivals):
    options = TrafficOptions(arrivals=arrivals, conversations_per_s=5.0, burstiness=4.0, period_s=10.0)
    times = list(islice(arrival_times(options, np.random.default_rng(1)), 20_000))
    assert all(one <= other for one, other in pairwise(times))
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)
    counts = np.bincount(np.array(times, np.int64))
    spread = counts.var() / counts.mean()  # 1 for a Poisson process
    assert spread == pytest.approx(1.0, abs=0.1) if arrivals == "poisson" else spread > 1.5


def sent_by(options, seconds=60.0, most_tokens=4000, seed=3):
    events, turns = Events(), []

    def send(turn):
        turns.append((events.now, turn))
        events.after(0.5, traffic.ended, turn, True)

    conversations = ConversationDraws(options, PhraseTexts(0), seed, most_tokens=most_tokens)
    traffic = Traffic(events, options, iter(conversations), seed, send=send)
    events.run(seconds)
    return turns


def test_turns_come_back_with_the_text_before_them():
    options = TrafficOptions(conversations_per_s=1.0, turns=4.0, think_s=2.0)
    last, returned = {}, 0
    for now, turn in sent_by(options):
        told = turn.conversation
        if told.number in last:
            before, then = last[told.number]
            said = np.concatenate([before.prompt, before.answer])
            assert np.array_equal(turn.prompt[: len(said)], said)
            assert now > then + 0.5
            returned += 1
        else:
            assert len(turn.prompt) > told.num_system == options.system_tokens
        assert len(turn.prompt) + len(turn.answer) <= 4000
        last[told.number] = turn, now
    assert returned > 20


def test_the_same_seed_gives_the_same_traffic_and_tenants_follow_zipf():
    options = TrafficOptions(conversations_per_s=10.0, tenants=4, tenant_skew=1.0)
    one, again, other = (sent_by(options, 20.0, seed=seed) for seed in (3, 3, 4))
    assert [(now, turn.prompt.tolist()) for now, turn in one] == [(now, turn.prompt.tolist()) for now, turn in again]
    assert [now for now, _ in one] != [now for now, _ in other]
    tenants = np.bincount([turn.conversation.tenant for _, turn in one], minlength=4)
    assert (np.diff(tenants) < 0).all()


@pytest.mark.parametrize("seed", [0, 3, 2**32 + 3, 2**70])
def test_conversations_are_drawn_by_seed_and_number(seed):
    turns = sent_by(TrafficOptions(conversations_per_s=2.0, spread=0.0, tenants=1000), seconds=10.0, seed=seed)
    for told in {turn.conversation.number: turn.conversation for _, turn in turns}.values():
        weights = np.arange(1.0, 1001.0) ** -TrafficOptions().tenant_skew
        drawn = np.random.default_rng((seed, 3, told.number)).random()
        assert told.tenant == np.searchsorted(np.cumsum(weights / weights.sum()), drawn)


def test_another_process_draws_the_same_conversations():
    options = TrafficOptions(system_prompts=3, cancelled_share=0.3, batch_share=0.3, turns=5.0)
    draws, before = ConversationDraws(options, LengthsOnly(), 3, most_tokens=2500), set(active_children())
    num_turns = 0
    with closing(drawn_ahead(draws)) as elsewhere:
        for here, there in zip(draws, islice(elsewhere, 500), strict=False):
            assert (here.number, here.tenant, here.system) == (there.number, there.tenant, there.system)
            assert (here.num_system, here.service_class) == (there.num_system, there.service_class)
            for one, other in zip(here.turns, there.turns, strict=True):
                assert np.array_equal(one.text, other.text)
                assert one[1:] == other[1:]
                num_turns += 1
    assert num_turns > 500
    assert set(active_children()) == before


def test_in_a_closed_loop_there_are_so_many_requests_at_a_time():
    turns = sent_by(TrafficOptions(clients=3, turns=1.0), seconds=5.0)
    assert len(turns) == 3 * 11  # each takes half a second, and the first are sent at 0


def test_texts_of_tenants_have_tokens_of_their_own():
    texts = PhraseTexts(0, tokens_of_tenant=1000)
    for tenant in range(4):
        for text in (
            *texts.exchange((0, 0), tenant, texts.system(tenant, 0, 50), 300, 300),
            texts.system(tenant, 1, 99),
        ):
            assert set(text.tolist()) <= set(texts.tokens_of(tenant))
    assert not set(texts.tokens_of(0)) & set(texts.tokens_of(1))


def test_a_share_of_conversations_is_batch_and_held_to_its_own_objectives():
    sent = []
    options = TrafficOptions(clients=400, batch_share=0.25, tenants=2)
    events = Events()
    Traffic(events, options, iter(ConversationDraws(options, PhraseTexts(1), 3, most_tokens=4000)), 3, send=sent.append)
    events.run(0.1)
    assert 70 <= sum(turn.conversation.service_class == "batch" for turn in sent) <= 130
    objectives = SimulationOptions().objectives
    for kind, ttft_s, is_good in (("interactive", 0.5, True), ("interactive", 9.0, False), ("batch", 9.0, True)):
        record = Record(0, 1, 10, 1.0, kind, first_at=1.0 + ttft_s, ended_at=12.0, num_tokens=1)
        record.outcome = "answered"
        assert record.is_good(objectives) == is_good

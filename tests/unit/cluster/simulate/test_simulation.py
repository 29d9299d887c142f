"""Whole simulated clusters."""

import json

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.simulate import simulation as simulation_module
from cluster.simulate.faults import Fault
from cluster.simulate.forward_time import MeasuredTimes
from cluster.simulate.gateway import GATEWAY_LOST, is_right
from cluster.simulate.options import ForwardOptions, SimulationOptions
from cluster.simulate.rounds import RoundCounts
from cluster.simulate.scenario import load_scenario
from cluster.simulate.service_rates import ServiceRates
from cluster.simulate.simulation import Simulation, measured_rates
from cluster.simulate.texts import PhraseTexts
from paceline_testing.simulated import QUIET, simulated


def test_the_same_seed_gives_the_same_figures():
    one, again, other = (simulated(seconds=4.0, seed=seed).run().figures for seed in (1, 1, 2))
    for figures in (one, again, other):
        del figures["wall_s"]
    assert one == again
    assert one != other
    assert one["requests_answered"] > 0


def test_draft_workers_that_are_right_give_more_tokens_a_second():
    def tokens_per_s(model, **draft):
        config = {"draft": {"model": model, "gamma": 4}, "speculation": {"drafters": ["draft_model"]}}
        traffic = {"clients": 2, "turns": 1.0, "answer_tokens": 60, "spread": 0.0}
        return simulated(config, 4.0, traffic, draft=draft).run().figures["tokens_per_s"]

    right, wrong, none = tokens_per_s("auto", right=0.95), tokens_per_s("auto", right=0.05), tokens_per_s("none")
    assert right > 1.5 * none
    assert wrong > 0.85 * none


def test_full_queues_refuse_and_clients_come_again():
    config = {"router": {"max_running": 1, "max_waiting": 1}}
    figures = simulated(config, traffic={"conversations_per_s": 6.0, "answer_tokens": 60}).run().figures
    assert figures["refusals"] > 10
    assert figures["requests_Overloaded"] > 0


def test_a_tenant_beyond_its_limit_is_refused_by_the_gateway():
    figures = simulated(traffic={"conversations_per_s": 6.0, "tenants": 1}, tenant_limits={"max_concurrent": 1}).run()
    assert figures.figures["refusals"] > 10


def test_groups_and_draft_workers_come_with_the_load():
    config = {
        "target": {"groups": 1, "max_groups": 3},
        "router": {"max_running": 2},
        "autoscaling": {"look_back_s": 2, "upscale_delay_s": 1},
    }
    figures = simulated(config, 14.0, {"conversations_per_s": 3.0}, start_s=1.0).run().figures
    assert figures["groups"] > 1.2


def test_conversations_come_back_to_the_group_that_has_their_prefix():
    def hit_rate(groups):
        traffic = {"conversations_per_s": 1.0, "system_prompts": 0, "turns": 5.0}
        return simulated({"target": {"groups": groups}}, 15.0, traffic).run().figures["prefix_hit_rate"]

    assert hit_rate(4) > 0.9 * hit_rate(1) > 0.4


def rates_of(times):
    """Rounds without drafts."""
    counts = {count: RoundCounts(1, count, count, count, times.seconds(count, count, 0)) for count in (1, 2, 4, 8, 16)}
    return ServiceRates(counts, times, None)


def test_what_the_shared_cache_brings_a_router_grows_with_its_answers():
    times = MeasuredTimes(SimulationOptions().forward)
    counts = {1: RoundCounts(1, 1, 1, 1, times.seconds(1, 1, 0))}
    rates = ServiceRates(counts, times, None, cache_gains={20: 0.4, 10: 0.2})
    gains = [rates.load(1, 0, 8, 0, 64.0, answers).cache_gain for answers in (0, 5, 10, 15, 20, 100)]
    assert gains == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_aggregated_groups_agree_with_exact_ones():
    def figures(level):
        config = {"target": {"groups": 2}, "speculation": {"drafters": ["none"]}, "cache": {"url": "none"}}
        traffic = {"conversations_per_s": 2.0, "answer_tokens": 40, "turns": 2.0, "think_s": 2.0}
        simulation = simulated(config, 25.0, traffic, level="exact" if level == "exact" else "aggregate")
        return simulation.run().figures

    exact = figures("exact")
    times = MeasuredTimes(SimulationOptions().forward)
    cluster = {"target": {"groups": 2}, "draft": {"model": "none"}}
    told = SimulationOptions.model_validate(
        {
            "seconds": 25.0,
            "level": "aggregate",
            "traffic": {**QUIET, "conversations_per_s": 2.0, "answer_tokens": 40, "turns": 2.0, "think_s": 2.0},
        }
    )
    fluid = Simulation(ClusterConfig.model_validate(cluster), told, rates=rates_of(times)).run().figures
    assert fluid["requests"] == pytest.approx(exact["requests"], rel=0.1)
    for name in ("tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "prefix_hit_rate"):
        assert fluid[name] == pytest.approx(exact[name], rel=0.15), name


def test_it_makes_no_difference_which_process_draws_the_conversations(monkeypatch):
    cluster = ClusterConfig.model_validate({"target": {"groups": 2}, "draft": {"model": "none"}})
    told = SimulationOptions.model_validate({"seconds": 40.0, "level": "aggregate", "traffic": QUIET})
    found = []
    for many in (1 << 20, 1):
        monkeypatch.setattr(simulation_module, "_MANY_CONVERSATIONS", many)
        figures = Simulation(cluster, told, rates=rates_of(MeasuredTimes(told.forward))).run().figures
        found.append({name: figure for name, figure in figures.items() if name != "wall_s"})
    assert found[0] == found[1]
    assert found[0]["requests"] > 10


def test_aggregated_groups_count_draft_workers_and_the_shared_cache_as_exact_ones():
    config = {
        "target": {"groups": 2},
        "draft": {"workers": 2, "gamma": 4},
        "router": {"max_running": 4},
        "speculation": {"drafters": ["draft_model", "cache"]},
    }
    traffic = {"conversations_per_s": 1.0, "answer_tokens": 60, "turns": 2.0, "think_s": 2.0, "tenants": 4}
    draft = {"forward_s": 0.002, "right": 0.8}  # it pays
    cluster = ClusterConfig.model_validate(config)
    told = SimulationOptions.model_validate({"traffic": {**QUIET, **traffic}, "draft": draft, "level": "aggregate"})
    times = MeasuredTimes(told.forward)
    rates = measured_rates(cluster, told, texts=PhraseTexts(0), times=times, seconds=10.0)
    assert rates.load(1, 0, 4, 0, 64.0, 1000).cache_gain > 0
    exact = simulated(config, 40.0, traffic, warm_up_s=10.0, draft=draft).run().figures
    options = told.model_copy(update={"seconds": 40.0, "warm_up_s": 10.0})
    fluid = Simulation(cluster, options, rates=rates).run().figures
    assert fluid["draft_workers"] == exact["draft_workers"] == 2.0
    for name in ("store_written_bytes_per_s", "store_read_bytes_per_s", "store_messages_per_s"):
        assert fluid[name] == pytest.approx(exact[name], rel=0.15), name
    assert exact["draft_workers_busy"] > 0.1
    assert fluid["draft_workers_busy"] == pytest.approx(exact["draft_workers_busy"], rel=0.4)


@pytest.mark.parametrize("kind", ["target", "router", "zone", "store", "draft_worker"])
def test_aggregated_groups_write_each_token_once_in_spite_of_faults(kind):
    written = {}
    for faults in ((), [Fault(2.0, kind, 0, 2.0)]):
        cluster = ClusterConfig.model_validate({"target": {"groups": 2}, "draft": {"model": "none"}})
        told = SimulationOptions.model_validate({"seconds": 30.0, "level": "aggregate", "traffic": QUIET})
        simulation = Simulation(cluster, told, rates=rates_of(MeasuredTimes(told.forward)), faults=faults)
        simulation.events.at(8.0, simulation.traffic.stop)
        report = simulation.run()
        answered = sum(record.num_tokens for record in report.records)
        written[bool(faults)] = simulation.cluster.log.meter.num_tokens, answered
    tokens, answered = written[False]
    assert tokens == answered > 0
    tokens, answered = written[True]
    # A router that is lost has written nothing yet of what it was at, and has delivered one token of it.
    assert tokens <= answered
    assert tokens == answered or kind in ("router", "zone")


@pytest.mark.parametrize("news", ["each", "shared"])
def test_aggregated_groups_go_on_without_a_gateway_or_a_link_to_one(news):
    cluster = {"target": {"groups": 2}, "gateway": {"replicas": 2}, "draft": {"model": "none"}}
    told = {"seconds": 20.0, "level": "aggregate", "news": news, "traffic": {**QUIET, "conversations_per_s": 4.0}}
    ended = []
    simulation = Simulation(
        ClusterConfig.model_validate(cluster),
        SimulationOptions.model_validate(told),
        rates=rates_of(MeasuredTimes(SimulationOptions().forward)),
        faults=[
            Fault(5.0, "gateway", 0, 4.0),
            Fault(12.0, "gateway_link", 0, 4.0),
            Fault(14.0, "gateway_link", 3, 1.0),
        ],
        on_end=ended.append,
    )
    simulation.run()
    simulation.traffic.stop()
    simulation.events.run(60.0)
    assert not simulation.calls
    assert not any(group.num_open for group in simulation.cluster.groups.values())
    assert all(map(is_right, ended))
    assert {call.record.outcome for call in ended} == {"answered", GATEWAY_LOST}
    assert sum(call.record.resumed for call in ended) > 0


def test_aggregated_groups_answer_nothing_while_their_target_is_away_and_everything_afterwards():
    """One target is away for 20 s; half a second into them a client leaves. It comes back and computes all anew."""
    times, ended = MeasuredTimes(SimulationOptions().forward), []
    cluster = ClusterConfig.model_validate({"target": {"groups": 1}, "draft": {"model": "none"}})
    traffic = {**QUIET, "conversations_per_s": 1.0, "turns": 1.0, "answer_tokens": 200, "spread": 0.0}
    told = SimulationOptions.model_validate({"seconds": 12.0, "level": "aggregate", "traffic": traffic})
    faults = [Fault(5.0, "target", 0, 20.0)]
    simulation = Simulation(cluster, told, rates=rates_of(times), faults=faults, on_end=ended.append)
    (group,) = simulation.cluster.groups.values()
    simulation.run()
    before = simulation.events.now
    assert before < 25.0
    assert group.num_open >= 5
    assert group._num_decoding == 0
    begun = [sequence for sequence in group._open.values() if sequence.left is not None]
    assert begun
    cancelled = begun[0].request_id
    tokens = group._tokens
    group.cancel(cancelled)
    simulation.traffic.stop()
    simulation.events.run(25.0)
    assert group._tokens == tokens
    assert not any(5.0 < call.record.ended_at < 25.0 for call in ended)
    simulation.events.run(90.0)
    assert not group.num_open
    assert all(map(is_right, ended))
    waited = [call.record for call in ended if call.record.arrived < 5.0 < call.record.ended_at]
    assert len(waited) == len(begun) - 1
    assert all(record.ended_at > 25.0 and record.num_tokens == 200 for record in waited)


@pytest.mark.parametrize(
    ("cluster", "costs", "named"),
    [
        ({"router": {"objectives": {"interactive": {"ttft_s": 1.0}}}}, {}, r"router\.objectives"),
        ({}, {"store_bytes_per_s": 1e6}, r"costs\.store_bytes_per_s is 1000000\.0"),
    ],
)
def test_aggregated_groups_refuse_what_they_would_leave_out(cluster, costs, named):
    options = SimulationOptions.model_validate({"level": "aggregate", "costs": costs})
    with pytest.raises(ConfigError, match=named):
        Simulation(ClusterConfig.model_validate(cluster), options)


def test_the_command_prints_figures(tmp_path):
    file = tmp_path / "scenario.yaml"
    file.write_text("seconds: 3\ntraffic: {answer_tokens: 10, prompt_tokens: 10}\n")
    arguments = ["simulate", "--scenario", str(file), "--set", "draft.model=none", "--format", "json"]
    result = CliRunner().invoke(app, [*arguments, "--option", "traffic.conversations_per_s=2"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["requests"] > 0


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("traffic.turns=0", "scenario: traffic.turns is 0"),
        ("turns", "--option turns: write it as"),
        ("warm_up_s=120", "scenario: warm_up_s is 120; it must be below seconds, which is 120"),
        ("forward.row_times=[[8, 0.02], [1, 0.01]]", "rows of row_times are [8, 1]; they must ascend"),
        ("forward.row_times=[[1, -0.02]]", "forward.row_times.0.1 is -0.02; it must be above 0"),
        ("forward.row_times=[[0, 0.02]]", "forward.row_times.0.0 is 0; it must be at least 1"),
        ("forward.row_steps=[64, 8]", "rows of row_steps are [64, 8]; they must ascend"),
        ("traffic.period_s=1e-300", "traffic.period_s is '1e-300'; it must be at least 0.001"),
        ("costs.store_bytes_per_s=0.5", "costs.store_bytes_per_s is 0.5; it must be at least 1"),
    ],
)
def test_a_scenario_names_what_is_wrong_in_it(option, told):
    with pytest.raises(ConfigError) as caught:
        load_scenario(None, [option], {})
    assert told in str(caught.value)


def test_a_table_that_ends_with_a_shorter_forward_does_not_fall_below_it():
    times = MeasuredTimes(ForwardOptions(row_times=((1, 0.02), (8, 0.01))))
    assert times.seconds(64, 1, 0) == pytest.approx(0.01)


@pytest.mark.parametrize("limits", [{"tokens_per_minute": 3000, "requests_per_second": 0.5}, {"max_concurrent": 2}])
def test_limits_of_tenants_leave_nothing_to_chance(limits):
    config = {"target": {"groups": 2}, "gateway": {"replicas": 3}}
    traffic = {"conversations_per_s": 4.0, "tenants": 3}
    one, again = (simulated(config, 8.0, traffic, tenant_limits=limits).run().figures for _ in range(2))
    assert one["refusals"] > 0
    assert {**one, "wall_s": 0} == {**again, "wall_s": 0}


def test_conversations_that_outgrow_the_context_are_counted():
    config = {"target": {"max_model_len": 400}}
    figures = simulated(config, traffic={"conversations_per_s": 2.0, "prompt_tokens": 500, "spread": 0.0}).run().figures
    assert figures["requests"] == 0
    assert figures["conversations_too_long"] > 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--target", "llama-70b", "--gpus", "l4:1"], "--gpus is 'l4:1'; llama-70b needs 1"),
        (["--target", "llama-70b"], "--target is 'llama-70b'; it takes --gpus, too"),
        (["--gpus", "l4:1"], "--gpus is 'l4:1'; it takes --target, too"),
        (["--answers", __file__], "it must be an .npz file with arrays prompts, answers"),
    ],
)
def test_the_command_names_what_cannot_be(options, told):
    result = CliRunner().invoke(app, ["simulate", *options])
    assert told in str(result.exception)

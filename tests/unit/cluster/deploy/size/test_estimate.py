"""Sizing: published figures come out of it, nothing is faster than hardware allows, and mistakes are named.

Covers `cluster.cli.size`, `cluster.cli.row_times`, `cluster.deploy.size.options` and `cluster.deploy.size.report`, too.
"""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import InvalidRequest
from cluster.config import load_config
from cluster.deploy.size import hardware
from cluster.deploy.size.estimate import (
    Deployment,
    DraftPool,
    round_ahead,
    round_on_request,
    sizing_of,
    tokens_per_round,
)
from cluster.deploy.size.hardware import GPUS, measure_cpu, parse_gpus
from cluster.deploy.size.head_shape import assumed_head
from cluster.deploy.size.model_shape import MODELS, find_model, read_model_shape
from cluster.deploy.size.placed_model import NUM_BYTES, PlacedModel
from paceline_testing.tiny_models import make_tiny_model, save_tiny_model

PAGE = (Path(__file__).resolve().parents[5] / "docs" / "sizing.md").read_text(encoding="utf-8")


def placed(model="llama-70b", gpus="h200:8", dtype="bfloat16", efficiency=0.8) -> PlacedModel:
    name, gpu, count = parse_gpus(gpus)
    return PlacedModel(
        shape=find_model(model, "--target"), device=name, gpu=gpu, count=count, dtype=dtype, efficiency=efficiency
    )


# GPUs, weights, bound by bandwidth alone and realistic speed of Llama 3.3 70B, one stream, tokens/s.
SPEEDS = [
    ("h100:4", "bfloat16", 96, 69),
    ("h100:4", "fp8", 193, 124),
    ("h100:8", "bfloat16", 193, 119),
    ("h100:8", "fp8", 386, 194),
    ("h200:4", "bfloat16", 138, 94),
    ("h200:8", "bfloat16", 276, 155),
    ("h200:8", "fp8", 553, 239),
    ("h200:8", "int4", 884, 299),
]
# Acceptance, cost of a draft token, best ratio on request and its draft length, best ratios ahead by hit rate.
RATIOS = [
    (0.7, 0.02, 2.76, 8, (3.08, 3.23, 3.33)),
    (0.7, 0.10, 1.98, 4, (2.60, 2.97, 3.27)),
    (0.8, 0.05, 3.09, 8, (4.00, 4.53, 4.95)),
    (0.8, 0.10, 2.47, 6, (3.52, 4.16, 4.57)),
    (0.9, 0.05, 4.67, 13, (6.85, 8.10, 8.91)),
    (0.9, 0.10, 3.43, 10, (5.28, 6.24, 6.86)),
]


def one_row(gpus, dtype="bfloat16", efficiency=0.8):
    return placed(gpus=gpus, dtype=dtype, efficiency=efficiency).forward_time(1, 1, 0)


@pytest.mark.parametrize(("gpus", "dtype", "bound", "realistic"), SPEEDS)
def test_speeds_of_llama_70b_are_the_published_ones_within_a_hundredth(gpus, dtype, bound, realistic):
    assert 1 / one_row(gpus, dtype, efficiency=1.0).weights_s == pytest.approx(bound, rel=0.01)
    assert 1 / one_row(gpus, dtype).total_s == pytest.approx(realistic, rel=0.01)


LLAMA = MODELS["llama-70b"]
CACHE = 32 * 8192 * LLAMA.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    ("found", "published", "tolerance"),
    [
        pytest.param(1 / one_row("h100:4").total_s, 65, 0.08, id="measured on 4 H100"),
        pytest.param(1 / one_row("h200:1", "fp8").total_s, 51, 0.1, id="measured on an H200 in fp8"),
        pytest.param(one_row("h200:8", "fp8").all_reduce_s, 1.9e-3, 0.02, id="all-reduces: near half of a step"),
        pytest.param(one_row("h200:8", "fp8").total_s, 4.2e-3, 0.01, id="step on 8 H200 in fp8"),
        pytest.param(LLAMA.kv_bytes_per_token(2), 320 * 1024, 0, id="KV cache of a token"),
        pytest.param(CACHE, 86e9, 0.01, id="KV cache of 32 requests"),
        pytest.param(CACHE / (2 * LLAMA.read_parameters(1)), 0.62, 0.016, id="cache by weights"),
        pytest.param(tokens_per_round(0.8, 7), 4.16, 0.0024, id="tokens with seven drafts"),
        pytest.param(tokens_per_round(0.8, 7) / one_row("h100:4").total_s, 287, 0.01, id="speed with seven drafts"),
    ],
)
def test_published_figures_come_out(found, published, tolerance):
    assert found == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(("gpus", "rows"), [("h100:8", 295), ("h200:8", 206)])
def test_rows_that_are_verified_for_nothing_are_the_published_ones(gpus, rows):
    model = placed(gpus=gpus, efficiency=1.0)
    assert model.free_rows() == pytest.approx(rows, abs=1)
    below, above = model.forward_time(rows - 2, 1, 0), model.forward_time(rows + 2, 1, 0)
    assert below.compute_s < below.weights_s
    assert above.compute_s > above.weights_s


@pytest.mark.parametrize(("acceptance", "cost", "serial", "length", "ahead"), RATIOS)
def test_ratios_of_drafting_are_the_published_ones(acceptance, cost, serial, length, ahead):
    def ratios(round_time):
        return [tokens_per_round(acceptance, g) / round_time(g) for g in range(1, 65)]

    on_request = ratios(lambda g: round_on_request(1, g * cost, 0))
    assert max(on_request) == pytest.approx(serial, abs=0.006)
    assert on_request.index(max(on_request)) + 1 == length
    for hit_rate, expected in zip((0.7, 0.9, 1.0), ahead, strict=True):
        found = max(ratios(lambda g, h=hit_rate: round_ahead(1, g * cost, 0, h)))
        assert found == pytest.approx(expected, abs=0.011)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2", 134_515_008),
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
        ("mistral-7b", 7_248_023_552),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_known_models_have_as_many_parameters_as_published(name, parameters):
    assert MODELS[name].num_parameters == parameters


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [("qwen3-30b-a3b", 30.5e9, 3.3e9), ("qwen3-235b-a22b", 235e9, 22e9), ("mixtral-8x7b", 46.7e9, 12.9e9)],
)
def test_of_experts_few_are_read_for_one_row_and_all_for_many(name, parameters, active):
    shape = MODELS[name]
    assert shape.num_parameters == pytest.approx(parameters, rel=0.01)
    assert shape.active_parameters + shape.num_lookup_parameters == pytest.approx(active, rel=0.03)
    assert shape.read_parameters(4096) == pytest.approx(shape.num_parameters - shape.num_lookup_parameters, rel=0.01)


def test_the_tables_of_the_page_are_the_ones_that_are_tested():
    speeds = re.findall(r"^\| (\d) x (H\d+) \| (\w+) \| ([\d,]+) \| (\d+) \|$", PAGE, re.MULTILINE)
    told = [
        (f"{gpu.lower()}:{count}", dtype, int(bound.replace(",", "")), int(real))
        for count, gpu, dtype, bound, real in speeds
    ]
    assert told == SPEEDS
    number = r"([\d.]+)"
    rows = re.findall(
        rf"^\| {number} \| {number} \| {number} \((\d+)\) \| {number} \| {number} \| {number} \|$", PAGE, re.M
    )
    assert [(float(a), float(c), float(s), int(g), tuple(map(float, h))) for a, c, s, g, *h in rows] == RATIOS


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_local_configuration_has_the_parameters_of_the_model_itself(tmp_path, kind):
    model = make_tiny_model(kind)
    model.config.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path, "--target")
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())
    embeddings = model.get_input_embeddings().weight
    is_tied = model.config.tie_word_embeddings
    assert shape.num_lookup_parameters == (0 if is_tied else embeddings.numel())
    assert (shape.num_layers, shape.hidden_size) == (model.config.num_hidden_layers, model.config.hidden_size)


@pytest.mark.parametrize("name", ["llama-1b", "llama-8b"])
def test_a_known_model_is_that_of_its_configuration(tmp_path, name):
    from transformers import LlamaConfig

    shape = MODELS[name]
    LlamaConfig(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size={"llama-1b": 8192, "llama-8b": 14_336}[name],
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_context,
        tie_word_embeddings=shape.num_lookup_parameters == 0,
    ).save_pretrained(tmp_path)
    assert replace(read_model_shape(tmp_path, "--target"), name=name) == shape


def test_experts_of_a_local_configuration_are_counted(tmp_path):
    from transformers import MixtralConfig

    MixtralConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=100,
    ).save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path, "--target")
    assert shape.num_expert_parameters == 2 * 4 * 3 * 64 * 96
    assert (shape.num_experts, shape.experts_per_token) == (4, 2)


@pytest.mark.parametrize("layers", [0, -1])
def test_a_configuration_without_layers_is_refused(tmp_path, layers):
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=layers, hidden_size=64, vocab_size=100).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match=rf"llama has num_hidden_layers {layers}; it must be at least 1"):
        read_model_shape(tmp_path, "--target")


models = st.sampled_from(sorted(MODELS)).map(MODELS.__getitem__)
placements = st.builds(
    PlacedModel,
    shape=models,
    device=st.just("gpu"),
    gpu=st.sampled_from(list(GPUS.values())),
    count=st.integers(1, 8),
    dtype=st.sampled_from(sorted(NUM_BYTES)),
    kv_dtype=st.sampled_from(["auto", "fp8", "bfloat16", "float32"]),
    efficiency=st.floats(0.05, 1.0),
)
sequences = st.integers(1, 512)
contexts = st.integers(1, 100_000)


@given(placements, sequences, st.integers(0, 32), contexts)
def test_nothing_is_faster_than_its_bytes_and_products_at_the_peak(model, batch, drafts, context):
    rows = batch * (1 + drafts)
    gpu, count = model.gpu, model.count
    num_bytes = model.shape.read_parameters(rows) * model.weight_bytes
    num_bytes += batch * context * replace(model, count=1).kv_bytes_per_token
    time = model.forward_time(rows, batch, context).total_s
    assert time >= num_bytes / (count * gpu.bandwidth_tb_s * 1e12) * (1 - 1e-9)
    assert time >= 2 * rows * model.shape.active_parameters / (count * gpu.flops(model.dtype)) * (1 - 1e-9)


@given(placements, sequences, st.integers(0, 32), contexts, st.floats(1.0, 10.0))
def test_better_hardware_is_never_slower_and_more_work_never_faster(model, batch, drafts, context, factor):
    rows = batch * (1 + drafts)
    time = model.forward_time(rows, batch, context).total_s
    gpu = model.gpu
    for better in (
        {"bandwidth_tb_s": gpu.bandwidth_tb_s * factor},
        {"tflops": gpu.tflops * factor, "tflops_fp8": gpu.tflops_fp8 and gpu.tflops_fp8 * factor},
        {"link_gb_s": gpu.link_gb_s * factor},
        {"link_latency_us": gpu.link_latency_us / factor},
    ):
        assert replace(model, gpu=gpu.model_copy(update=better)).forward_time(rows, batch, context).total_s <= time * (
            1 + 1e-9
        )
    assert model.forward_time(rows + 1, batch, context).total_s >= time
    assert model.forward_time(rows + 1, batch + 1, context).total_s >= time
    assert model.forward_time(rows, batch, context + 1).total_s >= time


@given(placements, sequences, contexts, st.integers(0, 4096))
def test_what_fits_is_what_there_is_room_for(model, batch, context, rows):
    fit = model.memory(rows, batch, context)
    # Exactly so, but for the rounding of very large sums.
    if abs(fit.needed - fit.available) > 1024:
        assert fit.fits == (fit.room_tokens >= batch * context)
    assert model.memory(rows, batch + 1, context).needed > fit.needed
    assert replace(model, count=model.count + 1).memory(rows, batch, context).needed < fit.needed


@given(st.floats(0, 1), st.integers(0, 64), st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1))
def test_drafts_bring_at_least_one_token_and_at_most_all_in_a_round_between_its_bounds(a, g, verify, draft, link, hit):
    tokens = tokens_per_round(a, g)
    assert 1 - 1e-9 <= tokens <= g + 1 + 1e-9
    assert tokens_per_round(a, g + 1) >= tokens - 1e-9
    assert tokens_per_round(min(1.0, a + 0.01), g) >= tokens - 1e-6
    ahead = round_ahead(verify, draft, link, hit)
    assert max(verify, draft) - 1e-9 <= ahead <= round_on_request(verify, draft, link) + 1e-9


pools = st.builds(
    DraftPool,
    section=st.just("draft"),
    model=st.builds(
        placed, st.sampled_from(["smollm2", "llama-1b", "pard-llama-1b"]), st.sampled_from(["l4", "h100", "b200"])
    ),
    acceptance=st.floats(0, 0.99),
    outcomes=st.integers(0, 8),
    max_workers=st.integers(1, 4),
)
deployments = st.builds(
    Deployment,
    target=placements,
    concurrency=st.integers(1, 64),
    context=st.integers(1, 20_000),
    link_s=st.floats(0, 0.001),
    pools=st.lists(pools, max_size=2).map(tuple),
    cpu_acceptance=st.none() | st.floats(0, 0.99),
    draft_tokens=st.none() | st.integers(1, 16),
    hit_rate=st.floats(0, 1),
    gpu_hour=st.none() | st.floats(0.01, 100),
    draft_gpu_hour=st.none(),
)


@given(deployments)
def test_the_recommended_ways_are_the_cheapest_and_the_fastest_of_all(deployment):
    sizing = sizing_of(deployment)
    everything = sizing.speeds
    assert everything[0].ratio == pytest.approx(1.0)
    assert sizing.fastest.tokens_per_s >= max(one.tokens_per_s for one in everything) / 1.011
    if deployment.gpu_hour is None:
        assert sizing.cheapest.tokens_per_s_gpu == max(one.tokens_per_s_gpu for one in everything)
    else:
        assert sizing.cheapest.cost_per_million == min(one.cost_per_million for one in everything)
    for one in everything:
        assert one.tokens_per_s == pytest.approx(one.tokens_per_s_stream * deployment.concurrency)
        assert one.tokens_per_s_stream == pytest.approx(one.tokens_per_round / one.round_s)


def test_more_rows_than_ride_free_make_drafts_cost_more_than_they_bring():
    few = Deployment(
        target=placed(),
        concurrency=1,
        context=1024,
        link_s=0.0002,
        cpu_acceptance=0.5,
        draft_tokens=None,
        hit_rate=0.9,
    )
    many = replace(few, concurrency=1024)
    assert sizing_of(few).fastest.drafting == "on the CPU"
    assert sizing_of(few).speeds[1].ratio > 1.5
    assert sizing_of(many).fastest.drafting == "none"


def test_a_deeper_draft_of_a_one_pass_head_costs_rows_and_no_forward():
    """Ten tokens more: of the head, rows of one forward instead of ten forwards."""
    head = replace(placed("llama-8b"), shape=assumed_head(MODELS["llama-8b"]))
    more_s = {}
    for is_parallel in (False, True):
        deployment = Deployment(
            target=placed("llama-8b"),
            head=replace(head, shape=replace(head.shape, is_parallel=is_parallel)),
            concurrency=1,
            context=1024,
            link_s=0.0,
            cpu_acceptance=None,
            draft_tokens=None,
            hit_rate=0.9,
        )
        few, many = (sizing_of(replace(deployment, draft_tokens=drafts)).speeds[1].round_s for drafts in (2, 12))
        more_s[is_parallel] = many - few
    assert more_s[True] < 0.1 * more_s[False]


LARGE = ["--target", "llama-70b", "--gpus", "h200:8", "--context", "1000"]
EIGHT = ["--draft-tokens", "8", "--max-draft-workers", "1"]
SIZE = ["size", "--target", "llama-70b", "--gpus", "h200:8", "--dtype", "fp8", "--concurrency", "32"]


def sized(run, *arguments):
    status, out, err = run("size", "--format", "json", *arguments)
    assert err == ""
    return status, json.loads(out)


def test_it_tells_people_what_fits_how_fast_and_what_pays(run):
    status, out, err = run(*SIZE, "--draft", "llama-1b", "--price-per-gpu-hour", "3")
    assert (status, err) == (0, "")
    for told in ("llama-70b, 70.6 G parameters in fp8, on 8 x h200", "It fits.", "one round ahead", "per 1 M tokens"):
        assert told in out
    assert re.search(r"Cheapest by the token: .*as without drafts\.", out.replace("\n", " "))
    assert max(map(len, out.splitlines())) <= 160


def test_the_settings_it_gives_are_settings(run):
    _, told = sized(run, *SIZE[1:-4], "--dtype", "bfloat16", "--concurrency", "4", "--draft", "llama-1b")
    assert told["fits"]
    assert told["cheapest"]["draft_workers"] > 0
    config = load_config(None, [f"{key}={value}" for key, value in told["settings"].items()])
    assert config.target.tensor_parallel == 8
    assert config.draft.workers == told["cheapest"]["draft_workers"]
    assert config.router.max_running == 4


@pytest.mark.parametrize(
    ("dtype", "gpus"), [("FP8", "a100:8"), ("FP8", "h200:8"), ("int4", "h200:8"), ("int4", "h200:1")]
)
def test_settings_that_the_server_would_refuse_are_not_given(run, dtype, gpus):
    arguments = ["--target", "llama-70b", "--gpus", gpus, "--dtype", dtype]
    _, told = sized(run, *arguments)
    text = run("size", *arguments)[1]
    assert told["fits"]
    assert ("Settings" in text) == (told["settings"] is not None) == (gpus != "a100:8")
    if told["settings"] is None:
        assert "there are no settings for it" in " ".join(text.split())
    else:
        load_config(None, [f"{key}={value}" for key, value in told["settings"].items()])


@pytest.mark.parametrize(
    ("gpus", "remedy"), [("l4:1", None), ("h100:1", "--dtype fp8 or int8 or int4"), ("l40s:1", None)]
)
def test_fewer_bits_are_a_remedy_where_it_fits_in_them(run, gpus, remedy):
    arguments = ["--target", "llama-70b", "--gpus", gpus]
    status, out, _ = run("size", *arguments)
    told = " ".join(out.split())
    assert status == 1
    assert ("fewer bits: --dtype" in told) == (remedy is not None)
    if remedy is not None:
        assert remedy in told
        assert sized(run, *arguments, "--dtype", remedy.split()[-1])[1]["fits"]


def test_what_does_not_fit_says_what_would_and_ends_with_status_1(run):
    arguments = ["--target", "llama-70b", "--gpus", "h100:1", "--concurrency", "32"]
    status, out, _ = run("size", *arguments)
    assert status == 1
    assert "It does not fit" in out
    assert "4 GPUs of the kind" in out
    status, told = sized(run, *arguments)
    assert (status, told["fits"], told["speeds"]) == (1, False, [])
    enough = told["fits_on_gpus"][0]
    assert sized(run, *arguments, "--gpus", f"h100:{enough}")[1]["fits"]
    assert not sized(run, *arguments, "--gpus", f"h100:{enough // 2}")[1]["fits"]


def test_a_parallel_draft_model_makes_one_forward_of_all_its_guesses(run):
    """One forward over a row for each guess takes little longer than over one row."""
    told = {
        draft: {speed["drafting"]: speed for speed in sized(run, *LARGE, "--draft", draft, *EIGHT)[1]["speeds"]}
        for draft in ("llama-1b", "pard-llama-1b")
    }
    round_s = {draft: speeds["on request"]["round_s"] for draft, speeds in told.items()}
    forward_s = placed("llama-1b", "h200:1").forward_time(1, 1, 1000).total_s
    assert round_s["llama-1b"] - round_s["pard-llama-1b"] == pytest.approx(7 * forward_s, rel=0.01)


def test_more_guesses_pay_of_a_parallel_draft_model(run):
    tokens = [
        sized(run, *LARGE, "--draft", draft)[1]["cheapest"]["draft_tokens"] for draft in ("llama-8b", "pard-llama-8b")
    ]
    assert tokens[0] < tokens[1]


def test_a_checkpoint_with_a_mask_token_is_a_parallel_draft_model(tmp_path):
    directory = save_tiny_model(tmp_path)
    plain = find_model(str(directory), "--draft")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": 3}))
    assert find_model(str(directory), "--draft") == replace(plain, is_parallel=True)


def test_measured_times_take_the_place_of_the_roofline(run):
    told = sized(run, *SIZE[1:], "--row-times", "1:10,32:20,1000:500", "--link-ms", "0")[1]
    assert told["round"]["total_s"] == pytest.approx(0.020, rel=0.01)
    assert told["speeds"][0]["tokens_per_s"] == pytest.approx(1600, rel=0.01)


def test_hardware_of_ones_own_is_read_from_a_file(run, refuse, tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text("Mine: {memory_gib: 1000, bandwidth_tb_s: 9.6, tflops: 989, per_node: 2}\n")
    arguments = ["--target", "llama-70b", "--hardware", path, "--link-ms", "0"]
    told = sized(run, *arguments, "--gpus", "mine")[1]
    assert sized(run, *arguments, "--gpus", "MINE:1")[1] == told
    assert told["round"]["weights_s"] == pytest.approx(139e9 / (0.8 * 9.6e12), rel=0.001)
    assert "which has 2 of them" in refuse("size", *arguments, "--gpus", "mine:3")
    path.write_text("mine: {memory_gib: 80, bandwith_tb_s: 3.35, tflops: 989}\n")
    line = refuse("size", *arguments, "--gpus", "mine")
    assert "mine.bandwith_tb_s: unknown key; a GPU has memory_gib, bandwidth_tb_s" in line


def test_a_directory_is_a_model(run, tmp_path):
    directory = save_tiny_model(tmp_path / "tiny")
    arguments = ["--gpus", "l4", "--context", "64"]
    told = sized(run, "--target", directory, *arguments)[1]
    assert (told["target"], told["fits"]) == ("tiny", True)
    assert sized(run, "--target", directory / "config.json", *arguments)[1] == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--target lama-70b", "--target is 'lama-70b'; known models are smollm2, llama-1b"),
        (
            "--target lama-70b",
            "parallel draft models pard- and such a name; of others give a directory with a config.json",
        ),
        ("--draft lama-1b", "--draft is 'lama-1b'; known models are smollm2"),
        ("--gpus h300:8", "--gpus is 'h300'; known GPUs are a100"),
        ("--gpus h300:8", "describe others in a file: --hardware"),
        ("--gpus h200:many", "--gpus is 'h200:many'; write name:number, such as h200:8"),
        ("--gpus h200:0", "write name:number"),
        ("--gpus h200:", "write name:number"),
        ("--gpus h200:16", "a target group stays within a node, which has 8"),
        ("--gpus h200:7", "64 attention heads to share out evenly: 1, 2, 4, 8 GPUs"),
        ("--dtype fp7", "--dtype is fp7; it must be one of 'float32', 'bfloat16'"),
        ("--kv-dtype int4", "--kv-dtype is int4; it must be one of 'auto', 'float32'"),
        ("--context 200000", "--context is 200000; llama-70b takes 131072 tokens at most"),
        ("--row-times 1:x", "--row-times is '1:x'; write rows:milliseconds"),
        ("--hardware /no/such/file", "--hardware is '/no/such/file'; it cannot be read"),
        ("--draft-gpu l4", "--draft-gpu is 'l4'; give --draft, too"),
        ("--cpu", "--gpus is 'h200:8'; give either --gpus or --cpu"),
        ("--cpu --draft 1", "--draft is '1'; it has no meaning with --cpu"),
        ("--cpu --price-per-gpu-hour 1", "--price-per-gpu-hour is '1.0'; it has no meaning with --cpu"),
        ("--cpu --hardware 1", "--hardware is '1'; it has no meaning with --cpu"),
        ("--memory-gib 8", "--memory-gib is '8.0'; it has no meaning with --gpus"),
        ("--draft llama-1b --draft-price-per-gpu-hour 1", "give --price-per-gpu-hour, too"),
    ],
)
def test_what_cannot_be_sized_names_option_value_and_remedy(refuse, arguments, told):
    assert told in refuse(*SIZE, *arguments.split())


def test_the_rates_of_a_cpu_are_measured_in_about_a_second():
    began = time.perf_counter()
    cpu = measure_cpu("bfloat16")
    assert time.perf_counter() - began < 20  # on a busy machine
    assert 0.1 < 1000 * cpu.bandwidth_tb_s < 10_000
    assert 0 < cpu.tflops == cpu.tflops_float32
    assert cpu.memory_gib * 2**30 == pytest.approx(psutil.virtual_memory().total)


def test_a_cpu_has_room_and_steps_by_what_is_measured_or_given(run, monkeypatch):
    monkeypatch.setattr(hardware, "_fastest", lambda work: 0.01)
    arguments = ["--target", "smollm2", "--cpu", "--dtype", "float32", "--context", "1000", "--link-ms", "0"]
    _, told = sized(run, *arguments, "--memory-gib", "8")
    assert (told["gpus"], told["fits"], told["fits_on_gpus"]) == ("cpu:1", True, [1])
    tflops = 2 * 16 * 1024**2 / 0.01 / 1e12
    assert told["cpu"] == pytest.approx({"memory_gib": 8, "bandwidth_tb_s": 0.0268, "tflops": tflops}, rel=0.01)
    assert told["round"]["weights_s"] == pytest.approx(134_515_008 * 4 / 26.84e9, rel=0.01)
    _, faster = sized(run, *arguments, "--memory-gib", "8", "--bandwidth-gb-s", "53.68")
    assert faster["round"]["weights_s"] == pytest.approx(told["round"]["weights_s"] / 2, rel=0.01)
    status, out, _ = run("size", *arguments, "--memory-gib", "2")
    assert (status, "on the CPU (26.8 GB/s read, 0.00336 TFLOP/s in products)" in out) == (1, True)
    assert "GiB too much. It needs " in out

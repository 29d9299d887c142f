"""`paceline bench serve`: its arithmetic on examples worked out by hand, and real load on an echoing gateway."""

import json
import math
import socket
import time
from collections import Counter
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import DeadlineExceeded, InvalidRequest, Unavailable
from cluster.cli.bench.options import ServeOptions
from cluster.cli.bench.prompts import BenchPrompt
from cluster.cli.bench.serve import arrival_times, deal_prompts, run_serve, take_turns
from cluster.cli.bench.serve_metrics import format_summary, peak_concurrency, summarise
from cluster.cli.bench.stream_client import RequestRecord, send_request
from paceline_testing.echo_gateway import echo_gateway
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
EOS = TOKENIZER.convert_tokens_to_ids("<|end|>")
FOX = tuple(TOKENIZER.backend_tokenizer.encode("the quick brown fox jumps over the lazy dog").ids)


RECORDS = [
    RequestRecord("a", 0.0, ttft=0.1, latency=0.5, itls=[0.1, 0.3], prompt_tokens=10, output_tokens=5, rounds=3),
    RequestRecord("b", 0.2, ttft=0.3, latency=0.3, prompt_tokens=20, output_tokens=1, rounds=1, draft_tokens=4),
    RequestRecord("c", 1.0, ttft=9.0, latency=9.0, itls=[9.0], prompt_tokens=7, output_tokens=7, error="lost"),
]


def test_throughput_and_latencies_count_successful_requests_only():
    summary = summarise(RECORDS, 2.0)
    assert (summary["completed"], summary["failed"], summary["error_counts"]) == (2, 1, {"lost": 1})
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 6)
    rates = ("request_throughput", "output_throughput", "total_token_throughput")
    assert [summary[name] for name in rates] == [1.0, 3.0, 18.0]
    assert summary["max_concurrent_requests"] == 2
    wanted = {
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "std_ttft_ms": 100.0,
        "p99_ttft_ms": 298.0,
        "mean_tpot_ms": 100.0,  # (0.5 - 0.1) / 4; the answer of one token has none
        "p99_tpot_ms": 100.0,
        "mean_itl_ms": 200.0,  # one gap per chunk, not per token
        "p99_itl_ms": 298.0,
        "mean_e2el_ms": 400.0,
        "p99_e2el_ms": 498.0,
    }
    assert {name: summary[name] for name in wanted} == pytest.approx(wanted)
    assert (summary["duration"], summary["request_goodput"]) == (2.0, None)


@pytest.mark.parametrize(
    ("objectives", "goodput"),
    [({"ttft": 150}, 0.5), ({"tpot": 50}, 0.5), ({"e2el": 500}, 1.0), ({"ttft": 150, "tpot": 50}, 0.0)],
)
def test_goodput_counts_requests_that_hold_every_objective(objectives, goodput):
    assert summarise(RECORDS, 2.0, objectives)["request_goodput"] == goodput


def test_no_successful_request_gives_zeros_and_no_error():
    for records in ([], RECORDS[2:]):
        summary = summarise(records, 0.0, {"ttft": 1})
        assert summary["p99_ttft_ms"] == summary["output_throughput"] == summary["request_goodput"] == 0.0


def test_the_block_has_the_lines_that_vllm_prints():
    lines = format_summary(summarise(RECORDS, 2.0, {"ttft": 150}), "Serving Benchmark Result", 4, 2.5).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    shown = dict(line.split(":") for line in lines if ":" in line)
    latencies = {"TTFT": "200.00 200.00 298.00", "TPOT": "100.00 100.00 100.00"}
    latencies |= {"ITL": "200.00 200.00 298.00", "E2EL": "400.00 400.00 498.00"}
    assert {name: value.strip() for name, value in shown.items()} == {
        "Successful requests": "2",
        "Failed requests": "1",
        "Maximum request concurrency": "4",
        "Request rate configured (RPS)": "2.50",
        "Benchmark duration (s)": "2.00",
        "Total input tokens": "30",
        "Total generated tokens": "6",
        "Request throughput (req/s)": "1.00",
        "Request goodput (req/s)": "0.50",
        "Output token throughput (tok/s)": "3.00",
        "Peak concurrent requests": "2",
        "Total token throughput (tok/s)": "18.00",
        **{
            f"{figure} {metric} (ms)": value
            for metric, values in latencies.items()
            for figure, value in zip(("Mean", "Median", "P99"), values.split(), strict=True)
        },
        "Tokens per round": "1.50",
        "Draft tokens": "4",
        "Accepted tokens": "0",
    }
    assert lines[-1] == "1 x lost"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=12))
def test_peak_concurrency_is_the_most_requests_at_any_moment(spans):
    records = [RequestRecord("", float(start), latency=float(length)) for start, length in spans]
    wanted = max((sum(start <= at < start + length for start, length in spans) for at in range(31)), default=0)
    assert peak_concurrency(records) == wanted


def test_arrivals_are_a_poisson_process_that_the_seed_decides():
    times = arrival_times(20_001, 8.0, np.random.default_rng(3))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    assert np.mean(gaps > 1 / 8) == pytest.approx(math.exp(-1), abs=0.02)
    assert times[:50] == arrival_times(50, 8.0, np.random.default_rng(3))
    assert arrival_times(3, math.inf, np.random.default_rng(3)) == [0.0, 0.0, 0.0]
    assert arrival_times(0, 8.0, np.random.default_rng(3)) == []


def prompts_of(counts):
    return [BenchPrompt(f"{task}{row}", task) for task, count in counts.items() for row in range(count)]


def test_both_modes_get_prompts_of_the_same_tasks_and_none_in_common():
    (off, on), num_repeated = deal_prompts(prompts_of({"a": 6, "b": 6}), 2, 5)
    assert num_repeated == 0
    assert [prompt.task for prompt in off] == [prompt.task for prompt in on] == ["a", "b", "a", "b", "a"]
    assert not {prompt.name for prompt in off} & {prompt.name for prompt in on}


@given(st.dictionaries(st.sampled_from("abc"), st.integers(1, 7), min_size=1), st.integers(1, 2), st.integers(1, 30))
def test_prompts_are_repeated_only_when_there_are_too_few(counts, num_hands, hand_size):
    prompts = prompts_of(counts)
    hands, num_repeated = deal_prompts(prompts, num_hands, hand_size)
    assert [len(hand) for hand in hands] == [hand_size] * num_hands
    names = [prompt.name for hand in hands for prompt in hand]
    assert num_repeated == len(names) - len(set(names))
    enough = sum(count // num_hands for count in counts.values())
    assert (num_repeated == 0) == (hand_size <= enough) or enough == 0


def test_repeated_prompts_come_to_both_modes_equally_often():
    (off, on), num_repeated = deal_prompts(prompts_of({"a": 2}), 2, 10)
    assert Counter(prompt.name for prompt in off) == Counter(prompt.name for prompt in on) == {"a0": 5, "a1": 5}
    assert num_repeated == 18


def test_modes_take_turns_in_blocks_and_at_going_first():
    assert take_turns(("off", "on"), 5, 2) == [
        ("off", 0, 2),
        ("on", 0, 2),
        ("on", 2, 4),
        ("off", 2, 4),
        ("off", 4, 5),
        ("on", 4, 5),
    ]
    assert take_turns(("on",), 5, 2) == [("on", 0, 5)]


@pytest.fixture(scope="module")
def running():
    with echo_gateway("toy", (EOS,)) as (address, _, router):
        yield SimpleNamespace(url=f"http://{address}", router=router)


@pytest.fixture
def server(running):
    """A gateway over an echoing router as it was at first: its `url` and its `router`."""
    yield running
    running.router.requests.clear()
    running.router.failures.clear()
    running.router.delay_s, running.router.max_running = 0.0, 1000


IDS = tuple(BenchPrompt(str(index), "ids", token_ids=(*FOX, index + 1)) for index in range(40))
CHAT = tuple(BenchPrompt(str(index), "chat", ({"role": "user", "content": f"hello {index}"},)) for index in range(8))


def test_counts_come_from_usage_and_gaps_are_those_between_chunks(server):
    server.router.delay_s = 0.05
    report = run_serve(IDS, ServeOptions(url=server.url, num_prompts=4, max_tokens=9, num_warmups=0))
    assert report.model == "toy"
    assert report.num_repeated == 0
    records = report.records["on"]
    assert len(records) == 4
    for record in records:
        assert (record.error, record.prompt_tokens, record.output_tokens) == ("", len(FOX) + 1, 9)
        assert (record.rounds, record.draft_tokens, record.accepted_tokens) == (3, 6, 6)
        assert len(record.itls) == 2  # three chunks of three tokens
        assert min(record.ttft, *record.itls) > 0.03
        assert record.latency == pytest.approx(record.ttft + sum(record.itls))
    summary = report.summaries["on"]
    assert (summary["completed"], summary["failed"]) == (4, 0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (4 * (len(FOX) + 1), 36)
    assert 0.15 <= summary["duration"] < 5
    assert summary["max_concurrent_requests"] == 4


def test_the_body_says_what_was_asked_for(server):
    sent = {"num_prompts": 6, "max_tokens": 5, "temperature": 0.5, "seed": 40, "speculation": "off"}
    assert run_serve((*CHAT, *IDS), ServeOptions(url=server.url, **sent)).summaries["off"]["completed"] == 6
    warm_up, *requests = server.router.requests
    assert warm_up.drafters == ()
    assert [request.drafters for request in requests] == [()] * 6
    assert {request.max_new_tokens for request in requests} == {5}
    assert {request.sampling.temperature for request in requests} == {0.5}
    assert sorted(request.sampling.seed for request in requests) == list(range(40, 46))
    assert all(EOS in request.stop_token_ids for request in requests)
    lengths = {len(request.prompt_token_ids) for request in requests}
    assert len(FOX) + 1 in lengths
    assert len(lengths) > 1  # chat and token ids
    server.router.requests.clear()
    run_serve(CHAT, ServeOptions(url=server.url, num_prompts=1, max_tokens=60, ignore_eos=True, num_warmups=0))
    (request,) = server.router.requests
    assert request.drafters is None
    assert EOS not in request.stop_token_ids


def test_both_modes_are_measured_in_turn(server):
    sent = {"num_prompts": 12, "max_tokens": 6, "block_size": 4, "speculation": "both"}
    report = run_serve(IDS, ServeOptions(url=server.url, **sent))
    asked = [request.drafters == () for request in server.router.requests]
    assert asked[:2] == [True, False]  # warm-up
    assert asked[2:] == [True] * 4 + [False] * 8 + [True] * 8 + [False] * 4
    on, off = report.summaries["on"], report.summaries["off"]
    assert on["total_output_tokens"] == off["total_output_tokens"] == 72
    assert report.ratios() == {
        "output_throughput_ratio": pytest.approx(off["duration"] / on["duration"]),
        "tpot_ratio": pytest.approx(off["mean_tpot_ms"] / on["mean_tpot_ms"]),
    }


def test_no_more_requests_than_allowed_are_under_way(server):
    server.router.delay_s = 0.02
    limited = run_serve(IDS, ServeOptions(url=server.url, num_prompts=9, max_tokens=3, max_concurrency=3))
    assert 1 <= limited.summaries["on"]["max_concurrent_requests"] <= 3
    free = run_serve(IDS, ServeOptions(url=server.url, num_prompts=9, max_tokens=3))
    assert free.summaries["on"]["max_concurrent_requests"] > 3


def test_no_more_requests_are_under_way_than_the_server_says_it_takes():
    told = []
    with echo_gateway("toy", (EOS,), max_requests=2) as (address, _, router):
        router.delay_s = 0.02
        options = {"url": f"http://{address}", "num_prompts": 6, "max_tokens": 3}
        report = run_serve(IDS, ServeOptions(**options), lambda *progress: told.append(progress))
        assert report.summaries["on"]["max_concurrent_requests"] <= 2
        assert report.as_json(ServeOptions(**options))["max_concurrency"] == 2
        assert "Maximum request concurrency:             2\n" in report.as_text(ServeOptions(**options))
        chosen = run_serve(IDS, ServeOptions(**options, max_concurrency=5, model="toy"))
        assert chosen.summaries["on"]["max_concurrent_requests"] > 2
    assert told == [("requests", done, 6) for done in range(7)]


def test_requests_arrive_at_their_times_whether_or_not_others_are_done(server):
    server.router.delay_s = 0.3
    report = run_serve(IDS, ServeOptions(url=server.url, num_prompts=10, max_tokens=3, request_rate=40.0, seed=2))
    generator = np.random.default_rng(2)
    generator.permutation(len(IDS))
    planned = arrival_times(10, 40.0, generator)
    started = [record.started - report.records["on"][0].started for record in report.records["on"]]
    assert all(-0.05 < late < 0.5 for late in np.subtract(started, planned))
    assert max(started) < 10 * 0.3  # one after the other would take that long


def test_failures_are_counted_and_said_and_keep_out_of_the_figures(server):
    server.router.failures = [(3, DeadlineExceeded("too late")), (0, InvalidRequest("prompt", 1, "no"))]
    report = run_serve(IDS, ServeOptions(url=server.url, num_prompts=5, max_tokens=9, num_warmups=0))
    summary = report.summaries["on"]
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (3, 2, 27)
    assert sorted(summary["error_counts"].values()) == [1, 1]
    assert any("too late" in error for error in summary["error_counts"])
    assert any(error.startswith("HTTP 400: prompt is 1; no") for error in summary["error_counts"])


def test_a_full_server_is_an_error_of_the_request_and_of_the_command(server, run, refuse, prompts_file):
    server.router.max_running = 0
    options = ["bench", "serve", "--url", server.url, "--prompts", prompts_file, "--num-prompts", 2]
    options += ["--max-retries", 0]
    status, out, _ = run(*options, "--num-warmups", 0)
    assert status == 1
    assert "Failed requests:                         2" in out
    assert "2 x HTTP 429: " in out
    assert "the first request failed: HTTP 429" in refuse(*options, "--num-warmups", 1)


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Unavailable, match=url):
            run_serve(CHAT, ServeOptions(url=url))


async def broken_app(scope, receive, send):
    """Answers with what the request's `model` holds, as a stream."""
    stream = json.loads((await receive())["body"])["model"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": stream.encode()})


class FullApp:
    """Refuses its first requests, and answers the others."""

    def __init__(self, refusals):
        self.refusals = refusals

    async def __call__(self, scope, receive, send):
        status = 429 if self.refusals else 200
        body = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, '
        body += b'"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
        headers = [(b"retry-after", self.refusals.pop())] if self.refusals else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body if status == 200 else b'{"error": {"message": "full"}}'})


@pytest.mark.parametrize(("refusals", "error"), [(2, ""), (3, "HTTP 429: full")])
async def test_a_refused_request_is_sent_again_when_the_server_says(refusals, error):
    app = FullApp([b"0", b"0.05", b"0.05"][:refusals])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://full") as client:
        record = await send_request(client, IDS[0], {}, time.perf_counter(), max_retries=2)
    assert (record.error, record.retries) == (error, 2)
    if not error:
        assert record.ttft > 0.05  # it counts from the first sending
        text = format_summary(summarise([record], 1.0), "", None, math.inf)
        assert "Retries after 429:                       2\n" in text


async def read(stream):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(broken_app), base_url="http://broken") as client:
        return await send_request(client, IDS[0], {"model": stream}, time.perf_counter())


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        ("", "without a finish reason"),
        ("data: {}\n\ndata: [DONE]\n\n", "without a finish reason"),
        ("data: nonsense\n\n", "not a chunk"),
        ('data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n', "without usage"),
        ('data: {"error": {"message": "gone"}}\n\n', "gone"),
        ('data: {"error": "\\u001b[2J"}\n\n', "\ufffd[2J"),  # it cannot steer the terminal
        ('data: {"error": {"message": "\\u009b2J"}}\n\n', "\ufffd2J"),
    ],
)
async def test_a_stream_that_breaks_off_is_a_failure(stream, said):
    assert said in (await read(stream)).error


def test_the_command_prints_both_blocks_and_saves_vllms_names(server, run, tmp_path):
    rows, saved = tmp_path / "rows.jsonl", tmp_path / "result.json"
    rows.write_text("\n".join(json.dumps({"prompt": f"say {index}"}) for index in range(12)))
    command = [
        "bench",
        "serve",
        "--url",
        server.url,
        "--prompts",
        rows,
        "--max-tokens",
        8,
        "--ignore-eos",
        "--save-result",
        saved,
    ]
    both = ["--num-prompts", 6, "--block-size", 2, "--speculation", "both", "--goodput", "ttft:5000"]
    status, out, _ = run(*command, *both)
    assert status == 0
    lines = out.splitlines()
    assert [line.strip("= ") for line in lines if "Result" in line] == [
        "Serving Benchmark Result, speculation off",
        "Serving Benchmark Result, speculation on",
    ]
    assert [line.rpartition(":")[0] for line in lines[-2:]] == [
        "Output token throughput, speculation on / off",
        "Mean TPOT, speculation off / on",
    ]
    data = json.loads(saved.read_text())
    assert data["request_rate"] == "inf"
    assert data["output_throughput_ratio"] == pytest.approx(
        data["on"]["output_throughput"] / data["off"]["output_throughput"]
    )
    for mode in ("on", "off"):
        assert (data[mode]["completed"], data[mode]["total_output_tokens"]) == (6, 48)
        assert data[mode]["request_goodput"] == pytest.approx(data[mode]["request_throughput"])
    assert run(*command, "--num-prompts", 2)[0] == 0
    data = json.loads(saved.read_text())
    assert (data["completed"], data["total_output_tokens"], data["model_id"]) == (2, 16, "toy")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--request-rate", "0"], "--request-rate is 0.0"),
        (["--request-rate", "nan"], "--request-rate is NaN"),
        (["--goodput", "itl:5"], "--goodput is 'itl:5'"),
        (["--goodput", "ttft"], "--goodput is 'ttft'"),
        (["--save-result", "/absent/x.json"], "--save-result is '/absent/x.json'"),
    ],
)
def test_wrong_options_are_named_before_a_request_is_sent(refuse, prompts_file, options, said):
    assert said in refuse("bench", "serve", "--prompts", prompts_file, *options)

"""Spans of calls: their tree, times and attributes; none when tracing is off, and never a word of a client's text."""

import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count

import msgspec
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.errors import Overloaded, RouterLost
from actors.logs import ObservabilityConfig
from actors.messages import GenerationRequest, SamplingParams
from cluster.gateway.grpc.servicer import InferenceServicer
from cluster.gateway.observability import tracing as tracing_module
from cluster.gateway.observability.tracing import Tracing, open_tracing
from cluster.gateway.paceline.v1 import inference_pb2
from cluster.gateway.requests.call import CallOrigin, GenerationCall
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from cluster.generation import GenerationOptions
from cluster.router.run_round import RoundHooks, run_local_round
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.rounds import toy_core, toy_info, toy_request, toy_round
from paceline_testing.toy_target import ToyTarget
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
MODEL = ServedModel("toy", 512, len(TOKENIZER), (0,))
CONFIG = GatewayConfig()
SECRET = "fox"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE_ID}-b7ad6b7169203331-00"


class CoreRouter:
    """A `RouterClient` over a router core with a toy target, whose clock goes on by 10 ms in each step of a round."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def generate(self, request):
        self.requests.append(request)
        target = ToyTarget(eos_token_id=3, seed=4)
        prompt = np.array(request.prompt_token_ids, np.int32) % 90 + 5
        greedy = SamplingParams(seed=1, temperature=0.0)
        changes = {"prompt_token_ids": prompt, "sampling": greedy, "stop_token_ids": (), "timeout_s": None}
        core = toy_core(toy_info(97, 512))
        core.add(msgspec.structs.replace(request, **changes), 100.0)
        ticks = count(1)
        hooks = RoundHooks(now=lambda: 100.0 + 0.01 * next(ticks))  # a round is planned, assembled and committed
        while core.has_work:
            for chunk in run_local_round(core, target.verify, hooks=hooks).events:
                yield chunk


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def router():
    return CoreRouter()


def service_of(router, exporter, sample_ratio=1.0, round_spans=4):
    tracing = Tracing(SimpleSpanProcessor(exporter), sample_ratio, round_spans, "1.0")
    return GenerationService(router, TOKENIZER, MODEL, CONFIG, tracing=tracing)


async def post(service, path="/v1/completions", headers=None, **fields):
    body = {"prompt": f"the quick {SECRET}", "temperature": 0, "max_tokens": 12} | fields
    if "messages" in fields:
        del body["prompt"]
    async with gateway_client(service, CONFIG) as client:
        return await client.post(path, json=body, headers=headers or {})


def tree(exporter):
    """The root, and (name, parent's name) of all others."""
    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans}
    (root,) = (span for span in spans if span.parent is None or span.parent.span_id not in by_id)
    inner = [(span.name, by_id[span.parent.span_id].name) for span in spans if span is not root]
    return root, sorted(inner)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_one_tree_within_its_time(router, exporter, stream):
    answer = await post(service_of(router, exporter), headers={"x-request-id": "mine"}, stream=stream)
    assert answer.status_code == 200
    root, inner = tree(exporter)
    rounds = [("drafting", "round"), ("round", "rounds"), ("verification", "round")]
    whole = [(name, root.name) for name in ("prefill", "queue", "rounds")]
    assert inner == sorted(whole + 4 * rounds)
    assert root.name == "text_completion toy"
    assert root.kind.name == "SERVER"
    attributes = dict(root.attributes)
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "toy"
    assert attributes["gen_ai.provider.name"] == "paceline"
    assert attributes["gen_ai.request.max_tokens"] == attributes["gen_ai.usage.output_tokens"] == 12
    assert attributes["gen_ai.usage.input_tokens"] == len(router.requests[0].prompt_token_ids)
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["paceline.request_id"] == "mine"
    assert f'"id":"{attributes["gen_ai.response.id"]}"' in re.sub(r"\s", "", answer.text)
    assert "error.type" not in attributes
    assert len({span.context.trace_id for span in exporter.get_finished_spans()}) == 1


async def test_spans_last_as_long_as_the_router_has_said(router, exporter):
    await post(service_of(router, exporter))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    for name in ("queue", "drafting", "verification"):
        assert seconds[name] == pytest.approx(0.01, abs=1e-6)
    assert seconds["prefill"] == pytest.approx(0.02, abs=1e-6)
    assert seconds["rounds"] == pytest.approx(11 * 0.03, abs=1e-6)
    assert spans["rounds"].attributes["paceline.rounds"] == 12
    assert spans["rounds"].attributes["paceline.drafting_seconds"] == pytest.approx(11 * 0.01)
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["rounds"].start_time


async def test_no_span_holds_a_word_of_a_client(router, exporter):
    messages = [{"role": "user", "content": f"the quick {SECRET}"}]
    answer = await post(
        service_of(router, exporter), "/v1/chat/completions", messages=messages, stop=[f"my{SECRET}"], user=SECRET
    )
    assert answer.status_code == 200
    text = answer.json()["choices"][0]["message"]["content"]
    found = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "chat toy" in found
    assert SECRET not in found
    assert text not in found


async def test_the_callers_trace_goes_on_here(router, exporter):
    await post(service_of(router, exporter), headers={"traceparent": PARENT, "tracestate": "vendor=1"})
    root, _ = tree(exporter)
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.context.trace_state["vendor"] == "1"


async def test_grpc_metadata_carries_a_trace_too(router, exporter):
    class Context:
        def invocation_metadata(self):
            return [("traceparent", PARENT), ("x-request-id", "mine")]

        def set_trailing_metadata(self, metadata):
            self.trailing = metadata

    request = inference_pb2.GenerateRequest(prompt=f"the quick {SECRET}", max_tokens=4)
    await InferenceServicer(service_of(router, exporter), CONFIG).Generate(request, Context())
    root, _ = tree(exporter)
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert root.attributes["paceline.request_id"] == "mine"


@pytest.mark.parametrize(
    ("sample_ratio", "headers", "traced"),
    [(0.0, {}, False), (0.0, {"traceparent": PARENT}, True), (1.0, {"traceparent": UNSAMPLED}, False),
     (1.0, {"traceparent": "nonsense"}, True)],
)  # fmt: skip
async def test_who_has_begun_a_trace_decides_whether_it_is_sampled(router, exporter, sample_ratio, headers, traced):
    assert (await post(service_of(router, exporter, sample_ratio), headers=headers)).status_code == 200
    assert bool(exporter.get_finished_spans()) == traced
    assert router.requests[0].timed_rounds == (4 if traced else -1)


async def test_without_tracing_no_times_are_taken(router):
    assert open_tracing(ObservabilityConfig(), "1.0") is None
    service = GenerationService(router, TOKENIZER, MODEL, CONFIG)
    await post(service)
    assert router.requests[0].timed_rounds == -1
    assert not router.requests[0].wants_stats
    assert service.__dict__["_tracing"] is None


async def test_an_answer_that_a_stop_string_ends_has_its_spans(exporter, router):
    text = (await post(service_of(router, InMemorySpanExporter()))).json()["choices"][0]["text"]
    answer = await post(service_of(router, exporter), stop=[text[len(text) // 2 :][:3]])
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    _, inner = tree(exporter)
    assert {name for name, _ in inner} >= {"queue", "prefill"}


async def test_every_answer_of_a_call_has_its_spans(router, exporter):
    await post(service_of(router, exporter, round_spans=0), n=3)
    root, inner = tree(exporter)
    assert inner == sorted([(name, root.name) for name in ("prefill", "queue", "rounds")] * 3)
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",) * 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 36
    assert root.attributes["gen_ai.usage.input_tokens"] == len(router.requests[0].prompt_token_ids)
    choices = {span.attributes["paceline.choice"] for span in exporter.get_finished_spans() if span.name == "queue"}
    assert choices == {0, 1, 2}


async def test_what_failed_says_so(exporter):
    router = EchoRouter()
    router.failures = [(0, Overloaded("full", 1.0))]
    assert (await post(service_of(router, exporter))).status_code == 429
    assert (await post(service_of(router, exporter), temperature=99)).status_code == 400  # read before it is traced
    assert (await post(service_of(router, exporter), max_tokens=10_000)).status_code == 400
    first, second = exporter.get_finished_spans()
    assert (first.attributes["error.type"], second.attributes["error.type"]) == ("overloaded", "invalid_value")
    assert first.status.status_code.name == second.status.status_code.name == "ERROR"


async def test_a_client_that_leaves_is_no_error(exporter):
    service = service_of(EchoRouter(delay_s=0.01), exporter)
    prepared = await service.prepare(
        GenerationCall(prompts=("a b c d e f",), options=GenerationOptions(max_new_tokens=50)), "call"
    )
    pieces = service.stream(prepared)
    await anext(pieces)
    await pieces.aclose()
    root, _ = tree(exporter)
    assert root.attributes["error.type"] == "cancelled"
    assert root.status.status_code.name == "UNSET"


async def test_a_lost_router_is_an_event_of_the_call(exporter):
    router = EchoRouter()
    router.failures = [(3, RouterLost("gone"))]
    assert (await post(service_of(router, exporter))).status_code == 200
    root, _ = tree(exporter)
    assert [event.name for event in root.events] == ["router lost"]


def test_only_the_first_rounds_are_told_one_by_one():
    core = toy_core(toy_info(97, 512))
    target = ToyTarget(eos_token_id=3, seed=4, seconds=lambda rows: 0.5)
    for name, timed in (("a", 3), ("b", 0), ("c", -1)):
        core.add(toy_request(name, [5, 6, 7], 10, timed_rounds=timed), 1.0)
    now, times = 1.0, {}
    while core.has_work:
        events = toy_round(core, target.verify, now).events
        now += 1.0
        times |= {chunk.request_id: chunk.times for chunk in events if chunk.finish_reason}
        assert all(chunk.times is None for chunk in events if not chunk.finish_reason)
    assert times["c"] is None
    assert [len(times[name].rounds) for name in "ab"] == [3, 0]
    assert [one.num_tokens for one in times["a"].rounds] == [1, 1, 1]
    assert (times["b"].started_s, times["b"].first_token_s, times["b"].verify_s) == (0.0, 0.5, 4.5)


@pytest.mark.parametrize(
    "url", ["collector:4318", "ftp://collector", "http://", "http://a:b@collector:4318", "http://a b"]
)
def test_an_endpoint_that_is_no_plain_url_is_refused(url):
    with pytest.raises(ValueError, match="otlp_endpoint must be a URL"):
        ObservabilityConfig(otlp_endpoint=url)


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def collector():
    """It takes connections, and answers within `answering` only."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.bodies = []
        yield server


@contextmanager
def answering(server):
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


def open_to(collector):
    return open_tracing(ObservabilityConfig(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}"), "1.0")


def test_spans_reach_a_collector_over_http(collector):
    tracing = open_to(collector)
    with answering(collector):
        trace = tracing.begin(GenerationCall(prompts=("a",)), "call-1", CallOrigin("mine"), "toy", 0.0)
        trace.end(None)
        tracing.close()
    ((path, body),) = collector.bodies
    assert path == "/v1/traces"
    spans = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert [span.name for span in spans] == ["text_completion toy"]


HOSTILE_HEADERS = [
    {"traceparent": "x" * 10_000},
    {"traceparent": PARENT + "-" + "x" * 10_000},
    {"traceparent": PARENT, "tracestate": f"{SECRET}, no member"},
    {"traceparent": PARENT, "tracestate": f"a={SECRET}," * 1000},
    {"traceparent": PARENT, "tracestate": f"{SECRET}=1,{SECRET}=2"},
    {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"},
    {"traceparent": f"ff-{TRACE_ID}-b7ad6b7169203331-01"},
    {"traceparent": PARENT.upper()},
]


@pytest.mark.parametrize("headers", HOSTILE_HEADERS)
async def test_a_broken_trace_of_a_caller_costs_nothing_and_is_not_logged(router, exporter, headers, caplog):
    assert (await post(service_of(router, exporter), headers=headers)).status_code == 200
    assert SECRET not in caplog.text
    assert len(caplog.text) < 200
    assert len(exporter.get_finished_spans()[-1].context.trace_state.to_header()) <= 512


async def test_a_name_of_a_model_that_is_not_served_is_not_told(router, exporter):
    assert (await post(service_of(router, exporter), model=SECRET * 1000)).status_code == 404
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.request.model"] == "unknown"
    assert SECRET not in span.to_json()


def test_a_collector_that_hangs_holds_up_neither_calls_nor_the_end(collector, monkeypatch):
    monkeypatch.setattr(tracing_module, "_CLOSE_S", 0.2)
    tracing = open_to(collector)
    call = GenerationCall(prompts=("a",))
    for number in range(5000):
        tracing.begin(call, "id", CallOrigin(str(number)), "toy", time.monotonic()).end(None)
    started = time.monotonic()
    tracing.close()
    assert time.monotonic() - started < 10  # the exporter by itself: 30
    with answering(collector):  # or its thread logs its failures while other tests run
        (closing,) = [thread for thread in threading.enumerate() if thread.name == "close-tracing"]
        closing.join()


@pytest.mark.parametrize("number", [2**63, 10**30, -(2**63) - 1])
def test_a_number_beyond_the_format_costs_no_spans(exporter, number):
    tracing = Tracing(SimpleSpanProcessor(exporter), 1.0, 4, "1.0")
    call = GenerationCall(prompts=("a",), options=GenerationOptions.model_construct(seed=number, max_new_tokens=number))
    tracing.begin(call, "id", CallOrigin("a"), "toy", 0.0).end(None)
    (span,) = exporter.get_finished_spans()
    assert not [key for key in span.attributes if key.endswith(("seed", "max_tokens"))]

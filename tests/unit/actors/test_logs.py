"""Logs as JSON and text, and the id of a request in all that is said of it."""

import json
import logging

import pytest

from actors.errors import RouterLost
from actors.logs import OTHERS, PACKAGES, ObservabilityConfig, configure_logging, request_id, request_id_of
from cluster.gateway.grpc.servicer import InferenceServicer
from cluster.gateway.paceline.v1 import inference_pb2
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_tokenizer import toy_tokenizer

PROMPT = "a secret that no log may hold"
TOKENIZER = toy_tokenizer()
MODEL = ServedModel("toy", 512, len(TOKENIZER), (0,))


@pytest.fixture(autouse=True)
def loggers():
    """As they were, afterwards."""
    loggers = [logging.getLogger(name) for name in PACKAGES + OTHERS]
    before = [(one, one.handlers, one.propagate, one.level) for one in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def configured(log_format="json", log_level="info"):
    configure_logging(ObservabilityConfig(log_format=log_format, log_level=log_level), "gateway")


def logged(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.fixture
def router():
    return EchoRouter()


@pytest.fixture
def service(router):
    return GenerationService(router, TOKENIZER, MODEL, GatewayConfig())


@pytest.fixture
async def client(service):
    async with gateway_client(service, GatewayConfig()) as client:
        yield client


async def complete(client, headers=None, **fields):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    return await client.post("/v1/completions", json=body, headers=headers or {})


def test_a_line_of_json_has_what_it_is_about_and_nothing_twice(capsys):
    configured()
    logger = logging.getLogger("cluster.somewhere")
    logger.info("%d rounds\nof two lines", 3, extra={"rounds": 3, "shape": {1, 2} and object})
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("it failed")
    first, second = logged(capsys)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "cluster.somewhere",
        "component": "gateway",
        "request_id": "",
        "message": "3 rounds\nof two lines",
        "rounds": 3,
        "shape": "<class 'object'>",
    }
    assert second["level"] == "error"
    assert "ValueError: wrong" in second["traceback"]


def test_lines_of_text_name_the_request(capsys):
    configured("text", "warning")
    token = request_id.set("abc")
    logging.getLogger("actors.x").info("not this")
    logging.getLogger("actors.x").warning("but this")
    request_id.reset(token)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING gateway actors.x [abc] but this")


@pytest.mark.parametrize(
    "value", [2**70, "\ud800", {"a": {3: "\udfff"}}, float("nan"), b"\xff", {1, 2}, [[[object()]]], "\u2028\r\n\x1b"]
)
def test_whatever_a_record_holds_it_is_one_object_a_line(capsys, value):
    configured()
    log = logging.getLogger("cluster.x")
    log.error("first %s\nsecond", value, extra={"value": value, "component": "other", "level": value})
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    found = json.loads(line)
    assert (found["level"], found["component"]) == ("error", "gateway")
    assert found["message"].startswith("first ")
    assert "value" in found


def test_no_message_looks_like_another_record(capsys):
    configured("text")
    try:
        raise ValueError("wrong\n2026-01-01 ERROR gateway forged")
    except ValueError:
        logging.getLogger("cluster.x").exception("one\r\x1b[31m\n2026-01-01 ERROR gateway forged\u2028")
    lines = capsys.readouterr().err.split("\n")[:-1]
    assert "\x1b" not in lines[0]
    assert "\r" not in lines[0]
    assert len(lines) > 4
    assert all(line.startswith("    ") for line in lines[1:])


def test_warnings_of_what_sends_spans_are_logged_alike(capsys):
    configured(log_level="debug")
    logging.getLogger("opentelemetry.exporter.x").warning("no collector")
    logging.getLogger("opentelemetry.exporter.x").info("not this")
    (line,) = logged(capsys)
    assert line["message"] == "no collector"


def test_called_again_it_replaces_what_was_said(capsys):
    configured()
    configured("json", "error")
    logging.getLogger("cluster.x").warning("not this")
    logging.getLogger("cluster.x").error("once")
    assert [line["message"] for line in logged(capsys)] == ["once"]


@pytest.mark.parametrize("given", [None, "", "two words", "new\nline", "é", "x" * 129])
def test_an_id_that_is_not_fit_for_a_log_is_replaced(given):
    found = request_id_of(given)
    assert found != given
    assert len(found) == 32
    assert request_id_of("Kunde-7/a") == "Kunde-7/a"


@pytest.mark.parametrize("path", ["/v1/models", "/readyz", "/nothing"])
async def test_every_answer_has_the_id_of_its_call_or_a_new_one(client, path):
    assert (await client.get(path, headers={"x-request-id": "mine"})).headers.get_list("x-request-id") == ["mine"]
    first, second = [(await client.get(path)).headers["x-request-id"] for _ in range(2)]
    assert first != second


async def test_behind_serve_the_id_is_left_to_its_proxy(service):
    async with gateway_client(service, GatewayConfig(), answers_request_id=False) as client:
        assert "x-request-id" not in (await client.get("/readyz", headers={"x-request-id": "mine"})).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_id_is_in_the_answer_the_log_and_what_the_router_gets(client, router, capsys, stream):
    configured()
    answer = await complete(client, {"x-request-id": "mine"}, stream=stream, n=2)
    assert answer.headers["x-request-id"] == "mine"
    assert {request.caller_id for request in router.requests} == {"mine"}
    assert len({request.request_id for request in router.requests}) == 2
    lines = [line for line in logged(capsys) if "outcome" in line]
    assert {line["request_id"] for line in lines} == {"mine"}
    assert [(line["outcome"], line["completion_tokens"]) for line in lines] == [("length", 8)] * 2
    assert all(line["prompt_tokens"] == len(router.requests[0].prompt_token_ids) for line in lines)
    assert "secret" not in json.dumps(lines)


async def test_two_calls_at_once_with_the_same_id_are_both_answered(client, router):
    for _ in range(2):
        assert (await complete(client, {"x-request-id": "mine"})).status_code == 200


async def test_what_goes_wrong_within_a_call_is_logged_with_its_id(client, router, capsys):
    configured(log_level="warning")
    router.failures = [(3, RouterLost("gone"))]
    assert (await complete(client, {"x-request-id": "mine"})).status_code == 200
    (line,) = logged(capsys)
    assert "router lost" in line["message"]
    assert line["request_id"] == "mine"


class Context:
    """The context of a gRPC call."""

    def __init__(self, **metadata: str) -> None:
        self.metadata = [(key.replace("_", "-"), value) for key, value in metadata.items()]
        self.trailing: dict[str, str] = {}
        self.code = None

    def invocation_metadata(self):
        return self.metadata

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        pass

    def set_trailing_metadata(self, metadata):
        self.trailing = dict(metadata)


@pytest.mark.parametrize("prompt", [PROMPT, ""])
async def test_a_grpc_call_gets_its_id_back_whether_it_succeeds_or_not(service, router, prompt):
    context = Context(x_request_id="mine")
    request = inference_pb2.GenerateRequest(prompt=prompt, max_tokens=4)
    await InferenceServicer(service, GatewayConfig()).Generate(request, context)
    assert (context.code is None) == bool(prompt)
    assert context.trailing["x-request-id"] == "mine"
    assert {request.caller_id for request in router.requests} <= {"mine"}

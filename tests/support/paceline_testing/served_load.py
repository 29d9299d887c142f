"""Requests that go on while something happens to a cluster, and what has become of them."""

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

import grpc
import httpx

from cluster.gateway.paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline_testing.scraped import values_of

TIMEOUT_S = 240.0

Parts: TypeAlias = Generator[str, None, None]


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    max_tokens: int
    answer: str  # the only right one
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client reads an answer."""

    pause_s: float = 0.0  # after each part
    num_parts: int | None = None  # after which it leaves; None: it stays


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Times come from `time.monotonic`."""

    kind: str
    manner: Manner
    started: float
    ended: float = 0.0
    # Seconds to the first part, between parts, and to the end; without the client's own pauses.
    gaps_s: list[float] = field(default_factory=list)
    has_left: bool = False  # before the end
    error: str | None = None  # also where it was answered, but wrongly


@dataclass(frozen=True, slots=True)
class Summary:
    sent: int
    failed: int
    longest_gap_s: float
    errors: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.sent} sent, {self.failed} failed, longest gap {self.longest_gap_s:.1f} s"


class Client:
    """Asks one gateway, greedily, over HTTP and gRPC."""

    def __init__(self, url: str, grpc_address: str, speculates: bool = True) -> None:
        self.url = url
        self.grpc_address = grpc_address
        self._speculates = speculates
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=100))
        self._channel = grpc.insecure_channel(grpc_address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self.kinds: dict[str, Callable[[Question], Parts]] = {
            "HTTP": self._http_unary,
            "HTTP stream": self._http_stream,
            "HTTP chat stream": self._http_chat_stream,
            "gRPC": self._grpc_unary,
            "gRPC stream": self._grpc_stream,
        }

    def ask(self, kind: str, question: Question, manner: Manner = Manner()) -> Record:
        """Send a request and record its outcome, whatever it is."""
        record = Record(kind, manner, time.monotonic())
        text, before = "", record.started
        parts = self.kinds[kind](question)
        try:
            with closing(parts):
                for part in parts:
                    record.gaps_s.append(time.monotonic() - before)
                    text += part
                    record.has_left = len(record.gaps_s) == manner.num_parts
                    if record.has_left:
                        break
                    time.sleep(manner.pause_s)
                    before = time.monotonic()
            wanted = question.answer[: len(text)] if record.has_left else question.answer
            if text != wanted:
                record.error = f"answered {text!r} instead of {wanted!r}"
        except (httpx.HTTPError, grpc.RpcError, AssertionError) as error:
            record.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        record.ended = time.monotonic()
        record.gaps_s.append(record.ended - before)
        return record

    def is_ready(self) -> bool:
        try:
            return self._http.get("/readyz", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str) -> list[float]:
        """Values of all processes that expose the metric."""
        return values_of(self._http.get("/metrics", timeout=30).text, name)

    def close(self) -> None:
        self._channel.close()
        self._http.close()

    def _body(self, question: Question) -> dict[str, object]:
        return {
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "ignore_eos": True,
            "speculation": {"enabled": self._speculates},
        }

    def _http_unary(self, question: Question) -> Parts:
        answer = self._http.post("/v1/completions", json=self._body(question))
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
        yield answer.json()["choices"][0]["text"]

    def _http_stream(self, question: Question) -> Parts:
        for choice in self._choices("/v1/completions", self._body(question)):
            yield choice["text"]

    def _http_chat_stream(self, question: Question) -> Parts:
        body = self._body(question)
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        for choice in self._choices("/v1/chat/completions", body):
            yield choice["delta"].get("content") or ""

    def _choices(self, path: str, body: dict[str, object]) -> Generator[dict[str, Any], None, None]:
        """Those of all events of a stream."""
        with self._http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, f"{answer.status_code}: {answer.read().decode()}"
            is_whole = False
            for line in answer.iter_lines():
                is_whole = is_whole or line == "data: [DONE]"
                if line.startswith("data: ") and not is_whole:
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    yield from event["choices"]
            assert is_whole, "the stream ended without [DONE]"

    def _request(self, question: Question) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            prompt=question.prompt,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            seed=question.seed,
            ignore_eos=True,
            speculation=inference_pb2.Speculation(enabled=self._speculates),
        )

    def _grpc_unary(self, question: Question) -> Parts:
        yield self._stub.Generate(self._request(question), timeout=TIMEOUT_S).text

    def _grpc_stream(self, question: Question) -> Parts:
        call = self._stub.GenerateStream(self._request(question), timeout=TIMEOUT_S)
        try:
            for chunk in call:
                yield chunk.text
        finally:
            call.cancel()


class Load:
    """Asks the questions in turn until it is closed: of each kind so many clients, one request after the other, which
    take the manners in turn."""

    def __init__(
        self,
        client: Client,
        clients: dict[str, int],
        questions: dict[str, Sequence[Question]],
        manners: Sequence[Manner] = (Manner(),),
    ) -> None:
        self.records: list[Record] = []
        self._manners = manners
        self._num_answered = [0] * sum(clients.values())
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(sum(clients.values()))
        kinds = [kind for kind, count in clients.items() for _ in range(count)]
        self._running: list[Future[None]] = [
            self._pool.submit(self._keep_asking, client, kind, number, questions[kind])
            for number, kind in enumerate(kinds)
        ]

    def __enter__(self) -> "Load":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets what is open finish."""
        self._over.set()
        for running in self._running:
            running.result()
        self._pool.shutdown()

    def wait_for_answers(self) -> None:
        """Until every client has been answered once more, rightly or not."""
        counts = list(self._num_answered)
        deadline = time.monotonic() + TIMEOUT_S
        while any(now == before for now, before in zip(self._num_answered, counts, strict=True)):
            assert time.monotonic() < deadline, self._num_answered
            time.sleep(0.05)

    def summaries(self, since: float) -> dict[str, Summary]:
        """By kind; only requests that were open at that time or came later."""
        records = [record for record in self.records if record.ended >= since]
        return {
            kind: Summary(
                len(those),
                sum(record.error is not None for record in those),
                max((max(record.gaps_s) for record in those), default=0.0),
                tuple(record.error for record in those if record.error is not None),
            )
            for kind in sorted({record.kind for record in records})
            for those in [[record for record in records if record.kind == kind]]
        }

    def _keep_asking(self, client: Client, kind: str, number: int, questions: Sequence[Question]) -> None:
        turn = number
        while not self._over.is_set():
            manner = self._manners[turn % len(self._manners)]
            self.records.append(client.ask(kind, questions[turn % len(questions)], manner))
            self._num_answered[number] += 1
            turn += 1

"""What answers a conversation: an engine in this process or a server."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import httpx

from actors.errors import InvalidRequest, PacelineError, Unavailable
from cluster.cli.answer_stream import Speculation, message_of, message_of_refusal, read_events
from cluster.cli.api_key import bearer_headers
from cluster.generation import LOCAL_TEMPERATURE, GenerationOptions
from cluster.router.trace import RoundTrace

if TYPE_CHECKING:
    from cluster.offline.engine import LocalEngine

_TIMEOUT = httpx.Timeout(10.0, read=600.0)

Message = dict[str, str]  # its role (system, user or assistant) and content
OnRound = Callable[[RoundTrace], None]


class Span(NamedTuple):
    """Text of an answer and who proposed it; None: unknown."""

    text: str
    source: str | None


class AnswerTotals(NamedTuple):
    num_tokens: int
    finish_reason: str
    speculation: Speculation


Parts = Generator[Span | AnswerTotals, None, None]  # text as it arrives, then the totals


class Backend(Protocol):
    model_name: str
    sources: tuple[str, ...] | None = None  # names of drafters; None: unknown, and so are rounds

    def answer(self, messages: Sequence[Message], options: GenerationOptions, on_round: OnRound) -> Parts:
        """Closing it, or KeyboardInterrupt from it, ends the answer. Raises PacelineError."""
        ...


class LocalBackend(Backend):
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.model_name = engine.info.name
        self.sources = engine.drafter_names

    def answer(self, messages: Sequence[Message], options: GenerationOptions, on_round: OnRound) -> Parts:
        with _held_interrupts() as interrupted:

            def note(trace: RoundTrace) -> None:
                on_round(trace)
                if interrupted.is_set() and not trace.num_emitted:
                    raise KeyboardInterrupt

            with closing(self._engine.stream(messages, options, on_round=note)) as pieces:
                for piece in pieces:
                    yield from spans_of(piece.token_texts, piece.sources, piece.text)
                    if (generation := piece.generation) is not None:
                        speculation = Speculation(
                            generation.rounds, generation.draft_tokens, generation.accepted_tokens
                        )
                        yield AnswerTotals(len(generation.token_ids), generation.finish_reason, speculation)
                    elif interrupted.is_set():
                        raise KeyboardInterrupt


def spans_of(token_texts: Sequence[str], sources: Sequence[str], text: str) -> list[Span]:
    """One span for each run of tokens of a source. What `text` has beyond the tokens' texts belongs to the last."""
    rest = text[sum(map(len, token_texts)) :]
    pairs = [*zip(token_texts, sources, strict=True), (rest, sources[-1] if sources else "target")]
    runs = groupby((pair for pair in pairs if pair[0]), key=lambda pair: pair[1])
    return [Span("".join(part for part, _ in run), source) for source, run in runs]


@contextmanager
def _held_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the round under way ends and its KV cache stays valid; a second one interrupts."""
    event = threading.Event()

    def hold(*_: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not set by Python


class ServerBackend(Backend):
    """Answers over OpenAI's HTTP API, which tells who proposed tokens in its totals only."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises InvalidRequest for a malformed address, Unavailable where no server answers."""
        url = url.rstrip("/").removesuffix("/v1")
        try:
            is_http = httpx.URL(url).scheme in ("http", "https") and bool(httpx.URL(url).host)
        except httpx.InvalidURL:
            is_http = False
        if not is_http:
            raise InvalidRequest("--url", url, "it must be an address such as http://127.0.0.1:8000")
        self._url = url
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT, headers=bearer_headers(api_key))
        self.model_name = self._served_model()

    def answer(self, messages: Sequence[Message], options: GenerationOptions, on_round: OnRound) -> Parts:
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=_request(messages, options)) as response:
                if response.status_code != 200:
                    message = message_of_refusal(response.read())
                    raise PacelineError(f"the server answered {response.status_code}: {message}")
                yield from _read(response)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._url}: {str(error) or type(error).__name__}") from None

    def _served_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise Unavailable(f"{self._url}/v1/models does not list a model: {reason}") from None


def _request(messages: Sequence[Message], options: GenerationOptions) -> dict[str, Any]:
    """The body. The temperature is always told: a server samples by default."""
    speculation = options.model_dump(include={"drafters", "max_draft_tokens"}, exclude_none=True)
    return {
        **options.model_dump(include={"top_p", "top_k", "seed"}, exclude_none=True),
        **({} if options.max_new_tokens is None else {"max_tokens": options.max_new_tokens}),
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": options.temperature or LOCAL_TEMPERATURE,
        "speculation": {"stats": True, **speculation},
    }


def _read(response: httpx.Response) -> Parts:
    num_tokens, finish_reason = 0, None
    speculation = Speculation()
    for event in read_events(response.iter_bytes()):
        if event.error is not None:
            raise PacelineError(message_of(event.error))
        speculation = event.speculation or speculation
        if event.usage is not None:
            num_tokens = event.usage.completion_tokens
        for choice in event.choices:
            finish_reason = choice.finish_reason or finish_reason
            if choice.new_text:
                yield Span(choice.new_text, None)
    if finish_reason is None:
        raise Unavailable("the server's stream ended in the middle of the answer")
    yield AnswerTotals(num_tokens, finish_reason, speculation)

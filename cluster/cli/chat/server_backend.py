"""Answers of a running server over OpenAI's HTTP API, which tells who proposed tokens in its totals only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import httpx

from actors.errors import InvalidRequest, PacelineError, Unavailable
from cluster.cli.answer_stream import Speculation, message_of, message_of_refusal, read_events
from cluster.cli.api_key import bearer_headers
from cluster.cli.chat.backend import AnswerPart, AnswerTotals, Backend, Message, Span
from cluster.generation import LOCAL_TEMPERATURE, GenerationOptions

_TIMEOUT = httpx.Timeout(10.0, read=600.0)


class ServerBackend(Backend):
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

    def answer(self, messages: Sequence[Message], options: GenerationOptions) -> Generator[AnswerPart, None, None]:
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


def _read(response: httpx.Response) -> Generator[AnswerPart, None, None]:
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
                yield AnswerPart((Span(choice.new_text, None),), None)
    if finish_reason is None:
        raise Unavailable("the server's stream ended in the middle of the answer")
    totals = AnswerTotals(
        num_tokens=num_tokens,
        rounds=speculation.rounds,
        draft_tokens=speculation.draft_tokens,
        accepted=speculation.accepted_tokens,
        finish_reason=finish_reason,
    )
    yield AnswerPart((), None, totals)

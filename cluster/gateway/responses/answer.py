"""OpenAI's responses: output items and the events that build them. A whole answer is what its events end with."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from cluster.gateway.answers.chat_events import ChatEvents, new_call_id
from cluster.gateway.answers.content_scores import ContentScores
from cluster.gateway.answers.logprobs import TokenScore, chat_logprobs
from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.answers.totals import AnswerTotals
from cluster.gateway.errors import ErrorStatus
from cluster.gateway.requests.service_tier import tier_of_class
from cluster.gateway.responses.schema import FunctionTool, ResponsesBody
from cluster.gateway.service import GenerationService
from cluster.text.tools.events import CallArguments, CallBegin, Content, Event, Reasoning

_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
_PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """Writes one answer. `begin`, `take` for each piece, then `end` or `fail` return events in order."""

    def __init__(self, prepared: PreparedCall, service: GenerationService, body: ResponsesBody) -> None:
        self._call = prepared.call
        self._strings = service.token_strings
        self._events = ChatEvents(service.answer_parser(prepared))
        self._scores = ContentScores(service.token_strings)
        self._totals = AnswerTotals(prepared.num_prompt_tokens, 1, prepared.num_prediction_tokens)
        self._response = _head(prepared.arrival.call_id, service.model.name, body)
        self._response["service_tier"] = tier_of_class(prepared.requests[0].service_class)
        self._output: list[dict[str, Any]] = self._response["output"]
        self._open: dict[str, Any] | None = None  # the last item of the output, while it grows
        self._is_cut = False
        self._num_events = 0

    @property
    def reasoning_text(self) -> str:
        return "".join(part["text"] for item in self._output if item["type"] == "reasoning" for part in item["content"])

    @property
    def answer(self) -> dict[str, Any]:
        return self._response

    def begin(self) -> list[dict[str, Any]]:
        return [self._about_all("response.created"), self._about_all("response.in_progress")]

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        self._totals.add(piece)
        self._is_cut = piece.finish_reason == "length"
        self._scores.add(piece.scores)
        return [written for event in self._events.of(piece) for written in self._take(event)]

    def end(self, num_reasoning_tokens: int) -> list[dict[str, Any]]:
        written = []
        if not self._output:
            written += self._open_item("message", content=[])
        status = "incomplete" if self._is_cut else "completed"
        written += self._close_item(status)
        self._response["status"] = status
        if self._is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        self._response["usage"] = self._usage(num_reasoning_tokens)
        if self._call.wants_stats:
            self._response["speculation"] = self._totals.speculation()
        return [*written, self._about_all(f"response.{status}")]

    def fail(self, error: ErrorStatus) -> list[dict[str, Any]]:
        code = "rate_limit_exceeded" if error.http == 429 else "server_error"
        self._response["status"] = "failed"
        self._response["error"] = {"code": code, "message": error.message}
        return [self._about_all("response.failed")]

    def _take(self, event: Event) -> list[dict[str, Any]]:
        scores = self._scores.take(event)
        if isinstance(event, CallBegin):
            fields = {"call_id": new_call_id(), "name": event.name, "arguments": ""}
            return self._open_item("function_call", **fields)
        if isinstance(event, CallArguments):
            return self._add_arguments(event.text)
        return self._add_text(event, scores)

    def _add_arguments(self, text: str) -> list[dict[str, Any]]:
        item = self._last()
        item["arguments"] += text
        return [self._about_item("response.function_call_arguments.delta", delta=text)]

    def _add_text(self, event: Content | Reasoning, scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
        kind = "reasoning" if isinstance(event, Reasoning) else "message"
        written = []
        if self._open is None or self._open["type"] != kind:
            written = self._open_item(kind, content=[], **({"summary": []} if kind == "reasoning" else {}))
        part = self._last()["content"][0]
        part["text"] += event.text
        if kind == "reasoning":
            delta = self._about_part("response.reasoning_text.delta", delta=event.text)
        else:
            logprobs = self._named(scores)
            part["logprobs"] += logprobs
            delta = self._about_part("response.output_text.delta", delta=event.text, logprobs=logprobs)
        return [*written, delta]

    def _named(self, scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
        if self._call.options.logprobs is None:
            return []
        content: list[dict[str, Any]] = chat_logprobs(scores, self._strings)["content"]
        return content

    def _last(self) -> dict[str, Any]:
        assert self._open is not None  # an item begins before its text comes
        return self._open

    def _open_item(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        written = self._close_item("completed")
        item = {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item["role"] = "assistant"
        self._output.append(item)
        self._open = item
        written.append(self._about_item("response.output_item.added", with_item=True))
        if kind in _PART_TYPES:
            part: dict[str, Any] = {"type": _PART_TYPES[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            written.append(self._about_part("response.content_part.added", part=_copy(part)))
        return written

    def _close_item(self, status: str) -> list[dict[str, Any]]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        written = []
        if item["type"] == "function_call":
            written.append(self._about_item("response.function_call_arguments.done", arguments=item["arguments"]))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                logprobs = list(part["logprobs"])
                written.append(self._about_part("response.output_text.done", text=part["text"], logprobs=logprobs))
            else:
                written.append(self._about_part("response.reasoning_text.done", text=part["text"]))
            written.append(self._about_part("response.content_part.done", part=_copy(part)))
        written.append(self._about_item("response.output_item.done", with_item=True))
        self._open = None
        return written

    def _event(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _about_all(self, kind: str) -> dict[str, Any]:
        return self._event(kind, {"response": {**self._response, "output": [_copy(item) for item in self._output]}})

    def _about_item(self, kind: str, with_item: bool = False, **fields: Any) -> dict[str, Any]:
        place: dict[str, Any] = {"output_index": len(self._output) - 1}
        if with_item:
            return self._event(kind, {**place, "item": _copy(self._last())})
        return self._event(kind, {**place, "item_id": self._last()["id"], **fields})

    def _about_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._about_item(kind, content_index=0, **fields)

    def _usage(self, num_reasoning_tokens: int) -> dict[str, Any]:
        usage = self._totals.usage()
        reasoning = min(num_reasoning_tokens, self._totals.num_completion_tokens)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._totals.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning, **usage.get("completion_tokens_details", {})},
            "total_tokens": usage["total_tokens"],
        }


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """A copy of an item or a part that goes on growing, with copies of its lists and of the objects in them."""
    return {
        name: [_copy(one) if isinstance(one, dict) else one for one in value] if isinstance(value, list) else value
        for name, value in item.items()
    }


def _head(call_id: str, model: str, body: ResponsesBody) -> dict[str, Any]:
    """The answer before there is any: what the request asks for, with defaults where it does not say."""
    reasoning = body.reasoning
    return {
        "id": call_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "text": {"format": _format_of(body), "verbosity": "medium"},
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _format_of(body: ResponsesBody) -> dict[str, Any]:
    format = None if body.text is None else body.text.format
    return {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)


def _plain(choice: Any) -> Any:
    return choice if choice is None or isinstance(choice, str) else choice.model_dump()


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict is not False,
    }

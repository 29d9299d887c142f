"""Generation as HTTP and gRPC share it: validate, tokenise, ask the router, turn tokens into text.

Knows no wire format. `prepare` raises everything that is wrong with a call before any model work; `stream` yields text.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from actors.drafters.registry import AUTO, NONE, expand_drafters
from actors.errors import DeadlineExceeded, InvalidRequest, PacelineError, Unavailable
from actors.messages import GenerationRequest, RequestTimes, SamplingParams, SpeculationStats, TokenChunk
from cluster.config import GatewayConfig
from cluster.gateway.call import CallOrigin, FinishReason, GenerationCall, Piece, ServedModel
from cluster.gateway.errors import ModelNotFound, status_of, unwrap
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.resume import generate_unbroken
from cluster.gateway.router_client import RouterClient
from cluster.gateway.streams import AS_IT_COMES, StreamShape, fan_in, shaped, stream_shape
from cluster.request_limits import check_token_ids, num_new_tokens
from cluster.router.status import RouterStatus
from cluster.tenants.gatekeeper import Gatekeeper, Tenant
from cluster.tenants.scope import Scope, scope_of
from cluster.text.detokenizer import Detokenizer
from cluster.text.stop_strings import StopStrings
from cluster.text.text_codec import TextCodec

if TYPE_CHECKING:
    from cluster.gateway.tracing import CallTrace, Tracing  # which brings OpenTelemetry

logger = logging.getLogger(__name__)

MAX_CHOICES = 32  # prompts x n of one call

_RECENT_S = 2.0  # for which probes go by what the router has last said


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that can be served: one request per answer, in order of choice."""

    call_id: str
    origin: CallOrigin
    arrived: float  # time.monotonic()
    call: GenerationCall
    requests: tuple[GenerationRequest, ...]
    num_prompt_tokens: int  # all prompts, each counted once
    deadline: float  # time.monotonic()
    scope: Scope
    stream_shape: StreamShape  # of a stream of it
    tenant: Tenant | None = None  # None: nobody needs a key
    trace: CallTrace | None = None  # None: it is not traced


class GenerationService:
    """One per gateway replica; holds no state of a call."""

    def __init__(
        self,
        router: RouterClient,
        tokenizer: Any,
        model: ServedModel,
        config: GatewayConfig,
        metrics: GatewayMetrics | None = None,
        gatekeeper: Gatekeeper | None = None,
        tracing: Tracing | None = None,
        all_gateways: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`tokenizer` is a `transformers` tokenizer. gatekeeper None: whoever calls is served. tracing: None: off.
        all_gateways: the metrics of all replicas; None: there is this one."""
        self.router = router
        self._all_gateways = all_gateways
        self._gatekeeper = gatekeeper
        self._tracing = tracing
        self.model = model
        self.last_status: RouterStatus | None = None  # None: no router has answered
        self._followed: tuple[RouterStatus, float] | None = None  # by `follow_router`, and when it was heard
        self.metrics = metrics or GatewayMetrics()
        self._codec = TextCodec(tokenizer, model.name)
        self._config = config

    async def router_status(self) -> RouterStatus:
        """Raises what `RouterClient.status` raises."""
        try:
            status = self.last_status = await self.router.status()
        except Exception:
            self.last_status = None
            raise
        if status.max_model_len not in (None, self.model.max_model_len):
            self.model = replace(self.model, max_model_len=status.max_model_len)
        return status

    async def metrics_page(self) -> str:
        """Metrics of gateways and routers in Prometheus text format; of routers only if one answers."""
        text = self.metrics.text() if self._all_gateways is None else await self._all_gateways()
        try:
            return text + await self.router.metrics_text()
        except PacelineError as error:
            logger.warning("no metrics from the router: %s", error)
            return text

    async def follow_router(self, period_s: float = 1.0) -> None:
        """Goes by the router's limit, for ever: it depends on the target's memory, and may change with its restart."""
        while True:
            try:
                self._followed = await self.router_status(), time.monotonic()
            except PacelineError as error:
                logger.debug("no status from the router: %s", error)
            except Exception:
                logger.exception("the router's status cannot be read")
            await asyncio.sleep(period_s)

    async def recent_status(self) -> RouterStatus:
        """For probes, of which there are many: they neither wait for a router that is busy with a round nor take its
        time, as long as it has lately been heard. Raises what `router_status` raises."""
        if self._followed is not None and time.monotonic() - self._followed[1] < _RECENT_S:
            return self._followed[0]
        return await self.router_status()

    def enter(self, authorization: Iterable[str]) -> Tenant | None:
        """First of all in a call: whose it is. See `Gatekeeper.enter`."""
        return None if self._gatekeeper is None else self._gatekeeper.enter(authorization)

    async def prepare(
        self, call: GenerationCall, call_id: str, tenant: Tenant | None = None, origin: CallOrigin | None = None
    ) -> PreparedCall:
        """Raises InvalidRequest (or ModelNotFound) naming field, value and limit. origin: None: nobody has said."""
        arrived = time.monotonic()
        origin = origin or CallOrigin(call_id)
        trace = None if self._tracing is None else self._tracing.begin(call, call_id, origin, self.model.name, arrived)
        try:
            with self.counting_refusals():
                return await self._prepare(call, call_id, tenant, origin, trace, arrived)
        except BaseException as error:
            if trace is not None:
                trace.end(_code_of(error))
            raise

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around whatever reads or checks a call: an InvalidRequest counts as one request that failed."""
        try:
            yield
        except InvalidRequest as error:
            self.metrics.request_failure.labels(status_of(error).code).inc()
            raise

    def stream(self, prepared: PreparedCall, shape: StreamShape = AS_IT_COMES) -> AsyncGenerator[Piece, None]:
        """Pieces of all answers, interleaved as they come. Closing it cancels what still runs. shape: of each answer's
        pieces; that of the call, if they are sent one by one.

        Raises Overloaded, Unavailable, DeadlineExceeded, or InvalidRequest from the router; of the tenant's limits
        OverLimit, or InvalidRequest where waiting would not help.
        """
        answers = [self._answer(prepared, choice, shape) for choice in range(len(prepared.requests))]
        if shape.interval_s or shape.num_tokens:
            answers = [shaped(answer, shape) for answer in answers]
        pieces = fan_in(answers)
        if prepared.tenant is not None and self._gatekeeper is not None:
            pieces = self._within_limits(self._gatekeeper, prepared.tenant, prepared, pieces)
        return pieces if prepared.trace is None else _traced(prepared.trace, prepared.num_prompt_tokens, pieces)

    async def _within_limits(
        self, gatekeeper: Gatekeeper, tenant: Tenant, prepared: PreparedCall, pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[Piece, None]:
        with ExitStack() as places:
            with gatekeeper.counting_refusals(), self.counting_refusals():
                places.enter_context(tenant.limiter.admitted(prepared.num_prompt_tokens, len(prepared.requests)))
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    async def _prepare(
        self,
        call: GenerationCall,
        call_id: str,
        tenant: Tenant | None,
        origin: CallOrigin,
        trace: CallTrace | None,
        arrived: float,
    ) -> PreparedCall:
        model = self.model  # one for the whole call: another may take its place while text is encoded
        if call.model is not None and call.model != model.name:
            raise ModelNotFound("model", call.model, f"the model served here is {model.name!r}", "model_not_found")
        if len(call.prompts) * call.n > MAX_CHOICES:
            raise InvalidRequest(
                "n", call.n, f"with {len(call.prompts)} prompts; at most {MAX_CHOICES} answers in one call"
            )
        if call.drafters is not None:
            _check_drafters(call.drafters, model)
        check_token_ids("stop_token_ids", call.stop_token_ids, model.vocab_size)
        check_token_ids("logit_bias", (token for token, _ in call.logit_bias), model.vocab_size)
        stop_token_ids = call.stop_token_ids
        if not call.ignore_eos:
            stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *model.eos_token_ids)))
        timeout_s = min(call.timeout_s or self._config.request_timeout_s, self._config.request_timeout_s)
        scope = scope_of(None if tenant is None else tenant.sharing, call.cache, call.cache_salt, call.namespace)
        if scope.reads_others:
            call = replace(call, wants_stats=False)  # they would tell what others have said
        seed = secrets.randbits(64) if call.seed is None else call.seed

        prompts: list[np.ndarray] = []
        for prompt in call.prompts:
            if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], int):
                check_token_ids(call.prompt_field, prompt, model.vocab_size)  # before int32 wraps them around
            prompts.append(await self._codec.encode_prompt(prompt, call.prompt_field))
        prediction = await self._codec.encode_text(call.prediction)
        budgets = [self._max_new_tokens(call, len(prompt), model.max_model_len) for prompt in prompts]
        timeout_s = max(0.001, timeout_s - (time.monotonic() - arrived))
        requests: list[GenerationRequest] = []
        for token_ids, max_new_tokens in zip(prompts, budgets, strict=True):
            for answer in range(call.n):
                requests.append(
                    GenerationRequest(
                        request_id=f"{call_id}-{len(requests)}",
                        prompt_token_ids=token_ids,
                        sampling=SamplingParams(
                            seed=(seed + answer) % 2**64,
                            temperature=call.temperature,
                            top_k=call.top_k,
                            top_p=call.top_p,
                            min_p=call.min_p,
                            presence_penalty=call.presence_penalty,
                            frequency_penalty=call.frequency_penalty,
                            repetition_penalty=call.repetition_penalty,
                            logit_bias=call.logit_bias,
                        ),
                        max_new_tokens=max_new_tokens,
                        stop_token_ids=stop_token_ids,
                        timeout_s=timeout_s,
                        # A stop string ends a request here, before its last chunk.
                        wants_stats=call.wants_stats or (trace is not None and bool(call.stop)),
                        drafters=call.drafters,
                        max_draft_tokens=call.max_draft_tokens,
                        prediction_token_ids=prediction[: model.max_model_len],
                        tenant="" if tenant is None else tenant.id,
                        namespace=scope.namespace,
                        cache=scope.cache,
                        readable=scope.readable,
                        # What a group has is not one tenant's to limit.
                        cache_bytes=None if tenant is None or scope.has_company else tenant.limits.cache_bytes,
                        promotes=scope.promotes,
                        caller_id=origin.request_id,
                        timed_rounds=-1 if trace is None else trace.round_spans,
                    )
                )
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        deadline = time.monotonic() + timeout_s
        shape = stream_shape(self._config, tenant is not None, call.wants_padding)
        return PreparedCall(
            call_id, origin, arrived, call, tuple(requests), num_prompt_tokens, deadline, scope, shape, tenant, trace
        )

    def _max_new_tokens(self, call: GenerationCall, num_prompt: int, max_model_len: int) -> int:
        """What the request may generate; raises InvalidRequest beyond the model's limit or the gateway's own."""
        most = self._config.max_new_tokens
        if call.max_new_tokens is not None and call.max_new_tokens > most:
            raise InvalidRequest(call.max_tokens_field, call.max_new_tokens, f"at most {most} tokens are generated")
        return num_new_tokens(
            call.max_new_tokens,
            min(self._config.default_max_tokens, most),
            num_prompt,
            max_model_len,
            call.prompt_field,
            call.max_tokens_field,
            self.model.max_side_len,
        )

    async def _answer(self, prepared: PreparedCall, choice: int, shape: StreamShape) -> AsyncGenerator[Piece, None]:
        """One answer's pieces, counted in the metrics. One for each token, if that is the measure of their shape."""
        metrics = self.metrics
        request = prepared.requests[choice]
        context = [] if self.model.max_side_len is not None else request.prompt_token_ids[-4:].tolist()
        text = _AnswerText(self._codec, prepared.call.stop, request, context)
        gauge = metrics.requests_waiting
        gauge.inc()
        metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        outcome = "cancelled"
        last_token_at = 0.0
        num_cached = 0
        stats: SpeculationStats | None = None
        times: RequestTimes | None = None
        last_chunk_at = 0.0

        def on_resume() -> None:
            metrics.request_resumed.inc()
            if prepared.trace is not None:
                prepared.trace.resumed()

        try:
            chunks = generate_unbroken(self.router, request, on_resume)
            async with aclosing(chunks):
                while True:
                    try:
                        async with asyncio.timeout(prepared.deadline - time.monotonic()):
                            chunk = await anext(chunks)
                    except TimeoutError:
                        raise DeadlineExceeded(
                            f"the time limit of {request.timeout_s:.3g} s passed after {text.num_tokens} tokens"
                        ) from None
                    if chunk.finish_reason == "cancelled":
                        raise Unavailable("the router gave the request up")
                    now = time.monotonic()
                    if chunk.token_ids:
                        if gauge is metrics.requests_waiting:
                            metrics.time_to_first_token.observe(now - prepared.arrived)
                            gauge.dec()
                            gauge = metrics.requests_running
                            gauge.inc()
                            _observe_tokens(metrics, len(chunk.token_ids) - 1, 0.0)
                        else:
                            _observe_tokens(metrics, len(chunk.token_ids), now - last_token_at)
                        last_token_at = now
                    if not prepared.scope.has_company:
                        num_cached = max(num_cached, chunk.num_cached_tokens)
                    num_before = text.num_tokens
                    shown: list[str] = []
                    finish_reason: FinishReason | None = None
                    for part in _by_token(chunk) if shape.num_tokens else (chunk,):
                        new_text, finish_reason = text.push(part)
                        if new_text or shape.num_tokens or finish_reason is not None:
                            shown.append(new_text)
                        if finish_reason is not None:
                            break
                    if prepared.tenant is not None:
                        prepared.tenant.limiter.spend(text.num_tokens - num_before)
                    times, last_chunk_at = chunk.times, now
                    if chunk.stats is not None:
                        stats = _without(chunk.stats, chunk.sources[text.num_tokens - num_before :])
                    if finish_reason is not None:
                        outcome = finish_reason
                        metrics.request_success.labels(finish_reason).inc()
                        metrics.request_latency.observe(now - prepared.arrived)
                        break
                    for new_text in shown:
                        yield Piece(choice, new_text)
            # The router's stream is closed by now: after a stop string nothing more is generated.
            for new_text in shown[:-1]:
                yield Piece(choice, new_text)
            yield Piece(choice, shown[-1], finish_reason, text.num_tokens, num_cached, stats)
        except Exception as error:
            status = status_of(error)
            outcome = status.code
            if status.http == 500:
                logger.error("%s failed", request.request_id, exc_info=unwrap(error))
            raise
        finally:
            gauge.dec()
            metrics.generation_tokens.inc(text.num_tokens)
            _log_end(prepared, request, outcome, text.num_tokens)
            if prepared.trace is not None:
                prepared.trace.answered(choice, outcome, text.num_tokens, stats, times, last_chunk_at)
            if outcome not in ("stop", "length"):
                metrics.request_failure.labels(outcome).inc()


async def _traced(
    trace: CallTrace, num_prompt: int, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[Piece, None]:
    """Ends the trace of a call with its pieces."""
    code: str | None = "cancelled"
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
        code = None
    except Exception as error:
        code = _code_of(error)
        raise
    finally:
        trace.end(code, num_prompt)


def _code_of(error: BaseException) -> str:
    return status_of(error).code if isinstance(error, Exception) else "cancelled"


def _log_end(prepared: PreparedCall, request: GenerationRequest, outcome: str, num_tokens: int) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    num_prompt, elapsed_s = len(request.prompt_token_ids), time.monotonic() - prepared.arrived
    logger.info(
        "%s ended: %s, %d tokens after %d in %.3f s", request.request_id, outcome, num_tokens, num_prompt, elapsed_s,
        extra={
            "request_id": prepared.origin.request_id, "answer_id": request.request_id, "outcome": outcome,
            "prompt_tokens": num_prompt, "completion_tokens": num_tokens, "seconds": round(elapsed_s, 6),
        },
    )  # fmt: skip


def _check_drafters(names: tuple[str, ...], model: ServedModel) -> None:
    """Raises InvalidRequest for drafters that do not run, or cannot draft, here: the call would silently get no
    drafts."""
    expand_drafters(names, acceptance=model.acceptance, field="speculation.drafters")
    for name in names:
        if name not in (AUTO, NONE, *model.drafters):
            have = ", ".join(model.drafters) or "no drafters"
            raise InvalidRequest("speculation.drafters", name, f"here run {have}")


def _by_token(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """A chunk for each token; the last one ends as the whole does."""
    for token in chunk.token_ids[:-1]:
        yield msgspec.structs.replace(chunk, token_ids=(token,), finish_reason=None)
    if chunk.token_ids or chunk.finish_reason is not None:
        yield msgspec.structs.replace(chunk, token_ids=chunk.token_ids[-1:])


def _observe_tokens(metrics: GatewayMetrics, count: int, elapsed_s: float) -> None:
    for _ in range(count):
        metrics.inter_token_latency.observe(elapsed_s / count)


def _without(stats: SpeculationStats, sources: tuple[str, ...]) -> SpeculationStats:
    """The statistics less accepted tokens that came after a stop string, by who proposed them."""
    dropped = Counter(sources)
    kept = {source: count - dropped[source] for source, count in stats.accepted_tokens.items()}
    return msgspec.structs.replace(stats, accepted_tokens={source: count for source, count in kept.items() if count})


class _AnswerText:
    """Text of one answer: detokenised, cut at stop strings and stop tokens."""

    def __init__(
        self, codec: TextCodec, stops: tuple[str, ...], request: GenerationRequest, context: Sequence[int]
    ) -> None:
        """context: the last tokens before the answer's text."""
        self._detokenizer = Detokenizer(codec.decode, context)
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self.num_tokens = 0  # that count: a stop string's last token is the last of them

    def push(self, chunk: TokenChunk) -> tuple[str, FinishReason | None]:
        """Text to show now, and why the answer ends if it does."""
        token_ids = chunk.token_ids
        if self._has_stops:
            before = self._detokenizer.copy(), self._stops.copy()
        num_before = self.num_tokens
        self.num_tokens += len(token_ids)
        spoken = token_ids
        if chunk.finish_reason == "stop" and token_ids and token_ids[-1] in self._stop_token_ids:
            spoken = token_ids[:-1]
        text = self._detokenizer.push(spoken) if spoken else ""
        if chunk.finish_reason is not None:
            text += self._detokenizer.flush()
        shown, matched = self._stops.push(text)
        if matched:
            self.num_tokens = num_before + _tokens_to_match(*before, spoken)
            return shown, "stop"
        if chunk.finish_reason is None:
            return shown, None
        return shown + self._stops.flush(), "length" if chunk.finish_reason == "length" else "stop"


def _tokens_to_match(detokenizer: Detokenizer, stops: StopStrings, token_ids: tuple[int, ...]) -> int:
    """How many of the tokens complete the stop string, so that the count does not depend on the size of chunks."""
    for count, token in enumerate(token_ids, 1):
        if stops.push(detokenizer.push((token,)))[1]:
            return count
    return len(token_ids)

"""Generation as HTTP and gRPC share it: validate, tokenise, ask the router, turn tokens into text.

Knows no wire format. `prepare` raises everything that is wrong with a call before any model work; `stream` yields text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.errors import InvalidRequest, PacelineError
from cluster.gateway.answers.answer import Answer
from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.prepared_call import Arrival, PreparedCall
from cluster.gateway.answers.streams import AS_IT_COMES, StreamShape, fan_in, shaped, stream_shape
from cluster.gateway.answers.text import AnswerText
from cluster.gateway.answers.token_sources import TextSources
from cluster.gateway.errors import ModelNotFound, status_of
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.gateway.observability.metrics_page import TENANTS_INTERVAL_S, MetricsPage
from cluster.gateway.requests.call import CallOrigin, GenerationCall
from cluster.gateway.requests.encoding import EncodedCall, encode
from cluster.gateway.requests.grammars import CallGrammars, grammars_of, with_whole_grammar
from cluster.gateway.requests.model_limits import check_call, num_new_tokens
from cluster.gateway.requests.router_requests import requests_of, shared_request
from cluster.gateway.router_client import RouterClient
from cluster.gateway.served_model import ModelCard, ServedModel, capabilities
from cluster.gateway_config import GatewayConfig
from cluster.routing.router_status import RouterStatus
from cluster.tenants.gatekeeper import Gatekeeper, Tenant
from cluster.tenants.scope import Scope, scope_of
from cluster.text.chat_format import NO_TOOLS, ToolUse
from cluster.text.chat_template import TemplateOptions
from cluster.text.text_codec import Prompt, TextCodec
from cluster.text.token_strings import TokenStrings
from cluster.text.tools.answer_parser import AnswerParser

if TYPE_CHECKING:
    from cluster.gateway.observability.tracing import CallTrace, Tracing  # which brings OpenTelemetry

logger = logging.getLogger(__name__)

_RECENT_S = 2.0  # probes use a status of at most this age


class GenerationService:
    """One per gateway replica. It has no state per call."""

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
        """`tokenizer` is a `transformers` tokenizer. gatekeeper None: every caller is served. tracing: None: off.
        all_gateways: the metrics of all replicas; None: there is this one."""
        self.router = router
        self._all_gateways = all_gateways
        self._gatekeeper = gatekeeper
        self._tracing = tracing
        self.model = model
        self.last_status: RouterStatus | None = None  # None: no router has answered
        self._followed: tuple[RouterStatus, float] | None = None  # by `follow_router`, and when it was heard
        self.metrics = metrics or GatewayMetrics()
        self.codec = TextCodec(tokenizer, model.name, model.tool_parser)
        self.token_strings = TokenStrings(tokenizer, self.codec, model.name)
        self._config = config
        self.metrics_page = MetricsPage(self._current_metrics, self._metrics_interval_s)

    @property
    def card(self) -> ModelCard:
        model = self.model
        able = capabilities(
            self.codec.has_chat_template,
            scores_prompts=model.max_side_len is None,
            fills_in=self.codec.fill_in_marks is not None,
        )
        return ModelCard(model, self._config.max_new_tokens, able)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless it is the served model, or not said."""
        if name is not None and name != self.model.name:
            raise ModelNotFound("model", name, f"the model served here is {self.model.name!r}")

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

    @property
    def has_tenants(self) -> bool:
        """Whether keys are asked for at present."""
        return self._gatekeeper is not None and self._gatekeeper.asks_for_keys

    def _metrics_interval_s(self) -> float:
        if self._config.metrics_interval_s is not None:
            return self._config.metrics_interval_s
        return TENANTS_INTERVAL_S if self.has_tenants else 0.0

    async def _current_metrics(self) -> str:
        """Metrics of gateways and routers in Prometheus text format; of routers only if one answers."""
        text = self.metrics.text() if self._all_gateways is None else await self._all_gateways()
        try:
            return text + await self.router.metrics_text()
        except PacelineError as error:
            logger.warning("no metrics from the router: %s", error)
            return text

    async def follow_router(self, period_s: float = 1.0) -> None:
        """Goes by the router's limit, forever: it depends on the target's memory, and may change with its restart."""
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

    async def enter(self, authorization: Iterable[str]) -> Tenant | None:
        """First of all in a call: whose it is. See `Gatekeeper.enter`."""
        return None if self._gatekeeper is None else await self._gatekeeper.enter(authorization)

    async def prepare(
        self, call: GenerationCall, call_id: str, tenant: Tenant | None = None, origin: CallOrigin | None = None
    ) -> PreparedCall:
        """Raises InvalidRequest (or ModelNotFound) naming field, value and limit. origin: the caller's request id and
        trace; None: unknown."""
        arrived = time.monotonic()
        origin = origin or CallOrigin(call_id)
        trace = (
            None
            if self._tracing is None
            else self._tracing.begin(call, call_id, origin, model=self.model.name, arrived=arrived)
        )
        try:
            with self.counting_refusals():
                return await self._prepare(call, Arrival(call_id, origin, arrived, tenant, trace))
        except BaseException as error:
            if trace is not None:
                trace.end(_code_of(error))
            raise

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Context for reading and checking a call: an InvalidRequest counts as one failed request."""
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
        tenant, trace = prepared.arrival.tenant, prepared.arrival.trace
        if tenant is not None and self._gatekeeper is not None:
            pieces = self._within_limits(self._gatekeeper, tenant, prepared, pieces)
        return pieces if trace is None else _traced(trace, prepared.num_prompt_tokens, pieces)

    async def _within_limits(
        self, gatekeeper: Gatekeeper, tenant: Tenant, prepared: PreparedCall, pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[Piece, None]:
        await gatekeeper.await_places(tenant, len(prepared.requests))
        with ExitStack() as places:
            with gatekeeper.counting_refusals(), self.counting_refusals():
                places.enter_context(tenant.limiter.admitted(prepared.num_prompt_tokens, len(prepared.requests)))
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    async def _prepare(self, call: GenerationCall, arrival: Arrival) -> PreparedCall:
        model = self.model  # one for the whole call: another may take its place while text is encoded
        self.check_model(call.model)
        check_call(call, model, self._config.max_stops)
        deadline = arrival.at + min(call.timeout_s or self._config.request_timeout_s, self._config.request_timeout_s)
        grammars = await grammars_of(call, self.codec)
        scope = _scope(call, arrival.tenant, grammars)
        if scope.reads_others:
            call = replace(call, wants_stats=False, wants_token_sources=False)  # they would tell what others have said
        self._check_tokens(arrival.tenant, call.prompts)
        encoded = await encode(call, self.codec, model)
        call, grammar = with_whole_grammar(call, grammars, self.codec, encoded.starts_inside_thought)
        shared = shared_request(
            call,
            model,
            scope=scope,
            tenant=arrival.tenant,
            grammar=grammar,
            prediction=encoded.prediction,
            timeout_s=max(0.001, deadline - time.monotonic()),
            caller_id=arrival.origin.request_id,
            timed_rounds=None if arrival.trace is None else arrival.trace.round_spans,
        )
        budgets = self._budgets(call, encoded, arrival.tenant, model)
        return PreparedCall(
            arrival=arrival,
            call=call,
            requests=requests_of(call, arrival.call_id, encoded.prompts, budgets, shared),
            num_prompt_tokens=encoded.num_prompt_tokens,
            num_prediction_tokens=0 if scope.reads_others else len(encoded.prediction),
            starts_inside_thought=encoded.starts_inside_thought,
            deadline=deadline,
            scope=scope,
            stream_shape=stream_shape(self._config, arrival.tenant is not None, call.wants_padding),
        )

    def _budgets(
        self, call: GenerationCall, encoded: EncodedCall, tenant: Tenant | None, model: ServedModel
    ) -> list[int]:
        """Tokens to generate for each prompt. Raises InvalidRequest for lengths beyond the limits."""
        try:
            return [num_new_tokens(call, len(one.token_ids), model, self._config) for one in encoded.prompts]
        except InvalidRequest:
            if tenant is not None:  # the work of tokenising has been done
                tenant.limiter.spend(encoded.num_prompt_tokens)
            raise

    def answer_parser(self, prepared: PreparedCall) -> AnswerParser | None:
        """A new one for each answer of a chat; None: all of it is content."""
        return self.codec.chat_format.parser(prepared.call.tool_use, prepared.starts_inside_thought)

    async def tokens_of(
        self,
        prompt: Prompt,
        field: str,
        *,
        tenant: Tenant | None,
        add_special_tokens: bool = True,
        template: TemplateOptions | None = None,
        tool_use: ToolUse = NO_TOOLS,
    ) -> np.ndarray:
        """The tokens of a prompt that nothing is generated for, int32 [n]. They count towards the tenant's limit.

        Raises OverLimit, and what `TextCodec.encode_prompt` raises.
        """
        self._check_tokens(tenant, (prompt,))
        encoded = await self.codec.encode_prompt(
            prompt,
            field,
            add_special_tokens=add_special_tokens,
            template=template,
            tool_use=tool_use,
            max_model_len=self.model.max_model_len,
        )
        if tenant is not None:
            tenant.limiter.spend(len(encoded.token_ids))
        return encoded.token_ids

    def _check_tokens(self, tenant: Tenant | None, prompts: Iterable[Prompt]) -> None:
        """Raises OverLimit where the prompts have more tokens than the tenant has left, as far as their lengths tell
        before they are tokenised."""
        if tenant is None or self._gatekeeper is None:
            return
        least = sum(self.codec.least_tokens(prompt) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
        with self._gatekeeper.counting_refusals():
            tenant.limiter.check_tokens(least)

    def _answer(self, prepared: PreparedCall, choice: int, shape: StreamShape) -> AsyncGenerator[Piece, None]:
        """One answer's pieces, counted in the metrics."""
        request = prepared.requests[choice]
        # The answer of a decoder alone continues its prompt.
        context = [] if self.model.max_side_len is not None else request.prompt_token_ids[-4:].tolist()
        sources = TextSources() if prepared.call.wants_token_sources else None
        text = AnswerText(self.codec, prepared.call, context, sources)
        echoed = self._prompt_text(prepared, choice) if prepared.call.echo else None
        return Answer(prepared, choice, text, self.metrics, echoed).pieces(self.router, by_token=bool(shape.num_tokens))

    def _prompt_text(self, prepared: PreparedCall, choice: int) -> str:
        prompt = prepared.call.prompts[choice // prepared.call.n]
        if isinstance(prompt, str):
            return prompt
        token_ids = prepared.requests[choice].prompt_token_ids.tolist()
        return self.codec.decode(token_ids, prepared.call.skip_special_tokens)


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


def _scope(call: GenerationCall, tenant: Tenant | None, grammars: CallGrammars) -> Scope:
    sharing, options = None if tenant is None else tenant.sharing, call.options
    return scope_of(sharing, options.cache, call.cache_salt, options.namespace, grammars.calls + grammars.content)

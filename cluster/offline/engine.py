"""The whole of Paceline in one process, without Ray: for notebooks, tests and `paceline generate`.

The same router core, drafters and engines as in a cluster; only the links are plain calls.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from actors.drafters.contract import CpuDrafter
from actors.drafters.registry import (
    create_drafters,
    source_of_pool,
)
from actors.engine.beam_search import search_beams
from actors.engine.warm_up import warm_up
from actors.errors import InvalidRequest
from actors.grammar.grammars import Grammars
from actors.home import paceline_home
from actors.messages import (
    DraftBatch,
    DraftResult,
    GenerationRequest,
    SpeculationStats,
    TokenChunk,
    TokenLogprobs,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import ModelInfo, load_tokenizer, read_model_info
from actors.models.source import ModelSource
from actors.options import DraftOptions
from actors.pool_names import FIRST_POOL
from actors.training.drafter_build import resolve_draft_model
from actors.workers.gpus import on_device
from cache_service.counts.soft_exchange import DELTA_BYTES
from cluster.cache.shared_cache import SharedCache
from cluster.config import ClusterConfig, SpeculationConfig
from cluster.generation import GenerationOptions, changed, generation_options
from cluster.offline.building import (
    build_draft,
    build_target,
    drafter_names,
    needs_first_draft,
    share_gpu,
    with_required_rows,
)
from cluster.offline.options import local_config
from cluster.offline.requests import LocalRequests, Prompt
from cluster.offline.results import BeamSearchResult, Generation, StreamPiece
from cluster.router.core import RouterCore
from cluster.router.guarded_sink import SharedLearning
from cluster.router.round import RequestFailed, RouterEvent
from cluster.router.run_round import RoundHooks, RoundStage, run_local_round
from cluster.router.trace import RoundTrace, trace_round
from cluster.router.worker_drafting import DraftShape
from cluster.text.detokenizer import Detokenizer
from cluster.text.text_codec import TextCodec

logger = logging.getLogger(__name__)

OnRound = Callable[[RoundTrace], None]

MAX_BEAMS = 64
_CATCH_UP_TICKS = 64  # about a millisecond each
_ROUTER_SECONDS = 0.001  # the router's part of a round in simulated time


@dataclass(slots=True)
class _Running:
    prompt_token_ids: list[int]
    started: float
    token_ids: list[int] = field(default_factory=list)
    round_tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None

    def take(self, chunk: TokenChunk) -> None:
        if chunk.logprobs is not None:
            self.logprobs.append(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        self.token_ids.extend(chunk.token_ids)
        self.round_tokens.append(len(chunk.token_ids))


class LocalEngine:
    """A target, its drafters and the router core in one process, for one thread at a time.

    >>> engine = LocalEngine("smollm2")
    >>> engine.generate(["The capital of France is"], max_new_tokens=8)[0].text
    >>> for piece in engine.stream("The capital of France is", max_new_tokens=8):
    ...     print(piece.text, end="")
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        config: ClusterConfig | None = None,
        cache: SharedCache | None = None,
        seconds_of_rows: Callable[[int], float] | None = None,
        home: Path | None = None,
        progress: Progress = silent,
        **options: Any,
    ) -> None:
        """model: a prepared name, a directory, a GGUF file or a Hugging Face id.

        options: any of `cluster.offline.options.KEYS`, as in `draft_model="none", gamma=5`. Each sets a key of a
        cluster's configuration (docs/configuration.md) and takes precedence over `config`. Torch's threads stay those
        of the process. None means the configuration's default, except: batch_size is 8; draft_dtype and
        draft_quantization follow the target; max_rows is larger if a lookahead window needs it.

        cache: the shared cache of this model, to draft from and publish to; the caller closes it. seconds_of_rows:
        simulated seconds of a forward of n rows, in place of the clock; which drafts are verified then does not depend
        on the machine's load. Raises ModelError or InvalidRequest.
        """
        home = home or paceline_home()
        config = local_config(config, options)
        source = resolve_model(model, home, progress)
        self.info = read_model_info(source)
        _check_cache(cache, model, self.info)
        self.tokenizer = load_tokenizer(source)
        self._codec = TextCodec(self.tokenizer, self.info.name)
        draft_source = resolve_draft_model(config.draft.model, source, home, progress)
        self.drafter_names = drafter_names(config, source, draft_source)
        drafters = self._cpu_drafters(config, cache)
        speculation = with_required_rows(config.speculation, self.drafter_names, drafters)
        drafts: dict[str, tuple[DraftOptions, ModelSource]] = {
            pool: (draft, resolve_model(draft.model, home, progress))
            for pool, draft in config.more_drafts.items()
            if source_of_pool(pool) in self.drafter_names
        }
        if draft_source is not None and needs_first_draft(self.drafter_names):
            drafts = {FIRST_POOL: (config.draft, draft_source), **drafts}
        config, gpu_share = share_gpu(config, [options.device for options, _ in drafts.values()])
        self.target = build_target(config, source, self.drafter_names)
        self._grammars = Grammars(
            lambda: self.tokenizer, self.target.vocab_size, self.info.eos_token_ids, self.info.name
        )
        self._drafts = {
            pool: build_draft(
                options.model_copy(update={"gpus": options.gpus or gpu_share}), draft, source, self._grammars
            )
            for pool, (options, draft) in drafts.items()
        }
        self.max_draft_tokens = config.speculation.max_draft_tokens
        self._batch_size = config.router.max_running
        self._seconds_of_rows = seconds_of_rows
        self._simulated_s = 0.0  # sum of simulated round times
        info = self._target_info(config.target.max_model_len)
        self.max_model_len = info.max_model_len
        self.core = self._create_core(config, speculation, drafters, cache=cache, info=info)
        self._requests = LocalRequests(
            self.tokenizer,
            self.info,
            info,
            drafter_names=self.drafter_names,
            acceptance=config.speculation.acceptance,
            grammars=self._grammars,
        )
        # Events that no caller has taken yet, by request. A round serves all requests.
        self._inboxes: dict[str, deque[RouterEvent]] = {}
        self._is_in_round = False

    def _create_core(
        self,
        config: ClusterConfig,
        speculation: SpeculationConfig,
        drafters: Mapping[str, CpuDrafter],
        *,
        cache: SharedCache | None,
        info: WorkerInfo,
    ) -> RouterCore:
        """info: of the target."""
        shared = SharedLearning(cache, None if cache is None else cache.share_counts(drafters))
        router = config.router.model_copy(update={"max_waiting": config.router.max_running})
        options = {FIRST_POOL: config.draft, **config.more_drafts}
        shapes = {pool: DraftShape(draft.gamma, draft.branch) for pool, draft in options.items()}
        core = RouterCore(info, router, speculation, drafters, draft_shapes=shapes, shared=shared)
        for pool in self._drafts:
            core.set_draft_workers([pool], pool)
        return core

    def _cpu_drafters(self, config: ClusterConfig, cache: SharedCache | None) -> dict[str, CpuDrafter]:
        return create_drafters(
            self.drafter_names,
            corpora=config.speculation.corpora,
            tokenizer_fingerprint=self.info.tokenizer_fingerprint,
            options=config.speculation.drafter_options,
            index=None if cache is None else cache.index,
            delta_bytes=0 if cache is None else DELTA_BYTES,
        )

    def _target_info(self, max_model_len: int | None) -> WorkerInfo:
        options = self.target.options
        with on_device(self.target.device):
            if self._seconds_of_rows is None:
                profile = warm_up(self.target)
            else:
                profile = [(rows, self._seconds_of_rows(rows)) for rows, _ in warm_up(self.target, runs=1)]
        return WorkerInfo(
            role="target",
            incarnation=0,
            vocab_size=self.target.vocab_size,
            max_model_len=min(
                self.info.max_model_len,
                max_model_len or self.info.max_model_len,
                options.num_blocks * options.block_size,
            ),
            block_size=options.block_size,
            total_blocks=options.num_blocks,
            step_times=list(profile),
            has_head=self.target.has_head,
            row_steps=list(self.target.row_steps),
            chain_only=self.target.chain_only,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions | None = None,
        *,
        predictions: Sequence[str | Sequence[int]] = (),
        on_progress: Callable[[int, int], None] | None = None,
        on_round: OnRound | None = None,
        **changes: Any,
    ) -> list[Generation]:
        """Generate for each prompt: text, chat messages or token ids. Prompt i is sampled with seed + i.

        changes: fields of `GenerationOptions`, as in `max_new_tokens=16`, that override those of `options`.
        predictions: the likely answer to each prompt, text or token ids, "" if unknown; () for none.
        on_progress(prompts finished, tokens emitted) is called for every chunk of tokens, on_round after every round.
        Raises InvalidRequest, by the same limits as over HTTP, before anything is computed.
        """
        if isinstance(prompts, str):
            raise InvalidRequest("prompts", prompts, "it must be a list of prompts")
        requests = self._requests.make(_numbered(prompts), changed(options, changes), predictions)
        done: dict[str, Generation] = {}
        running: dict[str, _Running] = {}
        emitted = 0
        with closing(self._chunks(requests, running, on_round)) as chunks:
            for chunk in chunks:
                emitted += len(chunk.token_ids)
                running[chunk.request_id].take(chunk)
                if chunk.finish_reason is not None:
                    done[chunk.request_id] = self._finish(running.pop(chunk.request_id), chunk)
                if on_progress is not None:
                    on_progress(len(done), emitted)
        return [done[request.request_id] for request in requests]

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        predictions: Sequence[str | Sequence[int]] = (),
        on_round: OnRound | None = None,
        **changes: Any,
    ) -> Generator[StreamPiece, None, None]:
        """Generate for one prompt and yield what every round emits, as it comes; options as in `generate`.

        Closing or dropping the generator removes the request from the engine. Several streams may be open at a time and
        share rounds. Raises InvalidRequest at once.
        """
        request = self._requests.make([("prompt", prompt)], changed(options, changes), predictions)[0]
        return self._stream(request, on_round)

    def beam_search(
        self,
        prompts: Sequence[Prompt],
        *,
        num_beams: int = 4,
        length_penalty: float = 1.0,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
    ) -> list[BeamSearchResult]:
        """The best continuation of each prompt by beam search, without drafts, one prompt after the other.

        num_beams: 2 to 64. length_penalty, -10 to 10: a score is divided by tokens ** length_penalty, so values above
        0 favour long answers. Other options as in `generate`. Raises InvalidRequest before anything is computed.
        """
        if not 2 <= num_beams <= MAX_BEAMS:
            raise InvalidRequest("num_beams", num_beams, f"it must be from 2 to {MAX_BEAMS}")
        if not -10.0 <= length_penalty <= 10.0:
            raise InvalidRequest("length_penalty", length_penalty, "it must be from -10 to 10")
        options = generation_options(
            max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
        )
        requests = self._requests.make(_numbered(prompts), options)
        return [self._search(request, num_beams, length_penalty) for request in requests]

    def _search(self, request: GenerationRequest, num_beams: int, length_penalty: float) -> BeamSearchResult:
        started = time.perf_counter()
        prompt, stops = request.prompt_token_ids.tolist(), request.stop_token_ids
        beam = search_beams(
            self.target.model,
            prompt,
            num_beams=num_beams,
            length_penalty=length_penalty,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=stops,
        )
        stopped = beam.token_ids[-1] in stops
        token_ids = beam.token_ids[:-1] if stopped else beam.token_ids
        return BeamSearchResult(
            prompt_token_ids=prompt,
            token_ids=token_ids,
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
            finish_reason="stop" if stopped else "length",
            score=beam.score,
            seconds=time.perf_counter() - started,
        )

    def _stream(self, request: GenerationRequest, on_round: OnRound | None) -> Generator[StreamPiece, None, None]:
        context = [] if self.info.is_encoder_decoder else request.prompt_token_ids.tolist()
        detokenizer = Detokenizer(self._codec.decode, context)
        running: dict[str, _Running] = {}
        with closing(self._chunks([request], running, on_round)) as chunks:
            for chunk in chunks:
                texts = [detokenizer.push((token,)) for token in chunk.token_ids]
                rest, generation = "", None
                answer = running[request.request_id]
                answer.take(chunk)
                if chunk.finish_reason is not None:
                    rest = detokenizer.flush()
                    generation = self._finish(answer, chunk)
                yield StreamPiece(
                    text="".join(texts) + rest,
                    token_ids=chunk.token_ids,
                    sources=chunk.sources,
                    token_texts=tuple(texts),
                    generation=generation,
                )

    def _chunks(
        self, requests: Sequence[GenerationRequest], running: dict[str, _Running], on_round: OnRound | None
    ) -> Generator[TokenChunk, None, None]:
        """Chunks of all requests in order of rounds; fills `running` with requests that have begun.

        Raises the error that a request failed with. Removes the requests from the engine however it ends.
        """
        waiting = deque(requests)
        open_ids: list[str] = []
        self._catch_up()
        try:
            while waiting or open_ids:
                while waiting and self.core.num_running + self.core.num_waiting < self._batch_size:
                    request = waiting.popleft()
                    open_ids.append(request.request_id)
                    self._inboxes[request.request_id] = deque()
                    running[request.request_id] = _Running(request.prompt_token_ids.tolist(), time.perf_counter())
                    grammar = self._grammars.matcher(request.grammar) if request.grammar else None
                    self.core.add(request, self.now(), grammar)
                if not any(self._inboxes[request_id] for request_id in open_ids):
                    self._run_round(on_round)
                for request_id in list(open_ids):
                    yield from self._take(request_id, open_ids)
        finally:
            self._abandon(open_ids)

    def _take(self, request_id: str, open_ids: list[str]) -> Iterator[TokenChunk]:
        inbox = self._inboxes[request_id]
        while inbox:
            event = inbox.popleft()
            is_last = isinstance(event, RequestFailed) or event.finish_reason is not None
            if is_last:
                open_ids.remove(request_id)
                del self._inboxes[request_id]
            if isinstance(event, RequestFailed):
                raise event.error
            yield event

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """Cancel unfinished requests when a caller stops early, and run rounds until they are released."""
        for request_id in request_ids:
            del self._inboxes[request_id]
            self.core.cancel(request_id)
        if self._is_in_round:
            return  # the generator was garbage-collected inside a round, whose caller runs the next one too
        if request_ids and self.core.has_work:
            self._run_round()
        while self.core.has_work and not self._inboxes:
            self._run_round()

    def _run_round(self, on_round: OnRound | None = None) -> None:
        """Run one round of all running sequences; its events go to the inboxes."""
        began: dict[RoundStage, float] = {}

        def mark(stage: RoundStage) -> None:
            began[stage] = time.perf_counter()

        self._is_in_round = True
        try:
            self.core.exchange(time.monotonic())
            hooks = RoundHooks(self.now, self._deliver, mark)
            outcome = run_local_round(self.core, self._verify, self._ask_draft_model, hooks)
        except BaseException:
            # Interrupted, perhaps by Ctrl-C: the KV is inconsistent, so the next round recomputes it from the tokens.
            self.target.clear()
            self.core.target_lost()
            raise
        finally:
            self._is_in_round = False
        if on_round is None or outcome.round is None:
            return
        assert isinstance(outcome.result, VerifyResult)
        head_s = outcome.result.head_s
        on_round(
            trace_round(
                outcome.round,
                outcome.result,
                outcome.events,
                source_names=self.core.source_names,
                draft_s=began["verify"] - began["plan"] + head_s,
                verify_s=began["commit"] - began["verify"] - head_s,
            )
        )

    def _catch_up(self) -> None:
        """Fold in counts that other processes have shared since the last request."""
        sharing = self.core.soft_sharing
        for _ in range(_CATCH_UP_TICKS if sharing is not None and not self._is_in_round else 0):
            self.core.exchange(time.monotonic())
            if sharing is None or not sharing.stats().waiting_contexts:
                return

    def now(self) -> float:
        """Monotonic or simulated seconds."""
        return time.monotonic() if self._seconds_of_rows is None else self._simulated_s

    def _verify(self, batch: VerifyBatch) -> VerifyResult:
        """The target's result, with the simulated time of the round if there is one."""
        with on_device(self.target.device):
            result = self.target.verify(batch, self.core.masks if batch.masks_follow else None)
        if self._seconds_of_rows is None:
            return result
        seconds = self._seconds_of_rows(max(1, result.rows))
        if result.rows:  # else it only releases sequences
            self._simulated_s += seconds + _ROUTER_SECONDS
        return msgspec.structs.replace(result, elapsed_s=seconds, head_s=0.0)

    def _deliver(self, events: Sequence[RouterEvent]) -> None:
        for event in events:
            if event.request_id in self._inboxes:  # else it was abandoned
                self._inboxes[event.request_id].append(event)

    def _ask_draft_model(self, worker_id: str, batch: DraftBatch) -> DraftResult | None:
        """Drafts, or None if the draft model fails; the round then goes on without them. worker_id: the pool."""
        draft = self._drafts[worker_id]
        try:
            with on_device(draft.device):
                return draft.draft(batch)
        except BaseException as error:
            draft.clear()
            if not isinstance(error, Exception):
                raise
            logger.warning("the draft model failed; the round goes on without it", exc_info=True)
            return None

    def _finish(self, running: _Running, last: TokenChunk) -> Generation:
        stats = last.stats or SpeculationStats()
        seconds = time.perf_counter() - running.started
        assert last.finish_reason in ("stop", "length")
        return Generation(
            prompt_token_ids=running.prompt_token_ids,
            token_ids=running.token_ids,
            text=self.tokenizer.decode(running.token_ids, skip_special_tokens=True),
            finish_reason=last.finish_reason,
            rounds=stats.rounds,
            round_tokens=running.round_tokens,
            target_rows=stats.target_rows,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=dict(stats.accepted_tokens),
            seconds=seconds,
            tokens_per_second=len(running.token_ids) / seconds if seconds > 0 else 0.0,
            logprobs=TokenLogprobs.joined(running.logprobs, 0) if running.logprobs else None,
            prompt_logprobs=running.prompt_logprobs,
        )


def _check_cache(cache: SharedCache | None, model: str, info: ModelInfo) -> None:
    if cache is not None and cache.fingerprint != info.fingerprint:
        raise InvalidRequest("cache", cache.fingerprint, f"it must belong to {model!r}, {info.fingerprint}")


def _numbered(prompts: Sequence[Prompt]) -> list[tuple[str, Prompt]]:
    """Prompts with the field names that errors use."""
    return [(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]

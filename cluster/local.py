"""The whole of Paceline in one process, without Ray: for notebooks, tests and `paceline generate`.

The same router core, drafters and engines as in a cluster; only the links are plain calls.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import numpy as np

from actors.drafters.contract import Drafter
from actors.drafters.registry import DRAFT_MODEL, create_drafter, expand_drafters
from actors.engine.build import build_draft_engine, build_target_engine
from actors.engine.draft_engine import DraftEngine
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.messages import (
    Acceptance,
    DraftBatch,
    DraftResult,
    GenerationRequest,
    SamplingParams,
    SpeculationStats,
    TokenChunk,
)
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.drafter_build import default_drafter_dir
from actors.models.loader import load_tokenizer, read_model_info
from actors.models.source import ModelSource
from cluster.config import RouterConfig, SpeculationConfig, paceline_home
from cluster.request_limits import check_local_fields, check_token_ids, num_new_tokens
from cluster.router.core import RouterCore
from cluster.router.round import RequestFailed, RouterEvent

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

DEFAULT_NEW_TOKENS = 256
_DRAFT_WORKER = "local"


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # without the stop token
    text: str
    finish_reason: Literal["stop", "length"]
    rounds: int  # target forwards that emitted tokens of it
    target_rows: int  # rows the target computed for it, prompt included
    draft_tokens: int  # draft nodes verified
    accepted_tokens: dict[str, int]  # by source
    seconds: float  # from its first round to its last
    tokens_per_second: float


@dataclass(slots=True)
class _Running:
    prompt_token_ids: list[int]
    started: float
    token_ids: list[int] = field(default_factory=list)


class LocalEngine:
    """A target, its drafters and the router core in one process.

    >>> engine = LocalEngine("smollm2")
    >>> engine.generate(["The capital of France is"], max_new_tokens=8)[0].text
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        draft_model: str = "auto",
        drafters: Sequence[str] = ("auto",),
        gamma: int = 4,
        batch_size: int = 8,
        dtype: str = "float32",
        draft_dtype: str | None = None,
        device: str = "auto",
        exact: Literal["default", "bitwise"] = "default",
        acceptance: Acceptance = "coupled",
        max_draft_tokens: int = 16,
        kv_cache_tokens: int | None = None,
        home: Path | None = None,
        progress: Progress = silent,
    ) -> None:
        """model and draft_model: a prepared name, a directory, a GGUF file or a hub id; draft_model may also be
        "auto" (the drafter built for the target, if there is one) or "none". Raises ModelError or InvalidRequest."""
        home = home or paceline_home()
        source = resolve_model(model, home, progress)
        self.info = read_model_info(source)
        self.tokenizer = load_tokenizer(source)
        draft_source = _draft_source(draft_model, source, home, progress)
        names = expand_drafters(list(drafters), has_draft_model=draft_source is not None)
        if DRAFT_MODEL in names and draft_source is None:
            raise ModelError(f"drafter {DRAFT_MODEL!r} needs a draft model, and --draft-model is {draft_model!r}")
        self._target = build_target_engine(source, dtype, device, kv_cache_tokens=kv_cache_tokens, exact=exact)
        self._draft: DraftEngine | None = None
        if DRAFT_MODEL in names and draft_source is not None:
            self._draft = build_draft_engine(
                draft_source, draft_dtype or dtype, device, kv_cache_tokens=kv_cache_tokens
            )
        local: dict[str, Drafter] = {name: create_drafter(name) for name in names if name not in (DRAFT_MODEL, "none")}
        self.drafter_names = names
        self._acceptance = acceptance
        options = self._target.options
        self.max_model_len = min(self.info.max_model_len, options.num_blocks * options.block_size)
        self.core = RouterCore(
            RouterConfig(max_running=batch_size, max_waiting=batch_size),
            SpeculationConfig(drafters=tuple(names) or ("none",), max_draft_tokens=max_draft_tokens),
            local,
            self._target.vocab_size,
            self.max_model_len,
            options.block_size,
            gamma,
        )
        if self._draft is not None:
            self.core.set_draft_workers([_DRAFT_WORKER])
        self._batch_size = batch_size
        self._num_requests = 0

    @property
    def target(self) -> TargetEngine:
        return self._target

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Generation]:
        """Generate for each prompt: text, chat messages or token ids. Prompt i is sampled with seed + i.

        max_new_tokens None: 256, or what the model has room for. on_progress(prompts finished, tokens emitted) is
        called after every round. Raises InvalidRequest, by the same limits as over HTTP, before anything is computed.
        """
        check_local_fields(
            {
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": min_p,
                "seed": seed,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
                "repetition_penalty": repetition_penalty,
                "stop_token_ids": list(stop_token_ids),
            }
        )
        check_token_ids("stop_token_ids", stop_token_ids, self._target.vocab_size)
        base_seed = secrets.randbits(64) if seed is None else seed
        requests: deque[GenerationRequest] = deque()
        stops = tuple(stop_token_ids) + (() if ignore_eos else self.info.eos_token_ids)
        for index, prompt in enumerate(prompts):
            token_ids = self._encode(prompt, f"prompts[{index}]")
            sampling = SamplingParams(
                seed=(base_seed + index) % 2**64,
                temperature=temperature,
                top_k=max(0, top_k),
                top_p=top_p,
                min_p=min_p,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repetition_penalty=repetition_penalty,
                acceptance=self._acceptance,
            )
            self._num_requests += 1
            requests.append(
                GenerationRequest(
                    request_id=str(self._num_requests),
                    prompt_token_ids=np.asarray(token_ids, dtype=np.int32),
                    sampling=sampling,
                    max_new_tokens=num_new_tokens(
                        max_new_tokens,
                        DEFAULT_NEW_TOKENS,
                        len(token_ids),
                        self.max_model_len,
                        f"prompts[{index}]",
                        "max_new_tokens",
                    ),
                    stop_token_ids=stops,
                )
            )
        order = [request.request_id for request in requests]
        done: dict[str, Generation] = {}
        running: dict[str, _Running] = {}
        emitted = 0
        try:
            for event in self._events(requests, running):
                if isinstance(event, RequestFailed):
                    raise event.error
                emitted += len(event.token_ids)
                running[event.request_id].token_ids.extend(event.token_ids)
                if event.finish_reason is not None:
                    done[event.request_id] = self._finish(running.pop(event.request_id), event)
                if on_progress is not None:
                    on_progress(len(done), emitted)
        finally:
            self._abandon([*running, *(request.request_id for request in requests)])
        return [done[request_id] for request_id in order]

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """End what is left of requests when a caller stops early, so that the next call starts clean."""
        for request_id in request_ids:
            self.core.cancel(request_id)
        while self.core.has_work:
            self._run_round()

    def _events(self, requests: deque[GenerationRequest], running: dict[str, _Running]) -> Iterator[RouterEvent]:
        while requests or self.core.has_work:
            while requests and self.core.num_running + self.core.num_waiting < self._batch_size:
                request = requests.popleft()
                running[request.request_id] = _Running(request.prompt_token_ids.tolist(), time.perf_counter())
                self.core.add(request, time.monotonic())
            yield from self._run_round()

    def _run_round(self) -> list[RouterEvent]:
        """Draft, verify, commit: one round of all running sequences."""
        round, events = self.core.plan_round(time.monotonic())
        if round is None:
            return events
        try:
            results = {worker_id: self._ask_draft_model(batch) for worker_id, batch in round.draft_batches.items()}
            self.core.draft_locally(round)
            result = self._target.verify(self.core.assemble(round, results))
            return [*events, *self.core.commit(round, result, time.monotonic())]
        except BaseException:
            # Stopped half-way, perhaps by Ctrl-C: no KV can be trusted, and the next round begins from the tokens.
            self._target.clear()
            self.core.target_lost()
            raise

    def _ask_draft_model(self, batch: DraftBatch) -> DraftResult | None:
        """Its drafts; None where it fails, which costs nothing but speed."""
        assert self._draft is not None
        try:
            return self._draft.draft(batch)
        except BaseException as error:
            self._draft.clear()
            if not isinstance(error, Exception):
                raise
            logger.warning("the draft model failed; the round goes on without it", exc_info=True)
            return None

    def _encode(self, prompt: Prompt, field: str) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            token_ids = self.tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            token_ids = list(cast(Sequence[int], prompt))
            check_token_ids(field, token_ids, self._target.vocab_size)
        return list(token_ids)

    def _finish(self, running: _Running, last: TokenChunk) -> Generation:
        stats = last.stats or SpeculationStats()
        seconds = time.perf_counter() - running.started
        assert last.finish_reason in ("stop", "length")
        return Generation(
            running.prompt_token_ids,
            running.token_ids,
            self.tokenizer.decode(running.token_ids, skip_special_tokens=True),
            last.finish_reason,
            stats.rounds,
            stats.target_rows,
            stats.draft_tokens,
            dict(stats.accepted_tokens),
            seconds,
            len(running.token_ids) / seconds if seconds > 0 else 0.0,
        )


def _draft_source(spec: str, target: ModelSource, home: Path, progress: Progress) -> ModelSource | None:
    if spec == "none":
        return None
    if spec != "auto":
        return resolve_model(spec, home, progress)
    directory = default_drafter_dir(home, target)
    return resolve_model(str(directory), home, progress) if directory.is_dir() else None

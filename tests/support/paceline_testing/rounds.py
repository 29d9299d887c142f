"""Rounds of a router core with a target in this process, on a told clock."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from actors.drafters.contract import CpuDrafter
from actors.messages import (
    DraftBatch,
    DraftResult,
    Failure,
    GenerationRequest,
    SamplingParams,
    TokenChunk,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)  # fmt: skip
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.guarded_sink import SharedLearning
from cluster.router.round import RouterEvent
from cluster.router.run_round import RoundHooks, RoundOutcome, no_drafts, run_local_round


def toy_info(vocab_size: int, max_model_len: int = 256, block_size: int = 4, **fields: object) -> WorkerInfo:
    return WorkerInfo("target", 0, vocab_size, max_model_len, block_size, total_blocks=0, **fields)  # type: ignore[arg-type]


def toy_core(
    info: WorkerInfo,
    *requests: GenerationRequest,
    drafters: Mapping[str, CpuDrafter] | None = None,
    config: RouterConfig | None = None,
    speculation: SpeculationConfig | None = None,
    **fields: object,
) -> RouterCore:
    """A core with these requests. fields: of `RouterCore`."""
    core = RouterCore(info, config or RouterConfig(), speculation or SpeculationConfig(), drafters or {}, **fields)  # type: ignore[arg-type]
    for request in requests:
        core.add(request, 0.0)
    return core


def learning_core(info: WorkerInfo, drafters: Mapping[str, CpuDrafter], **shared: object) -> RouterCore:
    """A core of default options. shared: of `SharedLearning`."""
    return toy_core(info, drafters=drafters, shared=SharedLearning(**shared))  # type: ignore[arg-type]


def toy_request(
    request_id: str = "r", prompt: Sequence[int] = (1, 2, 3), max_new_tokens: int = 40, **fields: object
) -> GenerationRequest:
    """Greedy unless `sampling` is given."""
    fields = {"sampling": SamplingParams(seed=1, temperature=0.0)} | fields
    token_ids = np.array(prompt, np.int32)
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=token_ids, max_new_tokens=max_new_tokens, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def toy_round(
    core: RouterCore,
    verify: Callable[[VerifyBatch], VerifyResult | Failure | None],
    now: float = 0.0,
    draft: Callable[[str, DraftBatch], DraftResult | None] = no_drafts,
) -> RoundOutcome:
    """A round that is planned at `now` and lasts as long as the target says."""
    clock = now

    def verify_timed(batch: VerifyBatch) -> VerifyResult | Failure | None:
        nonlocal clock
        result = verify(batch)
        clock += result.elapsed_s + result.head_s if isinstance(result, VerifyResult) else 0.0
        return result

    return run_local_round(core, verify_timed, draft, RoundHooks(now=lambda: clock))


def serve(
    core: RouterCore,
    verify: Callable[[VerifyBatch], VerifyResult | Failure | None],
    draft: Callable[[str, DraftBatch], DraftResult | None] = no_drafts,
    between: Callable[[], object] = int,
    most_rounds: int = 2000,
) -> list[RouterEvent]:
    """All events until the router is idle; a round every 0.05 s, and `between` before each."""
    events: list[RouterEvent] = []
    for index in range(most_rounds):
        if not core.has_work:
            return events
        between()
        events += toy_round(core, verify, index * 0.05, draft).events
    raise AssertionError("the router does not come to an end")


def texts_of(events: Iterable[RouterEvent]) -> dict[str, list[int]]:
    """The tokens of each request; none of them may have failed."""
    texts: dict[str, list[int]] = {}
    for event in events:
        assert isinstance(event, TokenChunk), event
        texts.setdefault(event.request_id, []).extend(event.token_ids)
    return texts

"""The one round of all callers: plan, draft, choose, verify, commit, wherever drafts and target are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from actors.messages import DraftBatch, DraftResult, Failure, VerifyAhead, VerifyBatch, VerifyResult
from cluster.router.core import RouterCore
from cluster.router.round import Round, RouterEvent

RoundStage = Literal["plan", "draft", "collect", "assemble", "verify", "commit", "end"]
DraftResults = Mapping[str, DraftResult | None]


class DraftSource(Protocol):
    """The draft workers."""

    async def ask(self, round: Round) -> None:
        """Send every batch of `round.asked.batches`."""

    async def collect(self, round: Round) -> DraftResults:
        """Results by awaited worker, None for those not in time."""


@dataclass(slots=True)
class RoundOutcome:
    """Result of one `run_round`; `round` is None when there was nothing to compute."""

    round: Round | None
    events: list[RouterEvent]
    batch: VerifyBatch | None = None
    result: VerifyResult | Failure | None = None  # None or a failure: the round was abandoned


def _ignore(told: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RoundHooks:
    """A caller's clock, its receiver of events, and a callback at the beginning of each stage."""

    now: Callable[[], float] = time.monotonic
    deliver: Callable[[list[RouterEvent]], object] = _ignore
    begin: Callable[[RoundStage], object] = _ignore


_NO_HOOKS = RoundHooks()
_MOST_ROUNDS = 32  # of one call; between calls, requests are admitted and other routers' learning is exchanged


async def run_round(
    core: RouterCore,
    drafts: DraftSource,
    verify: Callable[[VerifyBatch], Awaitable[VerifyResult | Failure | None]],
    hooks: RoundHooks = _NO_HOOKS,
) -> RoundOutcome:
    """One round of all running sequences. verify: the target's answer, None if there was none.

    CPU drafters run while draft workers draft. Exceptions of `drafts` and `verify` leave the round open.
    """
    planned = await _begin_round(core, drafts, hooks)
    if isinstance(planned, RoundOutcome):
        return planned
    round, batch, events = planned
    hooks.begin("verify")
    result = await verify(batch)
    return _end_round(core, round, batch, result, hooks, events)


async def run_rounds(
    core: RouterCore,
    drafts: DraftSource,
    verify: Callable[[VerifyBatch | VerifyAhead], Coroutine[None, None, VerifyResult | Failure | None]],
    hooks: RoundHooks = _NO_HOOKS,
) -> RoundOutcome:
    """One round, and behind it those that are sent ahead, each while the target computes the one before.

    verify: it sends the message before it first waits. Returns the outcome of the last round, with all events.
    """
    planned = await _begin_round(core, drafts, hooks)
    if isinstance(planned, RoundOutcome):
        return planned
    round, batch, events = planned
    asked: list[asyncio.Task[VerifyResult | Failure | None]] = []
    try:
        answer = await _send(verify(batch), asked)
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            hooks.begin("draft")
            ahead = core.plan_ahead(round, hooks.now()) if rounds_left else None
            next_answer = None if ahead is None else await _send(verify(ahead), asked)
            hooks.begin("verify")
            result = await answer
            outcome = _end_round(core, round, batch, result, hooks, events)
            if next_answer is None or not isinstance(result, VerifyResult):
                break
            begun = core.begin_ahead(batch, result, hooks.now())
            if begun is None:
                break
            (round, batch), answer, events = begun, next_answer, outcome.events
        return outcome
    finally:
        for task in asked:
            task.cancel()  # the answers of rounds that were not begun


async def _send(
    answer: Coroutine[None, None, VerifyResult | Failure | None],
    asked: list[asyncio.Task[VerifyResult | Failure | None]],
) -> asyncio.Task[VerifyResult | Failure | None]:
    task = asyncio.create_task(answer)
    asked.append(task)
    await asyncio.sleep(0)
    return task


async def _begin_round(
    core: RouterCore, drafts: DraftSource, hooks: RoundHooks
) -> tuple[Round, VerifyBatch, list[RouterEvent]] | RoundOutcome:
    """The round that the target is asked for, its batch and the events so far; an outcome if there is none."""
    hooks.begin("plan")
    round, events = core.plan_round(hooks.now())
    hooks.deliver(events)
    if round is None:
        hooks.begin("end")
        return RoundOutcome(None, events)
    hooks.begin("draft")
    await drafts.ask(round)
    core.draft_locally(round)
    hooks.begin("collect")
    results = await drafts.collect(round)
    hooks.begin("assemble")
    batch = core.assemble(round, results)
    round.assembled_at = hooks.now()
    return round, batch, events


def _end_round(
    core: RouterCore,
    round: Round,
    batch: VerifyBatch,
    result: VerifyResult | Failure | None,
    hooks: RoundHooks,
    events: list[RouterEvent],
) -> RoundOutcome:
    hooks.begin("commit")
    if isinstance(result, VerifyResult) and not result.is_declined:
        committed = core.commit(round, result, hooks.now())
        hooks.deliver(committed)
        events = events + committed
    else:
        is_declined = isinstance(result, VerifyResult)
        core.abandon_round(round, is_cleared=isinstance(result, Failure), is_declined=is_declined)
    hooks.begin("end")
    return RoundOutcome(round, events, batch, result)


@dataclass(slots=True)
class _LocalDrafts:
    draft: Callable[[str, DraftBatch], DraftResult | None]
    results: dict[str, DraftResult | None] = field(default_factory=dict)

    async def ask(self, round: Round) -> None:
        self.results = {worker_id: self.draft(worker_id, batch) for worker_id, batch in round.asked.batches.items()}

    async def collect(self, round: Round) -> DraftResults:
        return self.results


def no_drafts(worker_id: str, batch: DraftBatch) -> DraftResult | None:
    return None


def run_local_round(
    core: RouterCore,
    verify: Callable[[VerifyBatch], VerifyResult | Failure | None],
    draft: Callable[[str, DraftBatch], DraftResult | None] = no_drafts,
    hooks: RoundHooks = _NO_HOOKS,
) -> RoundOutcome:
    """`run_round` with target and draft model as plain functions of this process."""

    async def verify_now(batch: VerifyBatch) -> VerifyResult | Failure | None:
        return verify(batch)

    coroutine = run_round(core, _LocalDrafts(draft), verify_now, hooks)
    try:
        coroutine.send(None)  # runs to its end: nothing in it suspends
    except StopIteration as ended:
        outcome: RoundOutcome = ended.value
        return outcome
    finally:
        coroutine.close()
    raise AssertionError("a local round was suspended")

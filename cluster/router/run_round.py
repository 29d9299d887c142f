"""The one round of all callers: plan, draft, choose, verify, commit, wherever drafts and target are."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from actors.messages import DraftBatch, DraftResult, Failure, VerifyBatch, VerifyResult
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


async def run_round(
    core: RouterCore,
    drafts: DraftSource,
    verify: Callable[[VerifyBatch], Awaitable[VerifyResult | Failure | None]],
    hooks: RoundHooks = _NO_HOOKS,
) -> RoundOutcome:
    """One round of all running sequences. verify: the target's answer, None if there was none.

    CPU drafters run while draft workers draft. Exceptions of `drafts` and `verify` leave the round open.
    """
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
    hooks.begin("verify")
    result = await verify(batch)
    hooks.begin("commit")
    if isinstance(result, VerifyResult):
        committed = core.commit(round, result, hooks.now())
        hooks.deliver(committed)
        events = events + committed
    else:
        core.abandon_round(round, is_cleared=isinstance(result, Failure))
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

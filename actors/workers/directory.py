"""The registry of a cluster: worker addresses, the key pair of its routers, and which router has which target group.

A plain `Directory` inside one named Ray actor. A restart gets the same key pair, an argument of the actor, and
what was set by hand, from Ray's store. Workers register again with their next heartbeat. If a new
directory has another key, the answer to that heartbeat tells the workers. Established links need no directory.

A call costs as much as there is to tell. Each router has one call here that waits until something has changed for it,
and for a second at most, since calls renew what routers hold; each worker calls once a second. With more than 750
callers the directory has relays (`directory_relay`), one for each 750, and answers say which one to call. Until relays
are there, callers call less often, for leases that last as much longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias
from zlib import crc32

import msgspec

from actors.links.keys import LinkAddress, LinkKeys
from actors.pool_names import FIRST_POOL
from actors.workers.change_log import ChangeLog
from actors.workers.demand import DraftDemand, RouterDemands, TargetDemand
from actors.workers.leases import Leases
from actors.workers.model_changes import ModelTurns, WantedModel, add_refusal
from actors.workers.waiting import Waiting

TTL_S = 4.0  # four missed heartbeats
_LONGEST_WAIT_S = 1.0  # a router calls again after it, whether or not there was anything to tell
MOST_CALLERS = 750  # of the directory, or of a relay, each once a second: Ray takes up to a millisecond for a call
_RELAY_LIFE_S = 3.0  # after a relay's last call; it calls again soon after the answer
_RELAYS_AGAIN_S = 1.0  # between two tries to make relays

Role = Literal["target", "draft"]


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One worker. After a restart it has the same `worker_id` and another `incarnation`."""

    role: Role
    worker_id: str
    address: LinkAddress
    incarnation: int
    link_drops: tuple[tuple[str, int], ...] = ()  # messages dropped by its link server so far, by reason
    is_leaving: bool = False  # it still answers, but must not be asked for more
    model: str = ""  # a target's fingerprint; what a draft worker's model is called
    pool: str = FIRST_POOL  # of a draft worker
    model_number: int = 0  # of a draft worker: `WantedModel.number` of the last one that it followed


class Kept(msgspec.Struct):
    """Numbers set by `paceline scale`, and the state that a restarted directory needs of its callers."""

    groups: int = 0  # number of target groups; 0: as the load asks for
    workers: dict[str, int] = {}  # number of draft workers by pool; 0: as the load asks for
    models: dict[str, WantedModel] = {}  # by pool
    refusals: dict[str, dict[str, str]] = {}  # by pool and worker: why it could not load the pool's model of `models`
    # Callers renew at the 1st, 2nd, 4th or ... interval, for leases that are as many times as long.
    stretch: int = 1
    relays: int = 0  # that were made; never fewer than before


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    clients: tuple[bytes, ...]  # public keys of clients that the worker's links must admit
    wanted: WantedModel  # what the workers of its pool are to run
    stretch: int  # the intervals after which to call again
    relay: str | None = None  # to call from now on; None: the directory itself


Mark: TypeAlias = tuple[tuple[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A router's request to the directory: its state, and which answer it received last."""

    router_id: str
    model: str  # of its target groups
    held: str | None = None  # its target group
    mark: Mark | None = None  # of the last `Told`
    is_leaving: bool = False  # another router may get its group
    drafts: Mapping[str, DraftDemand] | None = None  # its demand on draft workers, by pool; None: it has no rounds yet
    targets: TargetDemand | None = None  # as in `Directory.tell_demand`


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a router needs to know."""

    mark: Mark  # names what the router knows with this answer
    drafts: list[WorkerEntry]  # draft workers that are new or have changed; `is_whole`: all there are
    gone: list[str]  # draft workers
    is_whole: bool
    # The group that it has had, the one that it gets, and one of another router that serves, as far as there are any.
    targets: tuple[WorkerEntry, ...]
    target_id: str | None  # the target group assigned to the router
    longest_wait_s: float  # for which the next call may wait
    relay: str | None  # as in `HeartbeatAnswer`


@dataclass(frozen=True, slots=True)
class Relayed:
    """The answer to a relay's call."""

    heartbeats: list[HeartbeatAnswer]  # one for each worker
    told: list[tuple[Told, bool]]  # for each router, and whether it is news: otherwise the router need not know yet
    woken: list[str]  # routers for which there may be news since they asked


@dataclass(slots=True)
class _Record:
    entry: WorkerEntry
    previous_incarnation: int | None  # incarnation of the worker that this one replaced


class Directory:
    """Entries and claims expire if they are not renewed within `ttl_s` seconds, times `Kept.stretch`."""

    def __init__(
        self,
        client_keys: LinkKeys,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
        is_restarted: bool = False,
        most_callers: int = MOST_CALLERS,
    ) -> None:
        """is_restarted: workers and routers may hold claims of the previous directory. most_callers: the directory, and
        each relay, is to have no more."""
        self._client_keys = client_keys
        self._ttl_s = ttl_s
        self._clock = clock
        self._is_restarted = is_restarted
        self._most_callers = most_callers
        self._filled_at = clock() + ttl_s  # by then all live workers and routers have reported
        self._records: Leases[_Record] = Leases(clock)
        self._targets: dict[str, WorkerEntry] = {}  # the targets among them, in order of registration
        self._claims: Leases[str] = Leases(clock)  # workers by router
        self._claimed_by: dict[str, str] = {}  # routers by worker
        self._draft_changes = ChangeLog()
        self._draft_news = self._draft_changes.mark  # after the last change that is told at once
        self._waiting = Waiting()
        self._routers: Leases[None] = Leases(clock)  # routers that called recently, with or without a waiting call
        self._direct: Leases[None] = Leases(clock)  # workers and routers that called recently, and not by a relay
        self._relays: Leases[None] = Leases(clock)  # relays that called recently
        self._no_relays_until = clock()
        self._removed: Leases[int] = Leases(clock)  # incarnations of workers that have left
        self._sorted_drafts: list[WorkerEntry] | None = None  # of the draft workers; None: they have changed
        self._woken: dict[str, set[str]] = {}  # routers by relay, until its next call
        self._demands = RouterDemands(clock)
        self._kept = Kept()
        self._turns = ModelTurns(ttl_s, clock)

    def heartbeat(self, entry: WorkerEntry) -> HeartbeatAnswer:
        """Register or renew a worker. A worker that was replaced under its id is ignored."""
        self._expire()
        self._direct.renew(entry.worker_id, None, self._lease_s)
        return self._heartbeat(entry)

    def _heartbeat(self, entry: WorkerEntry) -> HeartbeatAnswer:
        record = self._records.get(entry.worker_id)
        if record is None:
            removed = self._removed.get(entry.worker_id)
            if removed != entry.incarnation:  # otherwise it is a late call by a relay
                self._put(_Record(entry, removed), None)
        elif record.entry.incarnation == entry.incarnation:
            if record.entry.is_leaving and not entry.is_leaving:  # a late call by a relay
                entry = record.entry
            self._put(_Record(entry, record.previous_incarnation), record.entry)
        elif record.previous_incarnation != entry.incarnation:
            self._put(_Record(entry, record.entry.incarnation), record.entry)
        stretch, relay = self._stretch(), self._relay_for(entry.worker_id)
        return HeartbeatAnswer((self._client_keys.public,), self.wanted_model(entry.pool), stretch, relay)

    def remove(self, worker_id: str, incarnation: int) -> None:
        """Remove a worker. Unknown and replaced workers are ignored."""
        record = self._records.get(worker_id)
        if record is None:
            self._removed.renew(worker_id, incarnation, self._lease_s)
        elif record.entry.incarnation == incarnation:
            self._removed.renew(worker_id, incarnation, self._lease_s)
            self._records.pop(worker_id)
            self._direct.pop(worker_id)
            self._note_lost(record.entry)

    def workers(self, role: Role | None = None) -> list[WorkerEntry]:
        """The live workers, of one role or all, ordered by id."""
        self._expire()
        entries = [record.entry for record in self._records.values() if role is None or record.entry.role == role]
        return sorted(entries, key=lambda entry: entry.worker_id)

    def tell(self, asked: Asked) -> Told:
        """Renew the router's lease and signals, and return the changes since its last call. A leaving router keeps its
        group for its open requests until another router is assigned to it."""
        self._expire()
        self._direct.renew(asked.router_id, None, self._lease_s)
        return self._tell(asked)

    def _tell(self, asked: Asked) -> Told:
        self._routers.renew(asked.router_id, None, self._lease_s)
        if asked.drafts is not None:
            self.tell_demand(asked.router_id, asked.drafts, asked.targets)
        if asked.is_leaving:
            self.release_target(asked.router_id)
            held = self._targets.get(asked.held or "")
            target_id = None if held is None or held.is_leaving else asked.held
        else:
            target_id = self.claim_target(asked.router_id, asked.held, asked.model)
        targets = self._targets_for(asked.model, asked.held, target_id)
        longest_wait_s, relay = _LONGEST_WAIT_S * self._stretch(), self._relay_for(asked.router_id)
        changed = self._draft_changes.since(asked.mark and asked.mark[0])
        known = [] if changed is None else [(name, self._records.get(name)) for name in sorted(changed)]
        return Told(
            mark=(self._draft_changes.mark, hash((targets, target_id, longest_wait_s, relay))),
            drafts=self._all_drafts() if changed is None else [record.entry for _, record in known if record],
            gone=[name for name, record in known if not record],
            is_whole=changed is None,
            targets=targets,
            target_id=target_id,
            longest_wait_s=longest_wait_s,
            relay=relay,
        )

    async def follow(self, asked: Asked) -> Told | None:
        """Called by each router again and again. Answers at once if there is news for the router, else after
        `Told.longest_wait_s`, or as soon as it should ask again: with None, or what draft workers have dropped.

        Nothing is claimed for a router when it is woken: it may be gone by then.
        """
        told = self.tell(asked)
        if self._is_news(asked, told):
            return told
        await self._waiting.wait(asked.router_id, _kind(asked), told.longest_wait_s)
        return None if told.mark == asked.mark else told

    def relayed(self, relay: str, entries: Sequence[WorkerEntry], questions: Sequence[Asked]) -> Relayed:
        """`heartbeat` and `follow` for a relay's callers, without waiting: the relay calls a few times a second, and is
        told which routers to wake."""
        self._expire()
        self._relays.renew(relay, None, _RELAY_LIFE_S)
        for caller in (*(entry.worker_id for entry in entries), *(asked.router_id for asked in questions)):
            self._direct.pop(caller)
        heartbeats = [self._heartbeat(entry) for entry in entries]
        told = []
        for asked in questions:
            answer = self._tell(asked)
            is_news = self._is_news(asked, answer)
            self._waiting.wake(asked.router_id)  # its call before, perhaps without a relay
            self._woken.get(relay, set()).discard(asked.router_id)  # the answer has what there was
            if not is_news:
                self._waiting.note(asked.router_id, _kind(asked), partial(self._wake_by, relay, asked.router_id))
            told.append((answer, is_news))
        return Relayed(heartbeats, told, list(self._woken.pop(relay, ())))

    def _all_drafts(self) -> list[WorkerEntry]:
        """The same list while nothing has changed, so that a relay's answers to many routers have it once."""
        if self._sorted_drafts is None:
            self._sorted_drafts = self.workers("draft")
        return self._sorted_drafts

    def _wake_by(self, relay: str, router_id: str) -> None:
        self._woken.setdefault(relay, set()).add(router_id)

    def _is_news(self, asked: Asked, told: Told) -> bool:
        """Whether the router should know this at once. Counts of drops can wait."""
        mark = asked.mark
        return mark is None or told.is_whole or mark[0] < self._draft_news or mark[1] != told.mark[1]

    def client_keys(self) -> LinkKeys:
        """The key pair that every router of the cluster uses."""
        return self._client_keys

    def claim_target(self, router_id: str, held: str | None, model: str = "") -> str | None:
        """The target group of that model for the router, or None. No two routers have the same group.

        The router keeps its group while that is alive and not leaving. Otherwise it gets `held`, its group from before,
        if no other router has claimed it, or else a free one. In the first `ttl_s` seconds `held` is believed; after a
        restart of the directory, routers without a group wait so long.
        """
        self._expire()
        settles = self._clock() < self._filled_at
        if settles and held is not None and self._is_free(held, router_id) and not self._is_leaving(held):
            wanted: str | None = held
        elif settles and self._is_restarted:
            wanted = None
        else:
            wanted = self._choose_target(router_id, held, model)
        if wanted is None:
            self.release_target(router_id)
        else:
            self._claim(router_id, wanted)
        return wanted

    def release_target(self, router_id: str) -> None:
        """End the router's claim. Another router may claim the group at once."""
        self._waiting.wake(router_id)  # it is not the one that the group is offered to
        worker_id = self._claims.pop(router_id)
        if worker_id is not None:
            self._unclaim(worker_id)

    def tell_demand(
        self, router_id: str, drafts: Mapping[str, DraftDemand], targets: TargetDemand | None = None
    ) -> None:
        """Store a router's demand on draft workers, by pool, and, if it has one, on its target group."""
        self._demands.tell(router_id, drafts, targets, self._lease_s)

    def hold(self, role: Role, number: int, pool: str = FIRST_POOL) -> None:
        """Set the number of draft workers of a pool, or of target groups, by hand. 0: as the load asks for."""
        if role == "target":
            self._kept.groups = number
        else:
            self._kept.workers[pool] = number

    def want_model(self, pool: str, spec: str) -> WantedModel:
        """Have a pool's workers run this model, one after the other. "": the model of the configuration."""
        # Derived from the time: a new directory must not reuse a number that workers have already acted on.
        wanted = WantedModel(spec, max(time.time_ns(), self.wanted_model(pool).number + 1))
        self._kept.models[pool] = wanted
        self._kept.refusals.pop(pool, None)
        return wanted

    def wanted_model(self, pool: str) -> WantedModel:
        return self._kept.models.get(pool, WantedModel())

    def take_turn(self, pool: str, worker: str, is_changing: bool = False) -> bool:
        """Whether this worker may change its model now: see `ModelTurns.take`. is_changing: it has the turn, and renews
        it. For `ttl_s` seconds after a restart, the directory gives no new turns, because it does not know the old
        ones."""
        if self._is_restarted and self._clock() < self._filled_at and not is_changing:
            return False
        return self._turns.take(pool, worker)

    def end_turn(self, pool: str, worker: str) -> None:
        self._turns.end(pool, worker)

    def refuse_model(self, pool: str, worker: str, number: int, reason: str) -> None:
        """The worker could not load the wanted model of that number, and keeps the one it has."""
        if number == self.wanted_model(pool).number:
            add_refusal(self._kept.refusals.setdefault(pool, {}), worker, reason)

    def refusals(self, pool: str) -> list[str]:
        """Why workers could not load the model that is wanted, one reason a worker."""
        return list(self._kept.refusals.get(pool, {}).values())

    def draft_demand(self, pool: str = FIRST_POOL) -> DraftDemand:
        """Combined demand on a pool's workers of the routers that reported lately, and their number set by hand."""
        held = self._kept.workers.get(pool, 0)
        return replace(self._demands.on_drafts(pool), held=held, stretch=self._demand_stretch)

    def target_demand(self) -> TargetDemand:
        """Combined demand of the routers that reported lately and have a target group, and the number set by hand."""
        return replace(self._demands.on_targets(), held=self._kept.groups, stretch=self._demand_stretch)

    def _choose_target(self, router_id: str, held: str | None, model: str) -> str | None:
        """The router's own group, the one it held before, or a free one."""
        for preferred in (self._claims.get(router_id), held):
            entry = self._targets.get(preferred or "")
            if entry is not None and self._may_serve(entry, router_id, model):
                return entry.worker_id
        free = (entry.worker_id for entry in self._targets.values() if self._may_serve(entry, router_id, model))
        return min(free, default=None)

    def _may_serve(self, entry: WorkerEntry, router_id: str, model: str) -> bool:
        return entry.model == model and not entry.is_leaving and self._is_free(entry.worker_id, router_id)

    def _is_free(self, worker_id: str, router_id: str) -> bool:
        return self._claimed_by.get(worker_id, router_id) == router_id

    def _is_leaving(self, worker_id: str) -> bool:
        entry = self._targets.get(worker_id)
        return entry is not None and entry.is_leaving

    def _claim(self, router_id: str, worker_id: str) -> None:
        former = self._claims.get(router_id)
        self._claims.renew(router_id, worker_id, self._lease_s)
        self._claimed_by[worker_id] = router_id
        if former is not None and former != worker_id:
            self._unclaim(former)

    def _unclaim(self, worker_id: str) -> None:
        self._claimed_by.pop(worker_id, None)
        self._offer(worker_id)

    def _offer(self, worker_id: str) -> None:
        """Wake a router that has no group, if this one is free."""
        entry = self._targets.get(worker_id)
        if entry is not None and not entry.is_leaving and worker_id not in self._claimed_by:
            self._waiting.wake_first(entry.model, lambda router_id: router_id not in self._claims)

    def _targets_for(self, model: str, held: str | None, assigned: str | None) -> tuple[WorkerEntry, ...]:
        """See `Told.targets`."""
        own = {worker_id: self._targets[worker_id] for worker_id in (held, assigned) if worker_id in self._targets}
        others = (
            entry
            for entry in self._targets.values()
            if entry.worker_id not in own and entry.model == model and not entry.is_leaving
        )
        found = [entry for entry in own.values() if entry.model == model]
        return (*found, *(replace(entry, link_drops=()) for entry in islice(others, 1)))

    def _put(self, record: _Record, former: WorkerEntry | None) -> None:
        """Store a record, and wake the routers that should know. Counts of drops can wait."""
        entry, worker_id = record.entry, record.entry.worker_id
        self._records.renew(worker_id, record, self._lease_s)
        is_news = former is None or replace(former, link_drops=entry.link_drops) != entry
        if entry.role == "target":
            self._targets[worker_id] = entry
            if is_news:
                self._waiting.wake(self._claimed_by.get(worker_id, ""))
                self._offer(worker_id)
        elif former != entry:
            self._note_draft(worker_id, is_news)

    def _note_lost(self, entry: WorkerEntry) -> None:
        if entry.role == "target":
            del self._targets[entry.worker_id]
            self._waiting.wake(self._claimed_by.get(entry.worker_id, ""))
        else:
            self._note_draft(entry.worker_id)

    def _note_draft(self, worker_id: str, is_news: bool = True) -> None:
        self._draft_changes.note(worker_id)
        self._sorted_drafts = None
        if is_news:
            self._draft_news = self._draft_changes.mark
            self._waiting.wake_all()

    @property
    def _lease_s(self) -> float:
        return self._ttl_s * self._kept.stretch

    @property
    def _demand_stretch(self) -> int:
        """All replicas ask for the same demand, and not by relays."""
        return max(self._kept.stretch, self._actors_needed)

    @property
    def _actors_needed(self) -> int:
        """The number of actors that can take the calls of all."""
        return max(1, math.ceil((len(self._records) + len(self._routers)) / self._most_callers))

    def _stretch(self) -> int:
        """Rises with the number of callers that use no relay, and falls when there are clearly fewer."""
        callers, stretch = len(self._direct), self._kept.stretch
        if callers > stretch * self._most_callers:
            self._change_stretch(2 * stretch)
        elif stretch > 1 and callers < stretch * self._most_callers // 3 and self._clock() >= self._filled_at:
            self._change_stretch(stretch // 2)
        return self._kept.stretch

    def _change_stretch(self, stretch: int) -> None:
        self._kept.stretch = stretch

    def _relay_for(self, caller: str) -> str | None:
        """The relay for a worker or router; None while that one does not call."""
        if self._actors_needed > max(1, self._kept.relays) and self._clock() >= self._no_relays_until:
            self._no_relays_until = self._clock() + _RELAYS_AGAIN_S
            self._make_relays(self._actors_needed)
        if not self._kept.relays:
            return None
        relay = self._relay_name(crc32(caller.encode()) % self._kept.relays)
        return relay if relay in self._relays else None

    def _make_relays(self, number: int) -> None:
        """Have so many in all."""
        self._kept.relays = number

    def _relay_name(self, number: int) -> str:
        return f"relay-{number}"

    def _expire(self) -> None:
        self._relays.expire()
        self._direct.expire()
        self._removed.expire()
        for router_id, _ in self._routers.expire():
            self._waiting.wake(router_id)  # it may have waited at a relay that is gone
        for _, record in self._records.expire():
            self._note_lost(record.entry)
        for _, worker_id in self._claims.expire():
            self._unclaim(worker_id)


def _kind(asked: Asked) -> str:
    """The kind of a waiting call. A router that leaves is not to be woken for a free group."""
    return "" if asked.is_leaving else asked.model

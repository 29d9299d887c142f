"""Carries out faults on the parts of a simulated cluster, and mends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cluster.simulate.draft_workers import DraftPool
from cluster.simulate.events import Events
from cluster.simulate.exact_group import ExactGroup
from cluster.simulate.faults import Fault
from cluster.simulate.gateway import Gateway
from cluster.simulate.rounds import Group
from cluster.simulate.shared_log import SharedLog


class Failures:
    def __init__(
        self,
        events: Events,
        groups: Mapping[str, Group],
        gateways: Sequence[Gateway],
        draft_pool: DraftPool,
        log: SharedLog,
        num_zones: int,
    ) -> None:
        """groups: those that there are at the time of a fault."""
        self._events = events
        self._groups = groups
        self._gateways = gateways
        self._draft_pool = draft_pool
        self._log = log
        self._num_zones = num_zones
        self._outages = Counter[Callable[[], object]]()  # that have not ended, by what ends them

    def plan(self, fault: Fault) -> None:
        self._events.at(fault.at, self._break, fault)

    def _break(self, fault: Fault) -> None:
        for mend in self._broken(fault):
            self._outages[mend] += 1
            self._events.after(fault.seconds, self._end, mend)

    def _end(self, mend: Callable[[], object]) -> None:
        """The outage of a part that ends last mends it."""
        self._outages[mend] -= 1
        if not self._outages[mend]:
            mend()

    def _broken(self, fault: Fault) -> list[Callable[[], object]]:
        """What mends it: a method of the part."""
        groups, number = list(self._groups.values()), fault.number
        group, gateway = groups[number % len(groups)], self._gateways[number % len(self._gateways)]
        match fault.kind:
            case "store":
                self._log.lose()
                return [self._log.bring]
            case "draft_worker":
                workers = list(self._draft_pool.workers)
                if not workers:
                    return []
                self._draft_pool.stop(workers[number % len(workers)])
                self._events.after(fault.seconds, self._draft_pool.start)  # another one
                return []
            case "gateway":
                gateway.lose()
                return [gateway.bring]
            case "gateway_link":
                gateway.connection(groups[number // len(self._gateways) % len(groups)].name).cut(fault.seconds)
                return []
            case "target_link" | "draft_link" | "store_link":
                if isinstance(group, ExactGroup):
                    group.cut(fault.kind, fault.seconds)
                if fault.kind == "store_link":
                    gateway.store.cut(fault.seconds)
                return []
            case "zone":
                hit = [one for one in groups if one.zone == number % self._num_zones]
                return [action for one in hit for action in _lost(one, has_target=True, has_router=True)]
            case _:
                return _lost(group, has_target=fault.kind != "router", has_router=fault.kind != "target")


def _lost(group: Group, *, has_target: bool, has_router: bool) -> list[Callable[[], object]]:
    mend: list[Callable[[], object]] = []
    if has_target:
        group.lose_target()
        mend.append(group.bring_target)
    if has_router:
        group.lose_router()
        mend.append(group.bring_router)
    return mend

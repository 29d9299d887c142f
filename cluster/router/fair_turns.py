"""Shares tokens between tenants that wait, by their weights."""

from __future__ import annotations

from collections.abc import Iterable


class FairTurns:
    """Whoever has spent fewest tokens by weight is next. A tenant that did not wait has no credit: it begins at the
    level of the first waiting tenant.

    The tokens by weight of two tenants that wait all the time differ by at most the larger charge: deficit round robin
    with requests in place of a quantum, so a small weight takes no more rounds to find.
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}  # by weight, of tenants ahead of `_least`
        self._least = 0.0

    def spent(self, tenant: str) -> float:
        return self._spent.get(tenant, self._least)

    def charge(self, tenant: str, weight: float, tokens: float) -> None:
        """tokens: less than 0 to correct an earlier charge that was too high."""
        self._spent[tenant] = max(self._least, self.spent(tenant) + tokens / weight)

    def clear(self) -> None:
        """Nobody waits and nothing runs: what was before does not count any more."""
        self._spent = {}

    def wait(self, tenants: Iterable[str]) -> None:
        """Call it with all that wait before one of them is chosen."""
        least = min((self.spent(tenant) for tenant in tenants), default=self._least)
        if least > self._least:
            self._least = least
            self._spent = {tenant: spent for tenant, spent in self._spent.items() if spent > least}

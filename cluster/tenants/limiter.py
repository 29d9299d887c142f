"""A tenant's limits, as one gateway process enforces them: by leases of the cluster's, or by its share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from actors.errors import InvalidRequest
from cluster.tenants.errors import OverLimit
from cluster.tenants.lease import LeasedBucket, Report, Told
from cluster.tenants.places import LeasedPlaces, PlacesReport, PlacesTold
from cluster.tenants.registry import TenantLimits

_MINUTE_S = 60.0
_PLACE_RETRY_S = 1.0  # the end of an answer is unknown
_LEAST_WAIT_S = 0.001


class TenantLimiter:
    """Charges requests on arrival, prompts on admission, answers as they are generated.

    An answer may thus overdraw the tokens of a minute; the next request is refused until the bucket has refilled.
    """

    def __init__(
        self,
        limits: TenantLimits,
        num_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_leased: bool = False,
        draws: Callable[[], float] = random.random,
    ) -> None:
        """num_processes: processes that enforce these limits; without leases each has an equal share, and at least one
        request and one place. is_leased: there is a store of leases, even if it does not answer now."""
        self._num_processes = num_processes
        self._is_leased = is_leased
        self._clock = clock
        self._draws = draws
        self._requests: LeasedBucket | None = None
        self._tokens: LeasedBucket | None = None
        self._places: LeasedPlaces | None = None
        self.num_running = 0  # sequences
        self.limits = TenantLimits()
        self.change(limits)

    def change(self, limits: TenantLimits) -> None:
        """Change the limits; running calls go on."""
        if limits == self.limits:
            return
        self.limits = limits
        self._requests = self._changed(self._requests, limits.requests_per_second, period_s=1.0)
        self._tokens = self._changed(self._tokens, limits.tokens_per_minute, period_s=_MINUTE_S)
        if limits.max_concurrent is None:
            self._places = None
        elif self._places is None:
            self._places = LeasedPlaces(limits.max_concurrent, self._num_processes)
        else:
            self._places.limit = limits.max_concurrent

    def _changed(self, bucket: LeasedBucket | None, limit: float | None, period_s: float) -> LeasedBucket | None:
        """A bucket with room for a period's amount."""
        if limit is None:
            return None
        if bucket is None:
            return LeasedBucket(limit / period_s, limit, self._num_processes, self._clock(), self._draws)
        bucket.change(limit / period_s, limit, self._clock())
        return bucket

    def _buckets(self) -> dict[str, LeasedBucket]:
        named = {"requests_per_second": self._requests, "tokens_per_minute": self._tokens}
        return {name: bucket for name, bucket in named.items() if bucket is not None}

    @property
    def awaits_lease(self) -> bool:
        """Whether there are limits without a lease."""
        now = self._clock()
        return not all(bucket.has_lease(now) for bucket in (self._requests, self._tokens) if bucket is not None)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to report, and no answer under way."""
        if self.num_running or (self._places is not None and not self._places.is_idle(self._clock())):
            return False
        return all(bucket.is_idle for bucket in self._buckets().values())

    def reports(self, without_lease: bool) -> dict[str, Report]:
        """By limit, of those with something to report. without_lease: of those without a lease, too."""
        now = self._clock()
        return {
            name: bucket.report(now)
            for name, bucket in self._buckets().items()
            if not bucket.is_idle or (without_lease and not bucket.has_lease(now))
        }

    def renew(self, told: Mapping[str, Told]) -> None:
        """Take the answers to the last reports."""
        buckets, now = self._buckets(), self._clock()
        for name, bucket in buckets.items():
            if name in told:
                bucket.renew(told[name], now)

    def places_report(self) -> PlacesReport | None:
        """None: there is nothing to report."""
        places, now = self._places, self._clock()
        if places is None or (not self.num_running and places.is_idle(now)):
            return None
        return places.report(self.num_running, now)

    def renew_places(self, told: PlacesTold) -> None:
        """Take the answer to the last report."""
        if self._places is not None:
            self._places.renew(told)

    def should_ask_for_places(self, count: int) -> bool:
        """Whether so many more sequences cannot run now, and could after a report."""
        places = self._places
        return places is not None and places.should_ask(count, self.num_running, self._clock())

    @contextmanager
    def waiting_for_places(self, count: int) -> Iterator[None]:
        """Reports in this context ask for so many more places."""
        places = self._places
        if places is None:
            yield
            return
        places.waiting += count
        try:
            yield
        finally:
            places.waiting -= count

    @property
    def max_running(self) -> int | None:
        """Sequences that may run in this process now; None: any number."""
        return None if self._places is None else self._places.most(self._clock())

    def take_request(self) -> None:
        """Raises OverLimit without charging."""
        self._take(self._requests, 1, "requests_per_second", self.limits.requests_per_second)

    @contextmanager
    def admitted(self, num_prompt_tokens: int, num_sequences: int) -> Iterator[None]:
        """Charge a prompt, and hold a place for each sequence during the block.

        Raises OverLimit, or InvalidRequest for more sequences than there will ever be places, without charging.
        """
        if (places := self._places) is not None:
            now = self._clock()
            if num_sequences > (most := places.limit if self._is_leased else places.share):
                raise InvalidRequest("n", num_sequences, f"the tenant may have at most {most} answers under way")
            places.ask(num_sequences, now)
            if self.num_running + num_sequences > places.most(now):
                raise OverLimit("max_concurrent", places.limit, _PLACE_RETRY_S)
        self._take(self._tokens, num_prompt_tokens, "tokens_per_minute", self.limits.tokens_per_minute)
        self.num_running += num_sequences
        try:
            yield
        finally:
            self.num_running -= num_sequences

    def check_tokens(self, least: int) -> None:
        """Raises OverLimit where a prompt of at least so many tokens would not be admitted now. Charges nothing."""
        self._check(self._tokens, least, "tokens_per_minute", self.limits.tokens_per_minute)

    def _take(self, bucket: LeasedBucket | None, amount: int, limit_name: str, limit: float | None) -> None:
        self._check(bucket, amount, limit_name, limit)
        if bucket is not None:
            bucket.ask(amount)
            bucket.take(amount, self._clock())

    def _check(self, bucket: LeasedBucket | None, amount: int, limit_name: str, limit: float | None) -> None:
        """Raises OverLimit."""
        if bucket is None or limit is None:
            return
        if (wait_s := bucket.wait_s(amount, self._clock())) > 0:
            bucket.ask(amount)
            raise OverLimit(limit_name, limit, max(_LEAST_WAIT_S, wait_s))

    def spend(self, num_tokens: int) -> None:
        """Charge generated tokens."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

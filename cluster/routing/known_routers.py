"""What a gateway knows of each router, and whom it sends a request to."""

from __future__ import annotations

import random
from collections.abc import Iterable, KeysView, Mapping, Sequence, Set
from dataclasses import dataclass

from actors.messages import GenerationRequest
from cluster.routing.heard_routers import HeardRouter, HeardRouters
from cluster.routing.prefix_blocks import BLOCK_TOKENS, namespace_block, prefix_blocks
from cluster.routing.router_load import Ahead, ahead_of, expected_s
from cluster.routing.router_news import RouterNews

_STALE_S = 2.0  # without news: the router hangs, or cannot be heard
_REPEATED_WEIGHT = 2.0  # of tokens that one router alone has, where another one would compute them again; measured
MOST_COMPARED = 16  # of many routers: those drawn by chance, and those that know most of the prompt


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    num_tokens: int
    blocks: Sequence[int]  # see `prefix_blocks`
    namespace: int  # see `namespace_block`


def routed_prompt(request: GenerationRequest) -> RoutedPrompt:
    return RoutedPrompt(
        len(request.prompt_token_ids),
        prefix_blocks(request.prompt_token_ids, request.prefix_namespace or request.namespace),
        namespace_block(request.namespace),
    )


def repeated_blocks(num_leading: Mapping[str, int]) -> tuple[dict[str, float], float]:
    """Blocks of a prompt that each router would recompute, and that one without any would, each weighted by 1 /
    (number of routers that have it): a block of one router belongs to one conversation, a block of many is in common
    use.

    num_leading: number of leading blocks that each router has.
    """
    repeated: dict[str, float] = {}
    blocks, longer = 0.0, 0
    for num_longer, router_id in enumerate(sorted(num_leading, key=num_leading.__getitem__, reverse=True)):
        if num_longer:
            blocks += (longer - num_leading[router_id]) / num_longer
        longer = num_leading[router_id]
        repeated[router_id] = blocks
    return repeated, blocks + longer / max(1, len(num_leading))


class KnownRouters:
    """Routers by id. Several gateways decide by the same news, so each assumes that the others have sent as many
    requests as itself."""

    def __init__(self, rng: random.Random | None = None, heard: HeardRouters | None = None) -> None:
        """heard: news that simulated gateways share; None: no news yet."""
        self._heard = HeardRouters() if heard is None else heard
        self._sent: dict[str, tuple[int, Ahead]] = {}  # as of which of the router's news, and all that is ahead since
        self._rng = rng or random.Random()

    def hear(self, news: RouterNews, now: float) -> None:
        """Raises ValueError where the news cannot be read."""
        blocks = news.block_hashes()
        known = self._heard.by_id.setdefault(news.router_id, HeardRouter())
        known.ahead = None if news.load is None else ahead_of(news.load)
        known.heard_at = now
        known.num_heard += 1
        known.num_gateways = max(1, news.num_gateways)
        known.warm.capacity = news.num_blocks
        if news.is_whole:
            self._heard.clear(news.router_id)
        self._heard.use(news.router_id, blocks)

    def forget_all_but(self, routers: Set[str]) -> None:
        for router_id in self._heard.by_id.keys() - routers:
            self._heard.forget(router_id)
            self._sent.pop(router_id, None)

    def ranks(self, routers: KeysView[str], prompt: RoutedPrompt, now: float) -> list[list[str]]:
        """Routers in order of preference, in ranks of equals; the first one is expected to answer soonest. Of many
        routers only a sample is ranked: loads are not quite up to date, so the others are not much better.

        Routers without recent news share the first rank for a fraction of the requests equal to their fraction of the
        routers; the shortest queue then decides. So a router whose news is lost is still used, and one that hangs gets
        no more open requests than the first. Routers that accept no requests come last.
        """
        heard, silent, closed = [], [], []
        for router_id in self._compared(routers, prompt):
            known = self._heard.by_id.get(router_id)
            if known is None or now - known.heard_at > _STALE_S:
                silent.append(router_id)
            elif (ahead := self._ahead_at(router_id, known)) is None:
                closed.append(router_id)
            else:
                heard.append((router_id, known, ahead))
        ranks = [[router_id] for router_id in self._soonest_first(heard, prompt)]
        if silent:
            is_their_turn = self._rng.random() * (len(silent) + len(ranks)) < len(silent)
            if is_their_turn and ranks:
                ranks[0] += silent
            else:
                ranks.append(silent)
        return [*ranks, closed] if closed else ranks

    def _soonest_first(self, heard: list[tuple[str, HeardRouter, Ahead]], prompt: RoutedPrompt) -> list[str]:
        """Tokens that a router would compute again count more than their time: they delay others who run there, or come
        next."""
        answer_rounds = sum([ahead.load.answer_rounds for _, _, ahead in heard]) / max(1, len(heard))
        holders = self._heard.holders(prompt.blocks[0]) if prompt.blocks else {}
        num_leading = {
            router_id: known.warm.num_leading(prompt.blocks) for router_id, known, _ in heard if router_id in holders
        }
        repeated, repeated_by_others = repeated_blocks(num_leading)
        seconds = {}
        for router_id, known, ahead in heard:
            blocks = _REPEATED_WEIGHT * repeated_by_others
            if router_id in num_leading:
                blocks = _REPEATED_WEIGHT * repeated[router_id] - num_leading[router_id]
            seconds[router_id] = expected_s(
                ahead,
                prompt.num_tokens + BLOCK_TOKENS * blocks,
                answer_rounds=answer_rounds,
                knows_namespace=prompt.namespace in known.warm,
            )
        return sorted(seconds, key=seconds.__getitem__)

    def _compared(self, routers: KeysView[str], prompt: RoutedPrompt) -> Iterable[str]:
        drawn = self._rng.sample(list(routers), min(len(routers), MOST_COMPARED))
        if len(drawn) == len(routers):
            return drawn
        knowing = self._knowing_most(routers, prompt.blocks)
        return dict.fromkeys((*self._rng.sample(knowing, min(len(knowing), MOST_COMPARED)), *drawn))

    def _knowing_most(self, routers: KeysView[str], blocks: Sequence[int]) -> list[str]:
        """Routers that know the last block that anyone knows, by bisection among those that know the first one."""
        if not blocks:
            return []
        holders = [(one, warm) for one, warm in self._heard.holders(blocks[0]).items() if one in routers]
        begin, end = 1, len(blocks) if holders else 0
        while begin < end:
            middle = (begin + end) // 2
            block = blocks[middle]
            if found := [(one, warm) for one, warm in holders if block in warm]:
                holders, begin = found, middle + 1
            else:
                end = middle
        return [one for one, _ in holders]

    def _ahead_at(self, router_id: str, known: HeardRouter) -> Ahead | None:
        """By its last news, and by what went there since."""
        sent = self._sent.get(router_id)
        return known.ahead if sent is None or sent[0] != known.num_heard else sent[1]

    def sent(self, router_id: str, prompt: RoutedPrompt) -> None:
        """The request goes there: until that router says more, it has more to do, and will have the prompt."""
        known = self._heard.by_id.get(router_id)
        if known is None:
            return
        if (ahead := self._ahead_at(router_id, known)) is not None:
            num_cold = prompt.num_tokens - BLOCK_TOKENS * known.warm.num_leading(prompt.blocks)
            count = known.num_gateways
            more = ahead_of(ahead.load, ahead.requests + count, ahead.tokens + count * num_cold)
            self._sent[router_id] = known.num_heard, more
        self._heard.use(router_id, [*reversed(prompt.blocks), prompt.namespace], is_assumed=True)

    def refused(self, router_id: str, prompt: RoutedPrompt) -> None:
        """The router has refused the request, and will not have its prompt beyond what it has said it has."""
        if router_id in self._heard.by_id:
            self._heard.drop_assumed(router_id, [*prompt.blocks, prompt.namespace])

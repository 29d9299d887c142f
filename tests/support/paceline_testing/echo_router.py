"""A router without a model, for the gateway alone: it answers with the prompt's own tokens.

Token i of the answer is `prompt[(i + seed) % len(prompt)]` (greedy: seed 0): a function of seed and position, as with
a real router, so a stream that was lost can be carried on. A stop token ends the answer and is not emitted.
"""

import asyncio
from collections.abc import AsyncGenerator

from actors.errors import Overloaded, PacelineError
from actors.messages import GenerationRequest, SpeculationStats, TokenChunk
from cluster.routing.router_status import RouterStatus

# With which Serve deploys it: it ends at once.
ECHO_OPTIONS = {
    "max_ongoing_requests": 1000,
    "ray_actor_options": {"num_cpus": 0.1},
    "graceful_shutdown_wait_loop_s": 0.1,
}


class EchoRouter:
    """A `RouterClient`, and a class that Serve can deploy. Attributes may be changed at any time with `configure`."""

    def __init__(self, chunk_tokens: int = 3, delay_s: float = 0.0, max_running: int = 1000) -> None:
        self.chunk_tokens = chunk_tokens  # a round's tokens
        self.delay_s = delay_s  # before each chunk
        self.max_running = max_running  # beyond: Overloaded
        self.ready = True
        self.live = True
        self.max_model_len: int | None = None
        self.failures: list[tuple[int, Exception]] = []  # each strikes one request, after so many of its tokens
        self.requests: list[GenerationRequest] = []  # all that were taken
        self.running: set[str] = set()
        self.num_cancelled = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        if len(self.running) >= self.max_running:
            raise Overloaded(f"{len(self.running)} requests are running, at most {self.max_running}", 2.5)
        self.requests.append(request)
        self.running.add(request.request_id)
        failure = self.failures.pop(0) if self.failures else None
        finished = False
        try:
            answer = self._answer(request)
            num_prompt = len(request.prompt_token_ids)
            for rounds, start in enumerate(range(0, len(answer), self.chunk_tokens), 1):
                if failure is not None and start >= failure[0]:
                    raise failure[1]
                await asyncio.sleep(self.delay_s)
                token_ids = tuple(answer[start : start + self.chunk_tokens])
                finished = start + self.chunk_tokens >= len(answer)
                stopped = finished and token_ids[-1] in request.stop_token_ids
                yield TokenChunk(
                    request_id=request.request_id,
                    index=rounds - 1,
                    token_ids=token_ids[: len(token_ids) - stopped],
                    finish_reason=None if not finished else "stop" if stopped else "length",
                    num_cached_tokens=num_prompt // 2 if rounds == 1 else 0,
                    sources=(("echo",) * (len(token_ids) - 1) + ("target",))[: len(token_ids) - stopped],
                    stats=_stats(rounds, num_prompt, start + len(token_ids))
                    if finished or request.wants_stats
                    else None,
                )
        finally:
            self.running.discard(request.request_id)
            self.num_cancelled += not finished

    async def status(self) -> RouterStatus:
        return RouterStatus(ready=self.ready, live=self.live, detail="echo", max_model_len=self.max_model_len)

    async def metrics_text(self) -> str:
        return f"# TYPE echo_running gauge\necho_running {len(self.running)}\n"

    async def own_metrics(self) -> tuple[str, str]:
        return "echo", await self.metrics_text()

    async def configure(
        self,
        chunk_tokens: int = 3,
        delay_s: float = 0.0,
        max_running: int = 1000,
        ready: bool = True,
        max_model_len: int | None = None,
        failures: list[tuple[int, PacelineError]] | None = None,
    ) -> None:
        self.chunk_tokens, self.delay_s, self.max_running, self.ready = chunk_tokens, delay_s, max_running, ready
        self.max_model_len = max_model_len
        self.failures = list(failures or ())

    async def observed(self) -> tuple[int, int, GenerationRequest | None]:
        """(requests running, requests cancelled so far, the last request taken)."""
        return len(self.running), self.num_cancelled, self.requests[-1] if self.requests else None

    def _answer(self, request: GenerationRequest) -> list[int]:
        position = request.num_output_in_prompt
        prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - position].tolist()
        shift = 0 if request.sampling.is_greedy else request.sampling.seed
        answer = []
        for index in range(position, position + request.max_new_tokens):
            answer.append(prompt[(index + shift) % len(prompt)])
            if answer[-1] in request.stop_token_ids:
                break
        return answer


def _stats(rounds: int, num_prompt: int, num_tokens: int) -> SpeculationStats:
    drafted = num_tokens - rounds
    return SpeculationStats(
        rounds=rounds, target_rows=num_prompt + num_tokens, draft_tokens=drafted, accepted_tokens={"echo": drafted}
    )

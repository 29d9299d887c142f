"""How often working one round ahead has a draft ready, and what a request for a draft then takes.

    python tests/bench/bench_draft_ahead.py [--target smollm2] [--draft DIR] [--ahead 0 2 4 8 16] [--verify-ms 40]
        [--temperature 0] [--tokens 96] [--batch 1] [--device cpu] [--dtype float32]

The target answers some prompts once, without drafts; its answers are then replayed: every round a draft is asked for,
and what is accepted of it, with the target's next token, is the next delta. Between two requests the engine drafts
ahead until it has nothing left to do, or for --verify-ms, as long as a target's forward might take. The draft engine
has the machine to itself: what a target on the same cores would lose is not seen here.

Prints by outcomes drafted for: drafts that were there whole, forwards a request, median milliseconds of a request that
made none and of one that made some (processor time on the CPU), and forwards ahead between two requests.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from measuring import accepted_path

from actors.build import build_draft_engine
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_tree import DraftTree
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from actors.models.catalog import resolve_model
from actors.options import DraftOptions
from cluster.config import paceline_home
from cluster.offline.engine import LocalEngine

PROMPTS = (
    "Explain how a sailing boat can move against the wind.",
    "Write a Python function that returns the prime factors of a number, with a short explanation.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Think step by step.",
    "Write a polite letter to a landlord about a broken heating.",
    "Summarise in a few sentences what photosynthesis is and why it matters.",
    "List five books about the history of science, and say a sentence about each.",
)
GAMMA, BRANCH, MAX_NODES = 4, 2, 8


@dataclass
class Answer:
    tokens: np.ndarray  # int32: prompt and answer
    num_prompt: int
    params: SamplingParams


@dataclass
class Figures:
    drafts: int = 0  # of sequences
    hoped: int = 0
    ready: int = 0
    emitted: int = 0
    requests: int = 0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})  # by: made no forward
    forwards: int = 0  # in requests
    ahead: int = 0  # forwards between them


def answers(target: str, tokens: int, temperature: float, device: str, dtype: str) -> list[Answer]:
    engine = LocalEngine(target, drafters=["none"], draft_model="none", device=device, dtype=dtype)
    found = []
    for index, prompt in enumerate(PROMPTS):
        messages = [{"role": "user", "content": prompt}]
        (done,) = engine.generate([messages], max_new_tokens=tokens, temperature=temperature, seed=index)
        ids = np.array([*done.prompt_token_ids, *done.token_ids], np.int32)
        params = SamplingParams(seed=index, temperature=temperature)
        found.append(Answer(ids, len(done.prompt_token_ids), params))
    return found


def count_forwards(engine: DraftEngine, figures: Figures) -> None:
    forward = engine._runner.forward

    def counted(batch, logit_rows):
        figures.forwards += 1
        return forward(batch, logit_rows)

    engine._runner.forward = counted  # type: ignore[method-assign]


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def replay(engine: DraftEngine, batch: list[Answer], verify_s: float, device: str, figures: Figures) -> None:
    sent = dict.fromkeys(range(len(batch)), 0)
    length = {index: answer.num_prompt for index, answer in enumerate(batch)}
    for round_id in itertools.count():
        active = [index for index, answer in enumerate(batch) if length[index] < len(answer.tokens)]
        if not active:
            break
        items = []
        for index in active:
            answer = batch[index]
            begin = None if sent[index] else SequenceStart(answer.params, answer.num_prompt)
            delta = SequenceDelta(index, sent[index], answer.tokens[sent[index] : length[index]])
            items.append(DraftItem(delta, MAX_NODES, begin, GAMMA, BRANCH))
        before = figures.forwards
        # On the CPU its own time, which nothing beside it disturbs.
        clock = time.thread_time if device == "cpu" else time.perf_counter
        synchronize(device)
        began = clock()
        result = engine.draft(DraftBatch(round_id, items))
        taken = clock() - began
        if round_id:  # not the prompts
            figures.requests += 1
            figures.seconds[figures.forwards == before].append(taken)
        else:
            figures.forwards = before
        figures.drafts += len(active)
        figures.hoped += result.num_ahead
        figures.ready += result.num_ready
        for index, message in zip(result.seq_ids, result.trees, strict=True):
            tree = DraftTree(message.token_ids, message.parents, message.confidence)
            path = accepted_path(tree, batch[index].tokens[length[index] : -1])
            sent[index] = length[index]
            length[index] += len(path) + 1
            figures.emitted += len(path) + 1
        before = figures.forwards
        began = time.perf_counter()
        while engine.work_ahead():
            synchronize(device)
            if verify_s and time.perf_counter() - began >= verify_s:
                break
        figures.ahead += figures.forwards - before
        figures.forwards = before
    engine.draft(DraftBatch(0, [], list(sent)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument(
        "--draft", default="smollm2", help="of the target itself: every draft of the best chain is right"
    )
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 2, 4, 8, 16])
    parser.add_argument("--verify-ms", type=float, default=0.0, help="0: until nothing is left to do")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    replayed = answers(args.target, args.tokens, args.temperature, args.device, args.dtype)
    source = resolve_model(args.draft, paceline_home())
    print("ahead   ready  tokens/round  forwards/request  ms if ready  ms if not  forwards ahead")
    for ahead in args.ahead:
        engine = build_draft_engine(
            source, DraftOptions(dtype=args.dtype, device=args.device, kv_cache_tokens=16_384, ahead=ahead)
        )
        assert isinstance(engine, DraftEngine)
        figures = Figures()
        count_forwards(engine, figures)
        for first in range(0, len(replayed), args.batch):
            replay(engine, replayed[first : first + args.batch], args.verify_ms / 1e3, args.device, figures)
        ready, other = (1e3 * float(np.median(figures.seconds[key] or [np.nan])) for key in (True, False))
        print(
            f"{ahead:5d}  {figures.ready / max(1, figures.hoped):6.1%}  {figures.emitted / figures.drafts:12.2f}"
            f"  {figures.forwards / figures.requests:16.2f}  {ready:11.2f}  {other:9.2f}"
            f"  {figures.ahead / figures.requests:14.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

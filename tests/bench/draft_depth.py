"""Depth of drafts by value against fixed depths, for draft models or heads of two qualities and four costs.

    python tests/bench/draft_depth.py [--drafter draft_model] [--branch 1] [--batch 1] [--prompts 24] [--tokens 40]

The target is SmolLM2, greedy. Draft models are copies of it: one in int4, one with noise of 8 % on its weights. The
target's answers, and what each copy would draft at every position of them, are computed once. Then a real router plays
rounds over them in simulated time: a forward of the draft model takes a share of the target's, and a row more 0.5 % of
it. Fixed depths are those of a sweep. Prints tokens per simulated second, and the ratio to the best fixed depth.
Several sequences at a time are followed by others; one at a time is counted without its prompt.

With --drafter eagle, the copies draft as a head does: at the end of a round for the next one, after the target, as
deep as the round before it said. A level takes that share. With --drafter ouroboros, whose drafts depend on those
before them, nothing is recorded: the copies run in each round, which takes hours.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

import cluster.offline.building as building
import cluster.offline.engine as offline
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.growing_tree import MAX_EXPANDED, ROOT, GrowingTree
from actors.draft_tree import DraftTree
from actors.draft_worth import no_worth, pays
from actors.engine.options import EngineOptions
from actors.home import paceline_home
from actors.messages import (
    DraftBatch,
    DraftItem,
    DraftResult,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyBatch,
    VerifyResult,
)
from actors.models.catalog import resolve_model
from actors.models.loader import load_model
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation
from cluster.router.draft_depth import DraftDepth
from paceline_testing.toy_target import ToyTarget

MOST_DEPTH = 12
_VERIFY = LocalEngine._verify
TARGET_S, ROW_SHARE = 0.02, 0.005
TOPICS = ("a lamp", "the sea", "bread", "a bicycle", "chess", "rain", "a letter", "a garden")
WISHES = ("Explain {} in two sentences.", "Write a short list about {}.", "Tell a story about {}.")


class Drafts:
    """What a draft model would draft, greedily and as deep as asked, at each position of the target's answers."""

    def __init__(self, model: Any, answers: Sequence[Generation], branch: int = 1) -> None:
        """branch: guesses for each token, 1: chains."""
        self.vocab_size, self.branch = int(model.config.vocab_size), branch
        self._trees: dict[tuple[int, ...], DraftTree] = {}
        engine = DraftEngine(model, EngineOptions(num_blocks=2048, block_size=16))
        sampling = SamplingParams(seed=0, temperature=0.0)
        most_nodes = MOST_DEPTH if branch == 1 else MOST_DEPTH * MAX_EXPANDED * branch  # all that it makes
        for position in range(max(len(answer.token_ids) for answer in answers)):
            items, texts = [], []
            for seq_id, answer in enumerate(answers):
                if position >= len(answer.token_ids):
                    continue
                text = [*answer.prompt_token_ids, *answer.token_ids[: position + 1]]
                new = text if position == 0 else text[-1:]
                begin = SequenceStart(sampling, len(answer.prompt_token_ids)) if position == 0 else None
                delta = SequenceDelta(seq_id, len(text) - len(new), np.array(new, np.int32))
                items.append(DraftItem(delta, most_nodes, begin, MOST_DEPTH, branch))
                texts.append(tuple(text))
            self._trees.update(zip(texts, engine.draft(DraftBatch(position, items)).trees, strict=True))

    def after(self, text: Sequence[int], most_nodes: int, most_depth: int, min_confidence: float) -> Replay:
        """What a worker or head would draft after a text."""
        tree = GrowingTree(most_nodes, most_depth, self.branch, min_confidence)
        return Replay(tree, self._trees.get(tuple(text), DraftTree.empty()))


class Replay:
    """A tree that grows from the guesses of a recorded one."""

    def __init__(self, tree: GrowingTree, recorded: DraftTree) -> None:
        self.tree = tree
        self._recorded = recorded
        self._places = {ROOT: ROOT}  # of the tree's nodes among the recorded ones
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(recorded.parents.tolist()):
            self._children.setdefault(parent, []).append(node)

    def step(self, nodes: Sequence[int]) -> None:
        """Make the step that computes `nodes`."""
        self.tree.begin_step(nodes)
        confidence = self._recorded.confidence
        for node in nodes:
            place = self._places[node]
            before = float(confidence[place]) if place != ROOT else 1.0
            for child in self._children.get(place, ()):
                self._places[len(self.tree)] = child
                self.tree.add(node, int(self._recorded.token_ids[child]), float(confidence[child]) / max(before, 1e-30))


def grow(replays: Sequence[Replay], worth: np.ndarray) -> int:
    """Grow all trees as the draft engine does, and return the forwards that it takes."""
    num_forwards = 0
    while growing := [(replay, nodes) for replay in replays if (nodes := replay.tree.expandable())]:
        if num_forwards and not pays(worth, [own.tree.confidence(node) for own, nodes in growing for node in nodes]):
            break
        for replay, nodes in growing:
            replay.step(nodes)
        num_forwards += 1
    return num_forwards


class Worker:
    """Stands in for the draft engine of a local engine, and advances its clock."""

    def __init__(self, drafts: Drafts, forward_s: float) -> None:
        self._drafts, self._forward_s = drafts, forward_s
        self._texts: dict[int, list[int]] = {}
        self.engine: LocalEngine | None = None
        self.device = torch.device("cpu")

    def draft(self, batch: DraftBatch) -> DraftResult:
        assert self.engine is not None
        seq_ids, replays = [], []
        for item in batch.items:
            delta = item.delta
            text = self._texts.get(delta.seq_id, [])[: delta.start] + delta.token_ids.tolist()
            self._texts[delta.seq_id] = text
            if item.max_nodes:
                replays.append(self._drafts.after(text, item.max_nodes, item.max_depth, item.min_confidence))
                seq_ids.append(delta.seq_id)
        num_forwards = grow(replays, batch.worth)
        trees, elapsed_s = [replay.tree.finished() for replay in replays], num_forwards * self._forward_s
        self.engine._simulated_s += elapsed_s
        return DraftResult(batch.round_id, seq_ids, trees, elapsed_s=elapsed_s, num_forwards=num_forwards)

    def clear(self) -> None:
        self._texts.clear()


class LiveWorker:
    """A draft engine that drafts in each round. Advances its engine's clock like `Worker`."""

    def __init__(self, model: Any, forward_s: float) -> None:
        self._inner = DraftEngine(model, EngineOptions(num_blocks=2048, block_size=16))
        self._forward_s = forward_s
        self.engine: LocalEngine | None = None
        self.device = torch.device("cpu")
        self.clear = self._inner.clear

    def draft(self, batch: DraftBatch) -> DraftResult:
        assert self.engine is not None
        result = self._inner.draft(batch)
        elapsed_s = result.num_forwards * self._forward_s
        self.engine._simulated_s += elapsed_s
        return msgspec.structs.replace(result, elapsed_s=elapsed_s)


class KnownTarget(ToyTarget):
    """Says the recorded answers."""

    has_head, chain_only, row_steps, device = False, False, (), torch.device("cpu")

    def __init__(self, answers: Sequence[Generation], vocab_size: int) -> None:
        super().__init__(vocab_size, 8192, 16, 512, order=1 << 20)
        self.options = EngineOptions(512)
        self._next: dict[tuple[int, ...], int] = {}
        for answer in answers:
            text = [*answer.prompt_token_ids, *answer.token_ids]
            for end in range(len(answer.prompt_token_ids), len(text)):
                self._next[tuple(text[:end])] = text[end]

    def next_token(self, tokens: Any) -> int:
        return self._next.get(tuple(tokens), 0)

    def clear(self) -> None:
        self.lose_all()


class KnownTargetWithHead(KnownTarget):
    """With a head that drafts at the end of each round."""

    has_head = True

    def __init__(self, answers: Sequence[Generation], drafts: Drafts, level_s: float, most_levels: int) -> None:
        super().__init__(answers, drafts.vocab_size)
        self._drafts, self._level_s, self._most_levels = drafts, level_s, most_levels
        self._texts: dict[int, list[int]] = {}
        self.head_s = 0.0  # of the last round

    def verify(self, batch: VerifyBatch, masks: Any = None) -> VerifyResult:
        for item in batch.items:
            delta = item.delta
            self._texts[delta.seq_id] = self._texts.get(delta.seq_id, [])[: delta.start] + delta.token_ids.tolist()
        result = super().verify(batch, masks)
        items = {item.delta.seq_id: item for item in batch.items}
        seq_ids, replays = [], []
        for verdict in result.verdicts:
            item = items[verdict.seq_id]
            if verdict.next_token >= 0 and item.head_nodes > 0:
                path = item.tree.token_ids[verdict.path].tolist()
                text = [*self._texts[verdict.seq_id], *path, verdict.next_token]
                replays.append(self._drafts.after(text, item.head_nodes, self._most_levels, item.head_min_confidence))
                seq_ids.append(verdict.seq_id)
        num_forwards = grow(replays, batch.items[0].head_worth if batch.items else no_worth())
        self.head_s = num_forwards * self._level_s
        trees = [replay.tree.finished() for replay in replays]
        return msgspec.structs.replace(result, drafted_seq_ids=seq_ids, drafts=trees, head_forwards=num_forwards)


def timed_verify(engine: LocalEngine, batch: VerifyBatch) -> VerifyResult:
    """`LocalEngine._verify`, which leaves out the head's time where times are simulated, and that time."""
    result = _VERIFY(engine, batch)
    engine._simulated_s += engine.target.head_s
    return msgspec.structs.replace(result, head_s=engine.target.head_s)


def speed(
    spec: str,
    answers: Sequence[Generation],
    drafts: Drafts | Any,
    cost: float,
    batch_size: int = 1,
    fixed: int | None = None,
    drafter: str = "draft_model",
) -> tuple[float, float]:
    """(tokens per simulated second, tokens a round), without first tokens; in batches, the prompts of sequences that
    follow others take time.

    spec: the target; cost: time of a draft forward, as a share of the target's; fixed: depth of all drafts, None: by
    value; drafter: eagle: a head drafts, no worker; ouroboros: `drafts` is the draft model."""
    is_head, is_live = drafter == "eagle", drafter == "ouroboros"
    worker = LiveWorker(drafts, cost * TARGET_S) if is_live else Worker(drafts, cost * TARGET_S)
    vocab_size = int(drafts.config.vocab_size) if is_live else drafts.vocab_size
    with ExitStack() as stack:
        target = KnownTarget(answers, vocab_size)
        if is_head:
            target = KnownTargetWithHead(answers, drafts, cost * TARGET_S, fixed or MOST_DEPTH)
            stack.enter_context(patch.object(LocalEngine, "_verify", timed_verify))
        stack.enter_context(patch.object(building, "build_target_engine", lambda *_, **__: target))
        stack.enter_context(patch.object(offline, "warm_up", lambda *_, **__: [(1, 0.0), (64, 0.0)]))
        stack.enter_context(patch.object(offline, "resolve_draft_model", lambda _, source, *rest: source))
        stack.enter_context(patch.object(building, "build_draft_engine", lambda *_, **__: worker))
        stack.enter_context(patch.object(building, "warm_up", lambda *_: None))
        if fixed is not None:
            stack.enter_context(patch.object(DraftDepth, "min_confidence", lambda *_: 0.0))
            stack.enter_context(patch.object(DraftDepth, "worth", lambda *_: no_worth()))
        engine = LocalEngine(
            spec,
            drafters=(drafter,),
            eagle_head="in the target" if is_head else "none",
            batch_size=batch_size,
            gamma=fixed or MOST_DEPTH,
            branch=1 if is_live else drafts.branch,
            kv_cache_tokens=8192,
            seconds_of_rows=lambda rows: TARGET_S * (1.0 + ROW_SHARE * (min(rows, 64 * batch_size) - 1)),
        )
        worker.engine = engine
        seconds, tokens, rounds = 0.0, 0, 0
        ends: list[float] = []  # of rounds with tokens
        block_size = len(answers) if batch_size > 1 else 1  # a sequence that ends makes room for the next one
        for first in range(0, len(answers), block_size):
            block = answers[first : first + block_size]
            began = engine.now()
            ends.clear()
            most = max(len(answer.token_ids) for answer in block)
            found = engine.generate(
                [answer.prompt_token_ids for answer in block],
                max_new_tokens=most,
                ignore_eos=True,
                temperature=0.0,
                on_round=lambda trace: ends.append(engine.now()) if trace.num_emitted else None,
            )
            for answer, one in zip(block, found, strict=True):
                assert one.token_ids[: len(answer.token_ids)] == answer.token_ids
            seconds += engine.now() - (ends[0] if ends else began)
            tokens += sum(len(one.token_ids) - 1 for one in found)
            rounds += sum(one.rounds - 1 for one in found)
    return tokens / seconds, tokens / rounds


def noisy(model: Any, share: float) -> Any:
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            weight.data += share * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--drafter", choices=["draft_model", "eagle", "ouroboros"], default="draft_model")
    parser.add_argument("--branch", type=int, default=1, help="guesses for each token")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a round")
    parser.add_argument("--recording", type=Path, help="a file that keeps answers and drafts")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 10, MOST_DEPTH], help="to sweep")
    parser.add_argument("--costs", type=float, nargs="+", default=[2, 5, 10, 20], help="percent of a target's forward")
    arguments = parser.parse_args()
    for name, (answers, drafts) in recorded(arguments).items():
        for cost in arguments.costs:
            setting = "smollm2", answers, drafts, cost / 100, arguments.batch
            sweep = {depth: speed(*setting, depth, arguments.drafter)[0] for depth in arguments.depths}
            best = max(sweep, key=lambda depth: sweep[depth])
            own, per_round = speed(*setting, None, arguments.drafter)
            print(
                f"{name}, {arguments.drafter}, branch {arguments.branch}, batch {arguments.batch}, "
                f"a draft forward takes {cost:g} %: by value {own:.1f} tokens/s at {per_round:.2f} a round; "
                f"best fixed depth {best}: {sweep[best]:.1f}; ratio {own / sweep[best]:.3f}",
                flush=True,
            )


def recorded(arguments: argparse.Namespace) -> dict[str, tuple[Sequence[Generation], Any]]:
    """The target's answers, and drafts or a draft model, by the name of a copy."""
    if arguments.recording and arguments.recording.exists():
        return pickle.loads(arguments.recording.read_bytes())  # type: ignore[no-any-return]
    source = resolve_model("smollm2", paceline_home())
    prompts: list[Any] = [
        [{"role": "user", "content": wish.format(topic)}] for topic in TOPICS for wish in WISHES
    ][: arguments.prompts]  # fmt: skip
    plain = LocalEngine("smollm2", drafters=("none",), draft_model="none", dtype="float32", batch_size=8)
    answers = plain.generate(prompts, max_new_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
    copies = {
        "int4": load_model(source, "float32", quantization="int4"),
        "noise of 8 %": noisy(load_model(source, "float32"), 0.08),
    }
    if arguments.drafter == "ouroboros":
        return {name: (answers, model) for name, model in copies.items()}
    found = {name: (answers, Drafts(model, answers, arguments.branch)) for name, model in copies.items()}
    if arguments.recording:
        arguments.recording.write_bytes(pickle.dumps(found))
    return found


if __name__ == "__main__":
    main()

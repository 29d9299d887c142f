"""What each part of the planner brings: the same prompts answered with one part switched off at a time.

    python tests/bench/planner_ablation.py --spec-bench DIRECTORY [--answers FILE] [--variants all ...]

The target is SmolLM2, greedy, float32, without a draft model. Every row it computes is kept by the text before it, in
memory and in `--answers`, so the variants share its forwards, and a run that was stopped begins where it ended. A round
takes the time that a table gives its rows, which the machine has no part in. Two sets of prompts: ten of
each task of Spec-Bench, and sixty made up here (edits of programs, letters, lists, instructions). Prints, for each
variant and set, the simulated seconds of the rounds after the prompts, tokens a round, and the ratio to the full
planner.

A variant replaces functions of the planner while its engine works. Some add a condition that the part is for: a profile
that is wrong, or a draft worker: it proposes the target's own next token with probability `--worker-right`, and answers
after a simulated delay. Its confidence is that probability, or one that promises too much.
"""

import argparse
import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

import cluster.offline.building as building
import cluster.offline.engine as offline
from actors.draft_tree import DraftTree
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.messages import (
    DraftBatch,
    DraftResult,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    Successors,
    Verdict,
    VerifyBatch,
    VerifyItem,
    WorkerInfo,
)
from cluster.cli.bench.prompts import make_blocks, pick_rows, read_bench_prompts
from cluster.offline.engine import LocalEngine
from cluster.router import draft_choice
from cluster.router.calibration import KNOTS
from cluster.router.core import RouterCore
from cluster.router.draft_wait import DraftWait
from cluster.router.step_time import StepTimeCurve
from cluster.router.trace import RoundTrace
from paceline_testing.toy_target import ToyTarget

ROW_MS = ((1, 62.0), (4, 62.0), (8, 85.0), (12, 100.0), (16, 120.0))
ROW_STEPS = (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)  # row counts that a forward is filled up to
VOCAB_SIZE = 49_152
KEPT_SUCCESSORS = 16


class Answers:
    """The target's most probable next tokens by the tokens before them. Only texts that are new are computed."""

    def __init__(self, file: str) -> None:
        self._file = sqlite3.connect(file)
        self._file.execute("create table if not exists answers (text integer primary key, ids blob, probs blob)")
        self._known = {
            text: (np.frombuffer(ids, np.int32), np.frombuffer(probs, np.float32))
            for text, ids, probs in self._file.execute("select * from answers")
        }
        self._new: dict[int, tuple[bytes, bytes]] = {}
        self._engine: TargetEngine | None = None
        self._make_engine: Callable[[], TargetEngine] | None = None
        self._sent: list[int] = []  # what the engine knows of its only sequence
        self.num_forwards = 0

    def use(self, make_engine: Callable[[], TargetEngine]) -> None:
        self._make_engine = make_engine

    def next_tokens(self, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return self._known[hash(tuple(text))]

    def has(self, text: list[int]) -> bool:
        return hash(tuple(text)) in self._known

    def compute(self, text: list[int], tree: list[int], parents: list[int]) -> None:
        """Compute the target's predictions after a text and each node of a draft tree behind it, where they are new."""
        tree, parents = self._new_nodes(text, tree, parents)
        if self._engine is None:
            assert self._make_engine is not None
            self._engine = self._make_engine()
        start = len(self._sent) if len(text) > len(self._sent) and text[: len(self._sent)] == self._sent else 0
        begin = None if start else SequenceStart(SamplingParams(seed=0, temperature=0.0), len(text))
        delta = SequenceDelta(1, start, np.array(text[start:], np.int32))
        draft = DraftTree(np.array(tree, np.int32), np.array(parents, np.int32), np.zeros(len(tree), np.float32))
        item = VerifyItem(delta, len(text), draft=draft, begin=begin)
        result = self._engine.verify(VerifyBatch(0, [item], [], KEPT_SUCCESSORS))
        self._sent = list(text)
        self.num_forwards += 1
        successors = result.successors
        assert successors is not None
        assert result.verdicts[0].num_nodes == len(tree)
        ids, probs = (part.reshape(-1, successors.k) for part in (successors.token_ids, successors.probs))
        for row, found in enumerate(texts_of(text, tree, parents)):
            key = hash(tuple(found))
            if key not in self._known:
                self._known[key] = ids[row].copy(), probs[row].copy()
                self._new[key] = ids[row].tobytes(), probs[row].tobytes()
        if len(self._new) > 500:
            self.save()

    def _new_nodes(self, text: list[int], tree: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
        """The nodes whose texts are new, and their ancestors, as a tree."""
        wanted = [not self.has(found) for found in texts_of(text, tree, parents)[1:]]
        for node in reversed(range(len(tree))):
            if wanted[node] and parents[node] >= 0:
                wanted[parents[node]] = True
        index = {node: new for new, node in enumerate(np.flatnonzero(wanted).tolist())}
        return [tree[node] for node in index], [index.get(parents[node], -1) for node in index]

    def save(self) -> None:
        self._file.executemany(
            "insert or ignore into answers values (?, ?, ?)", [(k, *v) for k, v in self._new.items()]
        )
        self._file.commit()
        self._new.clear()


def texts_of(text: list[int], tree: list[int], parents: list[int]) -> list[list[int]]:
    """The text, and the text behind which each draft node stands, that node included."""
    texts = [text]
    for token, parent in zip(tree, parents, strict=True):
        texts.append([*texts[parent + 1], token])
    return texts


class SimulatedWorker:
    """A draft worker that proposes the target's own next token with probability `right`, and is `seconds` late."""

    def __init__(self, answers: Answers, right: float, claimed: float, seconds: float) -> None:
        self._answers, self._right, self._claimed, self._seconds = answers, right, claimed, seconds
        self._texts: dict[int, list[int]] = {}
        self.engine: LocalEngine | None = None  # the delay advances its clock

    def draft(self, batch: DraftBatch) -> DraftResult:
        seq_ids, trees = [], []
        for item in batch.items:
            delta = item.delta
            text = self._texts[delta.seq_id] = (
                self._texts.get(delta.seq_id, [])[: delta.start] + delta.token_ids.tolist()
            )
            if item.max_nodes:
                chain = self._chain(text, min(item.max_depth, item.max_nodes))
                confidence = self._claimed ** np.arange(1, len(chain) + 1)
                seq_ids.append(delta.seq_id)
                trees.append(DraftTree.chain(np.array(chain, np.int32), confidence))
        if seq_ids and self.engine is not None:
            self.engine._simulated_s += self._seconds
        return DraftResult(batch.round_id, seq_ids, trees)

    def _chain(self, text: list[int], count: int) -> list[int]:
        random_ = random.Random(hash(tuple(text)))
        chain: list[int] = []
        while len(chain) < count:
            if not self._answers.has([*text, *chain]):
                self._answers.compute([*text, *chain], [], [])
            chain.append(int(self._answers.next_tokens([*text, *chain])[0][0]))
            if random_.random() > self._right:
                chain[-1] ^= 1
                break
        return chain

    def clear(self) -> None:
        self._texts.clear()


class KnownTarget(ToyTarget):
    """Keeps sequences as an engine does, and predicts from `Answers`."""

    has_head = chain_only = False
    device = torch.device("cpu")

    def __init__(self, answers: Answers, vocab_size: int, row_steps: Sequence[int]) -> None:
        super().__init__(vocab_size, 8192, 16, 512, order=1 << 20)
        self.options, self.row_steps = EngineOptions(512), list(row_steps)
        self._answers = answers

    def next_token(self, tokens: Any) -> int:
        return int(self._answers.next_tokens(tokens)[0][0])

    def _walk(self, tokens: list[int], tree: list[int], parents: list[int]) -> tuple[list[int], int]:
        if not all(map(self._answers.has, texts_of(tokens, tree, parents))):
            self._answers.compute(tokens, tree, parents)
        return super()._walk(tokens, tree, parents)

    def _successors(self, verdicts: list[Verdict], count: int) -> Successors:
        rows = []
        for verdict in verdicts:
            if verdict.next_token >= 0:
                known = self._sequences[verdict.seq_id]
                rows += map(self._answers.next_tokens, texts_of(known.tokens, known.tree, known.parents))
        ids, probs = ([row[part][:count] for row in rows] for part in (0, 1))
        return Successors(np.array(ids, np.int32).reshape(-1), np.array(probs, np.float32).reshape(-1), count)

    def clear(self) -> None:
        self.lose_all()


def _identity_curves(only_several: bool) -> Callable[[Any], Any]:
    """Nodes of all sources, or of several sources only, keep their uncalibrated probability."""

    def wrap(merge: Any) -> Any:
        def merged(proposals: Any, limits: Any, calibration: Any, vocab_size: int) -> Any:
            count = calibration.num_sources
            kept = slice(count, None, 2 * count + 1) if only_several else slice(None)
            calibration.by_sources.curves["level"][kept] = KNOTS
            return merge(proposals, limits, calibration, vocab_size)

        return merged

    return wrap


def _without_exploration(set_budgets: Any) -> Any:
    def wrapped(self: Any, round: Any) -> None:
        round.traffic.explore_in = 1 << 30
        set_budgets(self, round)

    return wrapped


@dataclass(frozen=True)
class Variant:
    """The planner with some of its functions replaced, in some conditions."""

    replaced: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()
    profile_slope: float = 1.0  # of the profile that the engine begins with, by the true one
    worker_s: float | None = None  # a draft worker answers after so many seconds; None: there is none
    promises: bool = False  # the worker is right with a third of the probability that its confidence says
    base: str = "all"  # the variant that it is compared with

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrap in self.replaced:
                stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
            yield


def _variants() -> dict[str, Variant]:
    exploration = ((draft_choice.DraftChoice, "set_budgets", _without_exploration),)
    calibration = ((draft_choice, "merge_trees", _identity_curves(only_several=False)),)
    several = ((draft_choice, "merge_trees", _identity_curves(only_several=True)),)
    waits = ((DraftWait, "pays", lambda _: lambda self, num_emitting: True),)
    found = {
        "all": Variant(),
        "no calibration": Variant(calibration),
        "no curve for agreeing sources": Variant(several),
        "no exploration": Variant(exploration),
    }
    for caution in (1.0, 1.6, 2.0):
        found[f"row caution {caution:g}"] = Variant(((draft_choice, "_ROW_CAUTION", lambda _, own=caution: own),))
    for slope in (0.25, 4.0):
        base = f"all, profile x{slope:g}"
        found[base] = Variant(profile_slope=slope, base=base)
        found[f"no exploration, profile x{slope:g}"] = Variant(exploration, profile_slope=slope, base=base)
    for delay in (0.01, 0.05, 0.2):
        base = f"all, worker {delay:g} s"
        found[base] = Variant(worker_s=delay, base=base)
        found[f"no waits, worker {delay:g} s"] = Variant(waits, worker_s=delay, base=base)
    base = "all, worker promises too much"
    found[base] = Variant(worker_s=0.0, promises=True, base=base)
    for name, replaced in (("no calibration", calibration), ("no curve for agreeing sources", several)):
        found[f"{name}, {base[5:]}"] = Variant(replaced, worker_s=0.0, promises=True, base=base)
    return found


@dataclass(slots=True)
class Total:
    """Sums over the rounds after the prompts."""

    seconds: float = 0.0
    rounds: int = 0
    tokens: int = 0


class Replay:
    """One variant's engine on one set of prompts."""

    def __init__(
        self,
        variant: Variant,
        answers: Answers,
        drafters: list[str],
        batch_size: int,
        worker_right: float,
        row_ms: Sequence[tuple[int, float]],
    ) -> None:
        self._variant, self._batch_size = variant, batch_size
        row_steps = ROW_STEPS if row_ms == ROW_MS else ()
        self.total = Total()
        worker = None
        if variant.worker_s is not None:
            right = worker_right / 3 if variant.promises else worker_right
            worker = SimulatedWorker(answers, right, worker_right, variant.worker_s)

        def build_target(source: Any, options: Any, **rest: Any) -> Any:
            # Blocks of one token: the prefix cache then has every token that it has seen.
            answers.use(lambda: build_engine(source, options.model_copy(update={"block_size": 1}), **rest))
            return KnownTarget(answers, VOCAB_SIZE, row_steps)

        def profile(target: Any, runs: int = 1) -> list[tuple[int, float]]:
            return [(rows, 0.0) for rows, _ in row_ms]

        def make_core(target: WorkerInfo, *args: Any, **options: Any) -> RouterCore:
            first = target.step_times[0][1]
            wrong = [(rows, first + variant.profile_slope * (seconds - first)) for rows, seconds in target.step_times]
            return RouterCore(msgspec.structs.replace(target, step_times=wrong), *args, **options)

        build_engine = building.build_target_engine
        with variant.in_place(), ExitStack() as stack:
            stack.enter_context(patch.object(building, "build_target_engine", build_target))
            stack.enter_context(patch.object(offline, "warm_up", profile))
            stack.enter_context(patch.object(offline, "RouterCore", make_core))
            if worker is not None:
                stack.enter_context(patch.object(offline, "resolve_draft_model", lambda _, source, *rest: source))
                stack.enter_context(patch.object(building, "build_draft_engine", lambda *_, **options: worker))
                stack.enter_context(patch.object(building, "warm_up", lambda *_: None))
            self.engine = LocalEngine(
                "smollm2",
                drafters=drafters,
                batch_size=batch_size,
                kv_cache_tokens=8192,
                seconds_of_rows=StepTimeCurve([(rows, ms / 1e3) for rows, ms in row_ms], row_steps).seconds,
            )
        if worker is not None:
            worker.engine = self.engine

    def answer(self, prompts: list[Any], max_new_tokens: int) -> list[list[int]]:
        began: float | None = None

        def count(trace: RoundTrace) -> None:
            nonlocal began
            now = self.engine._simulated_s
            if began is None:
                began = now if trace.num_emitted else None
                return
            self.total.rounds += 1
            self.total.tokens += trace.num_emitted
            self.total.seconds += now - began
            began = now

        with self._variant.in_place():
            found = self.engine.generate(prompts, max_new_tokens=max_new_tokens, on_round=count)
        return [one.token_ids for one in found]


def spec_bench_prompts(directory: Path) -> list[str]:
    """Ten first turns of each task, the tasks in turn."""
    rows = pick_rows(read_bench_prompts(None, directory), 10)[0]
    return [row.messages[0]["content"] for (row,) in make_blocks(rows, 1)]


def made_up_prompts() -> list[str]:
    random_ = random.Random(0)
    things = ("lamp", "kettle", "bicycle", "radio", "backpack", "camera", "ladder", "printer", "tent", "blender")
    names = ("Amira", "Bruno", "Chloe", "Dmitri", "Elena", "Farid", "Grace", "Hiro", "Ines", "Jonas")
    fields = ("width", "height", "weight", "price", "speed", "volume")
    prompts = []
    for turn in range(15):
        first, second = random_.sample(fields, 2)
        program = f"class Item{turn}:\n    def __init__(self, {first}=0, {second}=0):\n"
        program += "".join(f"        self.{name} = {name}\n" for name in (first, second))
        program += f"\n    def double_{first}(self):\n        return 2 * self.{first}\n"
        thing, name = random_.choice(things), random_.choice(names)
        prompts += [
            f"Rename `{second}` to `{second}_total` in this program and write all of it again:\n\n{program}",
            f"Write a letter to {name} about order {random_.randint(1000, 9999)} of a {thing}: it will be"
            f" {random_.randint(2, 30)} days late. Apologise.",
            f"List {random_.randint(4, 8)} things to check before buying a {thing}, one a line.",
            f"Explain to {name} in two sentences how a {thing} works.",
        ]
    return prompts


def _row_ms(text: str) -> tuple[tuple[int, float], ...]:
    return tuple((int(rows), float(ms)) for rows, _, ms in (part.partition(":") for part in text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec-bench", type=Path, help="directory with question.jsonl")
    parser.add_argument("--answers", default="planner_ablation.sqlite", help="file of the target's predictions")
    parser.add_argument("--variants", nargs="+", default=list(_variants()))
    parser.add_argument("--sets", nargs="+", default=["spec-bench", "made up"])
    parser.add_argument("--drafters", nargs="+", default=["auto"])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=60, help="of each set")
    parser.add_argument("--worker-right", type=float, default=0.75)
    parser.add_argument("--row-ms", type=_row_ms, default=ROW_MS, help="ROWS:MS,...: times of another machine")
    arguments = parser.parse_args()
    answers = Answers(arguments.answers)
    variants = {name: _variants()[name] for name in arguments.variants}
    for name in arguments.sets:
        if name == "spec-bench" and arguments.spec_bench is None:
            print("spec-bench: left out, --spec-bench names no directory")
            continue
        prompts = made_up_prompts() if name == "made up" else spec_bench_prompts(arguments.spec_bench)
        prompts = prompts[: arguments.prompts]
        replays = {
            label: Replay(
                variant, answers, arguments.drafters, arguments.batch, arguments.worker_right, arguments.row_ms
            )
            for label, variant in variants.items()
        }
        for begin in range(0, len(prompts), arguments.batch):
            group: list[Any] = [[{"role": "user", "content": p}] for p in prompts[begin : begin + arguments.batch]]
            found = [replay.answer(group, arguments.max_new_tokens) for replay in replays.values()]
            assert all(one == found[0] for one in found), "the answers of two variants differ"
            print(f"\r{name}: {begin + len(group)} prompts, {answers.num_forwards} forwards", end="", flush=True)
        answers.save()
        print()
        for label, replay in replays.items():
            total, base = replay.total, replays.get(variants[label].base, replay).total
            print(
                f"{label:36} {total.seconds:8.2f} s {total.rounds:5} rounds"
                f" {total.tokens / total.rounds:6.3f} tokens a round"
                f" {total.seconds / total.tokens / (base.seconds / base.tokens) - 1:+7.2%}"
            )


if __name__ == "__main__":
    main()

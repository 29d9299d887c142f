"""Draft models as the only drafter: tokens a round and a CPU second, beside no drafts and `transformers` generate.

    python -m tests.bench.drafter_alone --spec-bench DIR --draft-model shipped=auto built=DIR --results FILE

Each draft model is measured as the planner decides, and forced: the planner is told that a forward of the target takes
a second whatever its rows, and that waiting for drafts pays, so that it has all drafts made and verified. Draft trees
have the default branches. Methods take turns prompt by prompt in one process, on one thread, with a model and a KV
cache each. Prompts are ten of each task of Spec-Bench and the sixty of `planner_ablation.py`, in turns; answers are
greedy and ignore the end token. All times are CPU seconds of the process, those that the planner measures, too.
Results are written after every prompt; a run that was stopped goes on from them. Texts that differ from those without
drafts are counted; in float32 only those of `generate` may.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from actors.home import paceline_home
from actors.models.catalog import resolve_model
from actors.models.loader import load_model, load_tokenizer
from cluster.cli.bench.measure import encode_prompt
from cluster.cli.bench.methods import GenerateMethod
from cluster.cli.bench.prompts import BenchPrompt, user_says
from cluster.offline.engine import LocalEngine
from cluster.router.draft_wait import DraftWait
from cluster.router.trace import RoundTrace
from tests.bench.planner_ablation import made_up_prompts, spec_bench_prompts

Row = dict[str, Any]  # what one method did with one prompt
Method = Callable[[list[int], int], Row]
PLAIN, GENERATE = "no drafts", "generate"


def engine_method(engine: LocalEngine) -> Method:
    def answer(prompt: list[int], count: int) -> Row:
        ends: list[float] = []
        rounds: list[tuple[int, int]] = []  # depth of the verified drafts, and accepted tokens

        def observe(trace: RoundTrace) -> None:
            if trace.num_emitted:
                ends.append(time.process_time())
                rounds.extend(trace.depths or [(0, 0)])

        began = time.process_time()
        (found,) = engine.generate([prompt], max_new_tokens=count, temperature=0.0, ignore_eos=True, on_round=observe)
        seconds = time.process_time() - began
        # The first round with a token is that of the prompt's end, which has no drafts.
        return {"tokens": found.token_ids, "s": seconds, "prompt_s": ends[0] - began, "rounds": rounds[1:]}

    return answer


def forced(method: Method) -> Method:
    """method: of an engine whose times are simulated."""

    def answer(prompt: list[int], count: int) -> Row:
        with patch.object(DraftWait, "pays", lambda self, num_emitting: True):
            return method(prompt, count)

    return answer


def generate_method(name: str, dtype: str) -> Method:
    source = resolve_model(name, paceline_home())
    method = GenerateMethod(GENERATE, load_model(source, dtype), load_tokenizer(source), eos_token_ids=())

    def answer(prompt: list[int], count: int) -> Row:
        began = time.process_time()
        (found,) = method.answer([prompt], count)
        return {"tokens": list(found.token_ids), "s": time.process_time() - began}

    return answer


def make_methods(model: str, dtype: str, draft_models: dict[str, str], depth: int) -> dict[str, Method]:
    common: dict[str, Any] = {"dtype": dtype, "batch_size": 1, "kv_cache_tokens": 4096}
    methods = {PLAIN: engine_method(LocalEngine(model, drafters=("none",), draft_model="none", **common))}
    for name, spec in draft_models.items():
        common |= {"drafters": ("draft_model",), "draft_model": spec, "gamma": depth}
        methods[name] = engine_method(LocalEngine(model, **common))
        simulated = LocalEngine(model, seconds_of_rows=lambda rows: 1.0, **common)
        methods[f"{name}, forced"] = forced(engine_method(simulated))
    return methods | {GENERATE: generate_method(model, dtype)}


def print_table(results: Iterable[Row]) -> None:
    """Ratios are to the prompts that the method answered, without drafts."""
    rows = {(row["set"], row["prompt"], row["method"]): row for row in results}
    for name, method in dict.fromkeys((key[0], key[2]) for key in rows):
        own = [row for key, row in rows.items() if (key[0], key[2]) == (name, method)]
        plain = [rows[name, row["prompt"], PLAIN] for row in own]
        speed, base = (sum(len(row["tokens"]) for row in part) / sum(row["s"] for row in part) for part in (own, plain))
        line = f"{name}, {method}: {len(own)} prompts, {speed:.2f} tokens a CPU second, {speed / base:.3f} of {PLAIN}"
        if method != GENERATE:
            rounds = [round for row in own for round in row["rounds"]]
            after = sum(len(row["tokens"]) - 1 for row in own)
            rest = after / sum(row["s"] - row["prompt_s"] for row in own)
            line += f"; after prompts {rest:.2f}, {after / max(1, len(rounds)):.3f} a round"
            drafted = [(depth, accepted) for depth, accepted in rounds if depth]
            line += f", {len(drafted)} of {len(rounds)} rounds with drafts"
            for depth in range(1, 1 + max((depth for depth, _ in drafted), default=0)):
                reached = [accepted for most, accepted in drafted if most >= depth]
                line += f", {sum(accepted >= depth for accepted in reached) / len(reached):.1%} of {len(reached)}"
        differ = sum(row["tokens"] != other["tokens"] for row, other in zip(own, plain, strict=True))
        print(line + f"; {differ} texts differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec-bench", type=Path, required=True, help="directory with question.jsonl")
    parser.add_argument("--draft-model", nargs="+", default=["shipped=auto"], metavar="NAME=MODEL")
    parser.add_argument("--results", type=Path, required=True, help="JSON file")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--depth", type=int, default=4, help="most tokens of a draft")
    parser.add_argument("--prompts", type=int, default=60, help="of each set")
    parser.add_argument("--generate", type=int, default=12, help="prompts of each set for generate of transformers")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    time.perf_counter = time.monotonic = time.process_time  # of the planner and the engines
    results: list[Row] = json.loads(arguments.results.read_text()) if arguments.results.exists() else []
    done = {(row["set"], row["prompt"]) for row in results}
    sets = {"Spec-Bench": spec_bench_prompts(arguments.spec_bench), "made up": made_up_prompts()}
    draft_models = dict(text.split("=", 1) for text in arguments.draft_model)
    methods = make_methods(arguments.model, arguments.dtype, draft_models, arguments.depth)
    tokenizer = load_tokenizer(resolve_model(arguments.model, paceline_home()))
    for answer in methods.values():  # compiles
        answer([100 + 7 * token for token in range(60)], 24)
    for index in range(arguments.prompts):
        for name, texts in sets.items():
            if (name, index) in done:
                continue
            prompt = encode_prompt(BenchPrompt("", "", user_says(texts[index])), tokenizer)
            order = [method for method in methods if method != GENERATE or index < arguments.generate]
            turn = index % len(order)
            found: dict[str, Row] = {}
            for method in [*order[turn:], *order[:turn]]:
                row = methods[method](prompt, arguments.max_new_tokens)
                found[method] = {"set": name, "prompt": index, "method": method, **row}
            results += [found[method] for method in order]
            arguments.results.write_text(json.dumps(results))
            texts_of_engine = [row["tokens"] for method, row in found.items() if method != GENERATE]
            same = all(text == texts_of_engine[0] for text in texts_of_engine)
            assert same or arguments.dtype != "float32", f"texts of prompt {index} of {name} differ"
    print_table(results)


if __name__ == "__main__":
    main()

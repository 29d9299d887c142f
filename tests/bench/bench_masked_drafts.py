"""What masks bring to the drafts of a draft model: calls of tools, with a draft model that draws within the grammar and
with one that does not.

    python tests/bench/bench_masked_drafts.py [--model smollm2] [--noise 0.2] [--requests 3] [--tokens 60]

The draft model is the model itself with noise of that many standard deviations on its weights. The planner is told row
times and the time of a draft, so what it chooses does not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from actors.draft_model.answer_grammars import AnswerGrammars
from actors.home import paceline_home
from actors.messages import DraftBatch, DraftResult
from actors.models.catalog import resolve_model
from cluster.cli.bench.tools_task import tool_prompts
from cluster.offline.engine import LocalEngine

DRAFT_S = 0.008


class ToldTimes(LocalEngine):
    def _ask_draft_model(self, worker_id: str, batch: DraftBatch) -> DraftResult | None:
        result = super()._ask_draft_model(worker_id, batch)
        return None if result is None else msgspec.structs.replace(result, elapsed_s=DRAFT_S)


def save_noisy(model: str, noise: float, directory: Path) -> None:
    source = resolve_model(model, paceline_home()).path
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    network.save_pretrained(directory)
    for path in source.iterdir():
        if "token" in path.name or path.name in ("vocab.json", "merges.txt"):
            shutil.copy(path, directory)


def told(given: argparse.Namespace, draft: Path, **options: Any) -> str:
    engine = ToldTimes(
        given.model, draft_model=str(draft), dtype="float32", device="cpu", kv_cache_tokens=16384,
        seconds_of_rows=lambda rows: 0.02 + 0.0015 * rows, **options,
    )  # fmt: skip
    tokens = rounds = nodes = 0
    accepted: Counter[str] = Counter()
    prompts = [prompt for prompt in tool_prompts() if prompt.task == "tools"][: 2 * given.requests : 2]
    for index, prompt in enumerate(prompts):
        assert prompt.constraint is not None
        outputs = {"json": prompt.constraint.json_schema}
        (answer,) = engine.generate(
            [list(prompt.messages)],
            max_new_tokens=given.tokens,
            temperature=0.7,
            seed=index,
            structured_outputs=outputs,
        )
        tokens, rounds, nodes = tokens + len(answer.token_ids), rounds + answer.rounds, nodes + answer.draft_tokens
        accepted.update(answer.accepted_tokens)
    return f"{tokens / rounds:.2f} tokens a round, {sum(accepted.values())} of {nodes} nodes accepted {dict(accepted)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--noise", type=float, default=0.2)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    masks = AnswerGrammars.masks
    with tempfile.TemporaryDirectory() as directory:
        save_noisy(given.model, given.noise, Path(directory))
        for acceptance, branch in (("coupled", 2), ("rejection", 1)):
            for drafters in (("draft_model",), ("draft_model", "grammar")):
                for way, found in (("free", lambda self, sequence, paths: None), ("masked", masks)):
                    AnswerGrammars.masks = found  # type: ignore[method-assign, assignment]
                    options = {"acceptance": acceptance, "branch": branch, "drafters": drafters}
                    print(
                        acceptance, "+".join(drafters), f"{way}:", told(given, Path(directory), **options), flush=True
                    )


if __name__ == "__main__":
    main()

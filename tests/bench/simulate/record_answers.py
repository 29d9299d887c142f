"""Records prompts and greedy answers of the demo model as token ids, for simulations over real texts.

    python -m tests.bench.simulate.record_answers SPEC_BENCH_DIRECTORY FILE.npz [--count 144] [--tokens 48] [--twice]

Prompts are chats of Spec-Bench of at most --longest tokens, tasks in turn. With --twice they come again, behind another
system prompt, so that there are more.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cluster.cli.bench.prompts import make_blocks, read_bench_prompts
from cluster.offline.engine import LocalEngine

ANOTHER_SYSTEM_PROMPT = {"role": "system", "content": "You are an expert. Be brief."}


def record(spec_bench: Path, file: Path, count: int, num_tokens: int, longest: int, twice: bool) -> None:
    engine = LocalEngine("smollm2", draft_model="none", device="cpu")
    prompts = []
    chats = [block[0].messages for block in make_blocks(read_bench_prompts(None, spec_bench), 1)]
    if twice:
        chats += [(ANOTHER_SYSTEM_PROMPT, *messages) for messages in chats]
    for messages in chats:
        told = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids = engine.tokenizer.encode(told, add_special_tokens=False)
        if len(token_ids) <= longest:
            prompts.append(token_ids)
        if len(prompts) == count:
            break
    print(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens", flush=True)
    made = engine.generate(
        prompts,
        max_new_tokens=num_tokens,
        ignore_eos=True,
        on_progress=lambda done, tokens: print(f"\r{done} answers, {tokens} tokens", end="", flush=True),
    )
    answers = [one.token_ids for one in made]
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        file,
        prompts=np.concatenate(prompts).astype(np.int32),
        answers=np.concatenate(answers).astype(np.int32),
        prompt_lengths=np.array(list(map(len, prompts)), np.int64),
        answer_lengths=np.array(list(map(len, answers)), np.int64),
    )
    print(f"\n{file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec_bench", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=144)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--twice", action="store_true")
    arguments = parser.parse_args()
    record(arguments.spec_bench, arguments.file, arguments.count, arguments.tokens, arguments.longest, arguments.twice)


if __name__ == "__main__":
    main()

"""Tokens a round of drafters that learn, in a replay of greedy answers, against the requests answered before.

    python tests/bench/bench_soft_ngram.py --answers answers.npz [--write] [--train 120] --plot learning.svg

--write lets the target answer Spec-Bench prompts (../shared/data/spec_bench beside the checkout), 24 and --train
others. It keeps the answers with the target's most probable tokens at every row; a run that was interrupted, or is
asked for more, goes on where the file ends. All answers are then drafted in order, from a cold start; the picture
shows tokens a round against requests seen.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from learning_plot import AnswerRounds, draw_learning, learning_curve, window_for

from actors.draft_tree import DraftTree
from actors.drafters.contract import MAX_CONTEXT, CpuDrafter, DraftContext, VerifiedRows
from actors.drafters.registry import create_drafter
from actors.messages import SamplingParams
from cluster.cli.bench.prompts import make_blocks, pick_rows, read_bench_prompts
from cluster.router.calibration import SourceCalibration
from cluster.router.merged_trees import Proposal, SequenceLimits, merge_trees
from cluster.router.planner import choose_nodes, tally_nodes

QUESTIONS = Path(__file__).resolve().parents[3] / "shared" / "data" / "spec_bench"
TESTS_PER_TASK = 4
SUCCESSORS = 8
VOCAB_SIZE = 1 << 20  # more than any
TABLE = 16 << 20  # bytes: enough for all these answers
SAMPLING = SamplingParams(seed=0)


SETS: dict[str, Callable[[], list[CpuDrafter]]] = {
    "suffix": lambda: [create_drafter("suffix")],
    "token_recycling": lambda: [create_drafter("token_recycling")],
    "soft_ngram": lambda: [create_drafter("soft_ngram", budget_bytes=TABLE)],
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt, the target's greedy answer, and what it thought at each of its tokens."""

    task: str
    prompt: np.ndarray  # int32 [p]
    token_ids: np.ndarray  # int32 [n]
    top_ids: np.ndarray  # int32 [n, k]: what could have stood there, most probable first
    top_probs: np.ndarray  # float32 [n, k]

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.token_ids])


def load_answers(file: Path) -> list[Answer]:
    with np.load(file, allow_pickle=False) as data:
        prompts = np.split(data["prompts"], np.cumsum(data["prompt_sizes"])[:-1])
        ends = np.cumsum(data["answer_sizes"])[:-1]
        columns = (np.split(data[name], ends) for name in ("token_ids", "top_ids", "top_probs"))
        return [Answer(str(task), *row) for task, *row in zip(data["tasks"], prompts, *columns, strict=True)]


def save_answers(file: Path, answers: list[Answer]) -> None:
    part = file.with_suffix(".part.npz")
    np.savez(
        part,
        tasks=np.array([answer.task for answer in answers]),
        prompt_sizes=np.array([len(answer.prompt) for answer in answers]),
        answer_sizes=np.array([len(answer.token_ids) for answer in answers]),
        prompts=np.concatenate([answer.prompt for answer in answers]),
        token_ids=np.concatenate([answer.token_ids for answer in answers]),
        top_ids=np.concatenate([answer.top_ids for answer in answers]),
        top_probs=np.concatenate([answer.top_probs for answer in answers]),
    )
    os.replace(part, file)


def write_file(file: Path, num_train: int, new_tokens: int, dtype: str, batch_size: int = 12) -> None:
    """Add to the file the answers it lacks: those to test with first."""
    import torch

    from actors.home import paceline_home
    from actors.models.catalog import resolve_model
    from actors.models.loader import load_model, load_tokenizer, read_model_info
    from actors.training.target_text import encode_prompts, write_answers

    answers = load_answers(file) if file.exists() else []
    tests, others = pick_rows(read_bench_prompts(None, QUESTIONS), TESTS_PER_TASK)
    others = [row for block in make_blocks(others, 2) for row in block]
    rows = [*tests, *others[:num_train]][len(answers) :]
    if not rows:
        return
    source = resolve_model("smollm2", paceline_home())
    tokenizer, model = load_tokenizer(source), load_model(source, dtype)
    head = model.get_output_embeddings()
    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        prompts = encode_prompts(tokenizer, [row.messages[0]["content"] for row in batch], 1024)
        # Prompts of like length answer together: the shorter ones are padded.
        order = sorted(range(len(batch)), key=lambda i: len(prompts[i]))
        ready: dict[int, Answer] = {}
        for half in (order[: len(order) // 2], order[len(order) // 2 :]):
            if not half:
                continue
            written = write_answers(
                model,
                [prompts[i] for i in half],
                [0.0] * len(half),
                new_tokens,
                read_model_info(source).eos_token_ids,
                0,
            )
            for i, answer in zip(half, written, strict=True):
                with torch.inference_mode():
                    top = torch.softmax(head(answer.hidden).float(), -1).topk(SUCCESSORS, -1)
                ready[i] = Answer(
                    batch[i].task,
                    np.array(prompts[i], np.int32),
                    answer.token_ids[answer.num_prompt_tokens :].numpy().astype(np.int32),
                    top.indices.numpy().astype(np.int32),
                    top.values.numpy().astype(np.float32),
                )
        answers += [ready[i] for i in range(len(batch))]
        save_answers(file, answers)
        print(f"{time.strftime('%X')} {len(answers)} answers written", flush=True)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the replay of an answer took."""

    tokens: int
    rounds: int
    nodes: int


def contexts_of(tokens: np.ndarray, begin: int, end: int) -> np.ndarray:
    """The contexts of what follows tokens[begin:end], int32 [end - begin, MAX_CONTEXT]."""
    padded = np.concatenate([np.full(MAX_CONTEXT - 1, -1, np.int32), tokens])
    return np.lib.stride_tricks.sliding_window_view(padded, MAX_CONTEXT)[begin:end]


def teach_prompt(learners: Sequence[CpuDrafter], prompt: np.ndarray) -> None:
    count = len(prompt) - 1
    token_ids, probs = np.zeros((count, SUCCESSORS), np.int32), np.zeros((count, SUCCESSORS), np.float32)
    token_ids[:, 0], probs[:, 0] = prompt[1:], 1.0
    for learner in learners:
        learner.remember(VerifiedRows("", contexts_of(prompt, 0, count), token_ids, probs))


def teach_answer(learners: Sequence[CpuDrafter], answer: Answer, begin: int, end: int) -> None:
    """What the target thought would be the answer's tokens begin to end."""
    before = len(answer.prompt) - 1
    contexts = contexts_of(answer.tokens, before + begin, before + end)
    for learner in learners:
        learner.remember(VerifiedRows("", contexts, answer.top_ids[begin:end], answer.top_probs[begin:end]))


def replay(drafters: Sequence[CpuDrafter], answers: Sequence[Answer], max_nodes: int) -> list[Replayed]:
    """Each answer starts from what the drafters know now."""
    calibration = SourceCalibration(len(drafters))
    return [replay_answer(copy.deepcopy(list(drafters)), calibration, answer, max_nodes) for answer in answers]


def replay_in_order(drafters: Sequence[CpuDrafter], answers: Sequence[Answer], max_nodes: int) -> list[Replayed]:
    """Each answer starts from what the drafters have learnt of all before it."""
    calibration = SourceCalibration(len(drafters))
    return [replay_answer(drafters, calibration, answer, max_nodes, i) for i, answer in enumerate(answers)]


def replay_answer(
    drafters: Sequence[CpuDrafter], calibration: SourceCalibration, answer: Answer, max_nodes: int, seq_id: int = 1
) -> Replayed:
    """Tokens a round when every row is free. Of the answer's own rows only those on the accepted path are learnt,
    because the others are unknown: serving learns more."""
    tokens = rounds = nodes = 0
    limits = SequenceLimits(
        np.array([max_nodes], np.int32), np.array([10_000], np.int32), np.empty(0, np.int32), np.zeros(2, np.int32)
    )
    learners = [drafter for drafter in drafters if drafter.num_successors]
    text, prompt = answer.tokens, len(answer.prompt)
    teach_prompt(learners, answer.prompt)
    teach_answer(learners, answer, 0, 1)
    known, size = 0, prompt + 1
    while size < len(text):
        context = DraftContext(seq_id, text[:size], known, prompt, max_nodes, SAMPLING)
        trees = [drafter.propose([context])[0] for drafter in drafters]
        proposals = [Proposal(0, source, tree) for source, tree in enumerate(trees) if len(tree)]
        merged, _ = merge_trees(proposals, limits, calibration, VOCAB_SIZE)
        chosen = choose_nodes(merged, limits.max_nodes, 1.0, 1.0, np.zeros(max_nodes + 1))
        drafted = DraftTree(*(chosen.nodes[field] for field in ("token_id", "parent", "probability")))
        path = accepted_path(drafted, text[size:])
        if proposals:
            is_accepted = np.zeros(len(chosen), np.bool_)
            is_accepted[path] = True
            tally_nodes(chosen, np.ones(len(chosen), np.bool_), is_accepted, calibration)
        calibration.end_round()
        known, size = size, min(size + len(path) + 1, len(text))
        teach_answer(learners, answer, known - prompt, size - prompt)
        tokens, rounds, nodes = tokens + size - known, rounds + 1, nodes + len(chosen)
    for drafter in drafters:
        drafter.forget(seq_id)
    return Replayed(tokens, rounds, nodes)


def accepted_path(tree: DraftTree, truth: np.ndarray) -> list[int]:
    """The nodes that spell the longest beginning of the truth that was drafted."""
    path: list[int] = []
    for token in truth:
        parent = path[-1] if path else -1
        child = np.flatnonzero((tree.parents == parent) & (tree.token_ids == token))
        if not len(child):
            break
        path.append(int(child[0]))
    return path


def plot_learning(answers: Sequence[Answer], max_nodes: int, file: Path) -> None:
    """All answers in order, tasks in turn, every set of drafters from a cold start; those that learn from other
    requests also as if there had been none."""
    in_turn = [answer for block in make_blocks(answers, 1) for answer in block]
    learners = ("soft_ngram", "token_recycling")
    warm = {name: _rounds(replay_in_order(SETS[name](), in_turn, max_nodes)) for name in (*learners, "suffix")}
    cold = {name: _rounds(replay(SETS[name](), in_turn, max_nodes)) for name in learners}
    num_tasks = len({answer.task for answer in answers})
    window = window_for(len(in_turn), num_tasks)
    print(f"tokens a round, {max_nodes} nodes, in the first and in the last {window} of {len(in_turn)} requests:")
    for title, curves in (("all before seen", warm), ("empty start", cold)):
        for name, taken in curves.items():
            found = learning_curve(taken, window).tokens_per_round
            print(f"{name:20}{title:18}{found[0]:8.3f}{found[-1]:8.3f}")
    draw_learning(warm, num_tasks, f"Replay of greedy answers, {max_nodes} draft tokens at most", file, cold)


def _rounds(replayed: Sequence[Replayed]) -> list[AnswerRounds]:
    return [AnswerRounds(one.tokens, one.rounds) for one in replayed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="file of answers to replay")
    parser.add_argument("--write", action="store_true", help="write the answers that the file lacks")
    parser.add_argument("--train", type=int, default=120, help="answers to write beside the first 24")
    parser.add_argument("--new-tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--dtype", default="float32", help="of the target that answers")
    parser.add_argument("--plot", type=Path, required=True, help="PNG or SVG of what is drafted as requests come in")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree at most")
    options = parser.parse_args()
    if options.write:
        write_file(options.answers, options.train, options.new_tokens, options.dtype)
    plot_learning(load_answers(options.answers), options.nodes, options.plot)


if __name__ == "__main__":
    main()

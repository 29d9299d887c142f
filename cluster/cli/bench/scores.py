"""Scores of answers against the references that benchmark rows carry. No model in here.

Decoding is lossless, so all drafters score alike but for rounding: a score tells how good the model is, and that
nothing was lost.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from actors.errors import InvalidRequest
from cluster.cli.bench.prompts import BenchPrompt

# A minus behind a digit or letter is a dash, as in 10-12.
_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\w)\.\d+)")
_ANSWER_MARKS = (
    re.compile(rf"the answer is(?:.*?)({_NUMBER.pattern})", re.DOTALL),
    re.compile(rf"####[ \t]*\$?({_NUMBER.pattern})"),  # else it is a heading of Markdown
)

Pairs = Sequence[tuple[str, str]]  # answer, reference


@dataclass(frozen=True, slots=True)
class Score:
    task: str
    metric: str
    value: float  # 0 to 100
    num_answers: int


def score_answers(prompts: Sequence[BenchPrompt], answers: Mapping[str, str]) -> tuple[Score, ...]:
    """By task and metric. answers: texts by the names of prompts; prompts that have none, or nothing to be scored
    against, are left out. Needs the packages that `check_scoring` looks for."""
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for prompt in prompts:
        if prompt.name in answers and can_be_scored(prompt):
            pairs.setdefault((prompt.task, _kind_of(prompt)), []).append((answers[prompt.name], prompt.reference))
    return tuple(
        Score(task, metric, 100.0 * value, len(own))
        for (task, kind), own in pairs.items()
        for metric, value in _METRICS[kind].measure(own).items()
    )


def can_be_scored(prompt: BenchPrompt) -> bool:
    metric = _METRICS.get(_kind_of(prompt))
    return metric is not None and metric.is_reference(prompt.reference)


def check_scoring(prompts: Sequence[BenchPrompt], option: str) -> None:
    """Raises InvalidRequest naming the option where there is nothing to score, or no package to score it with."""
    kinds = dict.fromkeys(_kind_of(prompt) for prompt in prompts if can_be_scored(prompt))
    if not kinds:
        limit = f"no row has a reference and one of the tasks {', '.join(_METRICS)}"
        raise InvalidRequest(option, True, limit)
    for kind in kinds:
        package = _METRICS[kind].package
        if package and importlib.util.find_spec(package) is None:
            limit = f"task {kind} needs {package.replace('_', '-')}; install Paceline with the extra [score]"
            raise InvalidRequest(option, True, limit)


def final_number(text: str) -> Decimal | None:
    """The number that an answer ends with: the first after "the answer is", or that at "####", else the last one."""
    lowered = text.lower()
    for mark in _ANSWER_MARKS:
        if marked := mark.search(lowered):
            return _value_of(marked[1])
    found = _NUMBER.findall(lowered)
    return _value_of(found[-1]) if found else None


def _value_of(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _exact_match(pairs: Pairs) -> dict[str, float]:
    """Numbers, not their spellings, are compared; an answer without one is wrong."""
    right = [(number := final_number(answer)) is not None and number == final_number(ref) for answer, ref in pairs]
    return {"exact match": sum(right) / len(right)}


def _rouge(pairs: Pairs) -> dict[str, float]:
    """F1 of words, pairs of words and longest common subsequence, without stemming (Lin 2004), the mean of all."""
    from rouge_score.rouge_scorer import RougeScorer

    names = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
    scorer = RougeScorer(list(names.values()))
    scored = [scorer.score(reference, answer) for answer, reference in pairs]
    return {name: sum(one[key].fmeasure for one in scored) / len(scored) for name, key in names.items()}


def _translation_scores(pairs: Pairs) -> dict[str, float]:
    """Of all answers as one corpus: BLEU (Papineni et al. 2002) on 13a tokens and chrF2 (Popović 2015), both as
    sacreBLEU (Post 2018) has them by default."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    answers = [" ".join(answer.split()) for answer, _ in pairs]
    references = [[reference for _, reference in pairs]]
    metrics = {"BLEU": BLEU(), "chrF": CHRF()}
    return {name: metric.corpus_score(answers, references).score / 100.0 for name, metric in metrics.items()}


@dataclass(frozen=True, slots=True)
class _Metric:
    measure: Callable[[Pairs], dict[str, float]]  # of one pair or more; values 0 to 1
    package: str = ""  # that it needs beside Paceline's own
    is_reference: Callable[[str], bool] = lambda text: bool(text.strip())


_NUMBERS = _Metric(_exact_match, is_reference=lambda text: final_number(text) is not None)
_SUMMARIES = _Metric(_rouge, "rouge_score")
_TRANSLATIONS = _Metric(_translation_scores, "sacrebleu")
_METRICS = {
    "gsm8k": _NUMBERS,
    "math_reasoning": _NUMBERS,
    "cnn_dm": _SUMMARIES,
    "summarization": _SUMMARIES,
    "wmt16": _TRANSLATIONS,
    "translation": _TRANSLATIONS,
}


def _kind_of(prompt: BenchPrompt) -> str:
    return prompt.benchmark or prompt.task

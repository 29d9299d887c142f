"""Prompts on many subjects, for the text that a draft model is fitted on.

Templates filled with the texts of seed_texts.json, in the proportions of mixed assistant traffic. None is from a
benchmark.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from actors.errors import ModelError

_TEXTS = json.loads(Path(__file__).with_name("seed_texts.json").read_text(encoding="utf-8"))
_TOPICS = _TEXTS["topics"]
_PEOPLE = _TEXTS["people"]
_PLACES = _TEXTS["places"]
_PERSONAS = _TEXTS["personas"]
_NAMES = _TEXTS["names"]
_GOODS = _TEXTS["goods"]
_TASKS = _TEXTS["tasks"]
_QUESTIONS = _TEXTS["questions"]
_EVENTS = _TEXTS["events"]
_FOREIGN = _TEXTS["foreign"]
_CODE_LANGUAGES = _TEXTS["code_languages"]


def built_in_prompts(seed: int = 0) -> Iterator[str]:
    """An endless, reproducible stream of user prompts."""
    rng = random.Random(seed)
    kinds = (
        [_question] * 3 + [_explain] * 4 + [_write] * 3 + [_roleplay] + [_arithmetic] * 4 + [_code] * 3
        + [_translate] * 3 + [_summarise] * 4 + [_extract]
    )  # fmt: skip
    while True:
        deck = list(kinds)
        rng.shuffle(deck)
        for kind in deck:
            yield kind(rng)


def read_prompts(path: Path) -> list[str]:
    """User prompts from a JSON-lines file: each line a string, or an object with `prompt` or `turns` (first turn).

    Raises ModelError with file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() also breaks inside texts
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ModelError(f"{path}:{number}: not JSON") from None
        if isinstance(value, dict):
            turns = value.get("turns")
            value = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
        if not isinstance(value, str) or not value.strip():
            raise ModelError(f"{path}:{number}: must be a string, or an object with a text under prompt or turns")
        prompts.append(value)
    if not prompts:
        raise ModelError(f"{path}: holds no prompts")
    return prompts


def _question(rng: random.Random) -> str:
    frame = rng.choice(("{}", "{}", "Answer briefly: {}", "{} Explain your answer."))
    other = rng.choice(
        ("What are three facts about {}?", "Who is most associated with {}?", "Where can I learn about {}?")
    )
    question = rng.choice(_QUESTIONS) if rng.random() < 0.6 else other.format(rng.choice(_TOPICS))
    return frame.format(question)


def _explain(rng: random.Random) -> str:
    frame = rng.choice(
        (
            "Explain {} to a ten-year-old.",
            "How does {} affect everyday life? Give examples.",
            "What are the main advantages and disadvantages of {}?",
            "Give a short history of {}.",
            "List five surprising facts about {}.",
            "What is the relationship between {} and {}?",
            "Compare {} and {} in a few paragraphs.",
            "What do experts disagree about when it comes to {}?",
            "Describe step by step how someone could start to study {}.",
        )
    )
    return frame.format(*rng.sample(_TOPICS, 2))


def _write(rng: random.Random) -> str:
    return rng.choice(
        (
            f"Write a short story about {rng.choice(_PEOPLE)} and {rng.choice(_TOPICS)}.",
            f"Write a poem about {rng.choice(_TOPICS)} in the style of a folk song.",
            f"Draft a polite e-mail to a colleague asking for help with a report on {rng.choice(_TOPICS)}.",
            f"Write a blog post about a week in {rng.choice(_PLACES)}, with food, people and sights.",
            f"Write the opening paragraph of a novel set in {rng.choice(_PLACES)} with {rng.choice(_PEOPLE)}.",
            f"Outline a speech about {rng.choice(_TOPICS)} for a school audience.",
            f"Write a product review of a book about {rng.choice(_TOPICS)}.",
            f"Describe a character who is {rng.choice(_PEOPLE)}, in vivid detail.",
        )
    )


def _roleplay(rng: random.Random) -> str:
    return rng.choice(
        (
            f"Pretend to be {rng.choice(_PERSONAS)}. What do you think about {rng.choice(_TOPICS)}?",
            f"You are {rng.choice(_PERSONAS)}. Tell me about your typical day.",
            f"Speak like {rng.choice(_PERSONAS)} and give me advice on {rng.choice(_TOPICS)}.",
        )
    )


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randint(3, 60), rng.randint(2, 12), rng.randint(2, 9)
    name, other = rng.sample(_NAMES, 2)
    goods = rng.choice(_GOODS)
    return rng.choice(
        (
            f"{name} has {a} {goods}. {other} gives {name} {b} times as many. How many {goods} does {name} have now?",
            f"A box of {goods} costs ${b}. {name} buys {c} boxes and pays with ${b * c + a}. How much change is due?",
            f"{name} earns ${a} an hour, {b} hours a day, {c} days a week. What does {name} earn in four weeks?",
            f"A train travels {a * 5} km in {c} hours. How far does it go in {b} hours at the same speed?",
            f"{name} reads {a} pages on Monday, twice as many on Tuesday and {b} fewer on Wednesday than on Tuesday. "
            f"How many pages is that in all?",
            f"There are {a * c} {goods}. {name} takes a third of them and {other} takes {b}. How many are left?",
            f"What is the area of a rectangle that is {a} cm long and {b} cm wide?",
            f"Solve for x: {c}x + {b} = {c * a + b}. Show the steps.",
            f"If a shirt costs ${a} and the price falls by {b * 5} %, what is the new price?",
        )
    )


def _code(rng: random.Random) -> str:
    language, task = rng.choice(_CODE_LANGUAGES), rng.choice(_TASKS)
    return rng.choice(
        (
            f"Write a {language} program that {task}.",
            f"Write a function in {language} that {task}, with comments.",
            f"How would you write {language} code that {task}? Explain each step.",
            f"Write unit tests in {language} for code that {task}.",
        )
    )


def _translate(rng: random.Random) -> str:
    language, sentence = rng.choice(_FOREIGN)
    return rng.choice((f"Translate {language} to English: {sentence}", f"Translate this into English: {sentence}"))


def _passage(rng: random.Random) -> str:
    events = rng.sample(_EVENTS, rng.choice((1, 1, 2, 3)))
    return " ".join(
        event.format(place=rng.choice(_PLACES), count=rng.randint(12, 48), name=rng.choice(_NAMES)) for event in events
    )


def _summarise(rng: random.Random) -> str:
    return rng.choice(
        (
            f"Summarize: {_passage(rng)}",
            f"{_passage(rng)}\n\nSummarize the text above in two sentences.",
            f"{_passage(rng)}\n\nWho is affected, and how?",
            f"Read the following and answer the question. {_passage(rng)}\nQuestion: What happens next, and why?",
        )
    )


def _extract(rng: random.Random) -> str:
    return rng.choice(
        (
            f"List every place and number in this text as JSON: {_passage(rng)}",
            f"Is the tone of this report positive, negative or neutral? Explain. {_passage(rng)}",
            f"Rewrite in simpler words: {_passage(rng)}",
        )
    )

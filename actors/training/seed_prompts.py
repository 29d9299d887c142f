"""Prompts that make a target model talk about many things: text to fit its draft model on.

Templates times fillers, in the proportions of mixed assistant traffic. No text of any benchmark is in here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from actors.errors import ModelError


def _items(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split("|"))


_TOPICS = _items(
    """
    the water cycle | photosynthesis | the French Revolution | black holes | the stock market | chess openings |
    sourdough bread | electric cars | the Roman Empire | volcanoes | machine learning | the human heart | jazz music
    | coral reefs | inflation | solar panels | the Silk Road | vaccines | plate tectonics | democracy | coffee | the
    Great Wall of China | sleep | honey bees | the internet | Shakespeare | the Amazon rainforest | bridges |
    antibiotics | the moon landing | public transport | chocolate | the Cold War | glaciers | time management | the
    violin | supply and demand | earthquakes | DNA | the Renaissance | wind power | yoga | the printing press |
    football | ocean currents | stress | the periodic table | urban gardening | the Vikings | memory | climate
    change | sharks | the Olympic Games | nutrition | steam engines | penguins | taxes | poetry | gravity | ancient
    Egypt | robots | the immune system | tea | the Industrial Revolution | rainbows | languages | batteries |
    mountain climbing | whales | money | the solar system | dreams | recycling | castles | photography | mathematics
    | migration of birds | friendship | nuclear energy | maps
    """
)
_PEOPLE = _items(
    """
    a tired teacher | a young sailor | two old friends | a curious robot | a lighthouse keeper | a village doctor |
    a lost dog | a detective in Lisbon | a shy dragon | a famous chef | an astronaut | a librarian | a retired boxer
    | a street musician | a girl who talks to birds | a clockmaker | a nurse on night shift | a farmer in a dry year
    """
)
_PLACES = _items(
    """
    Kyoto | Iceland | Morocco | the Scottish Highlands | New York | Peru | Venice | Cape Town | Norway | Istanbul |
    Vietnam | Costa Rica | Berlin | the Greek islands | Mexico City | New Zealand | Prague | India
    """
)
_PERSONAS = _items(
    """
    a pirate captain | a medieval knight | a strict grammar teacher | a friendly barista | Isaac Newton | a sports
    commentator | a travel guide | a wise grandmother | a science fiction author | a museum director | a start-up
    founder | a gardener
    """
)
_NAMES = _items(
    """
    Anna | Ben | Carla | David | Ella | Farid | Grace | Hugo | Ines | Jonas | Kira | Leo | Mina | Noah | Olga | Paul
    | Rosa | Sam | Tara | Victor
    """
)
_GOODS = _items(
    """
    apples | books | tickets | pencils | cookies | stamps | marbles | eggs | chairs | bottles of juice | flowers |
    toy cars
    """
)
_TASKS = _items(
    """
    reverses a string | finds the largest number in a list | checks whether a word is a palindrome | computes
    factorials | counts the vowels in a text | merges two sorted lists | removes duplicates from a list | sorts a
    dictionary by value | reads a CSV file and sums a column | prints the first n Fibonacci numbers | checks whether
    a number is prime | converts Celsius to Fahrenheit | finds the longest word in a sentence | implements a stack |
    implements binary search | counts words in a file | flattens a nested list | generates a random password |
    validates an e-mail address | downloads a web page | computes the greatest common divisor | transposes a matrix
    | groups anagrams | parses a date
    """
)
_CODE_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C++", "SQL", "Rust")
_QUESTIONS = _items(
    """
    Who invented the telephone? | What is the capital of Australia? | When did the Second World War end? | Why is
    the sky blue? | How many bones does an adult have? | Who painted the Mona Lisa? | What is the tallest mountain?
    | Where does the Nile begin? | What language is spoken in Brazil? | Who wrote the Odyssey? | What causes tides?
    | Which planet has the most moons? | How long does light take from the sun to the earth? | What is the boiling
    point of water? | Who was the first woman in space? | When was the Eiffel Tower built? | What is the largest
    desert on earth? | How does a refrigerator work? | What do pandas eat? | Who discovered penicillin? | What is
    the currency of Japan? | Which metal is liquid at room temperature? | Where was Mozart born? | What is the
    meaning of the word ephemeral? | How many players are on a basketball team? | What is the speed of sound? | Who
    sang the theme of the film? | What is the smallest country in the world? | When did the Berlin Wall fall? | Who
    plays the doctor in the series?
    """
)
_FOREIGN = (
    ("German", "Der Zug nach Hamburg hat heute eine Stunde Verspätung, weil ein Baum auf die Gleise gefallen ist."),
    ("German", "Die Regierung will die Steuern für kleine Unternehmen im nächsten Jahr senken."),
    ("German", "Viele Menschen ziehen aufs Land, weil die Mieten in den Städten stark gestiegen sind."),
    ("German", "Der Verein verlor das letzte Spiel der Saison mit zwei zu drei und bleibt auf dem vierten Platz."),
    ("German", "Forscher haben im Süden des Landes die Reste eines alten Tempels gefunden."),
    ("German", "Nach dem Sturm waren tausende Haushalte ohne Strom, sagte ein Sprecher der Polizei."),
    ("German", "Die neue Brücke soll im Herbst eröffnet werden und kostet doppelt so viel wie geplant."),
    ("German", "Meine Schwester arbeitet seit zehn Jahren als Ärztin in einem kleinen Krankenhaus."),
    ("German", "Das Museum zeigt bis Ende März Bilder junger Künstler aus ganz Europa."),
    ("German", "Der Präsident traf sich am Montag mit Vertretern der Opposition in der Hauptstadt."),
    ("German", "Experten warnen davor, dass der Preis für Weizen weiter steigen könnte."),
    ("German", "Am Abend saßen wir am See und sahen zu, wie die Sonne hinter den Bergen verschwand."),
    ("German", "Die Firma entlässt fast ein Drittel ihrer Mitarbeiter und schließt zwei Werke."),
    ("German", "Wer früh bucht, bekommt die Karten für das Konzert deutlich billiger."),
    ("French", "Le marché du village ouvre chaque samedi matin à huit heures."),
    ("French", "Les étudiants demandent plus de professeurs et des salles moins bruyantes."),
    ("French", "Il a plu toute la nuit, mais le ciel est clair ce matin."),
    ("Spanish", "Mi abuelo me enseñó a pescar cuando yo tenía seis años."),
    ("Spanish", "El hospital nuevo atenderá a más de mil pacientes cada día."),
    ("Spanish", "La película cuenta la historia de dos hermanos que vuelven a su pueblo."),
    ("Italian", "La biblioteca resta aperta fino a mezzanotte durante gli esami."),
    ("Italian", "Il treno per Napoli parte dal binario sette."),
)
_EVENTS = _items(
    """
    The city council of {place} voted on Tuesday to close the old harbour road to cars from next spring. Shop owners
    fear for their trade, while residents hope for cleaner air. The mayor said that a free shuttle bus would run
    every ten minutes and that the plan would be reviewed after a year. | A storm crossed {place} overnight, tearing
    roofs from houses and leaving thousands without power. Rescue teams brought {count} people to safety, officials
    said on Friday. Schools stay closed until Monday, and trains run on two lines only. Meteorologists expect calmer
    weather by the weekend. | {name} Keller, a {count}-year-old runner from {place}, won the national marathon on
    Sunday in heavy rain. It was her third victory in a row. 'The last five kilometres were the hardest of my life,'
    she told reporters, before thanking her coach and the volunteers along the course. | Researchers in {place} have
    built a battery that charges in {count} minutes and lasts for ten years, according to a study published this
    week. The cell uses sodium instead of lithium, which is cheaper and easier to find. The team warned that mass
    production is still several years away. | Police in {place} are looking for two men who stole {count} paintings
    from a private house late on Wednesday. The works are said to be worth more than three million euros. A
    neighbour saw a white van shortly before midnight. Nobody was hurt, and the owner has offered a reward.
    """
)


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

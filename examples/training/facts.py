"""A grammar of short passages about people, things and rooms, with questions whose answers are spans of the passage.

A passage has some sentences, each about another person and another thing. The question names the person or the thing and asks for a part
of the same sentence. Every question has exactly one answer, so a perfect model finds all spans.
"""

from __future__ import annotations

import random

from training.step_sets import Question

PEOPLE = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Karin",
    "Leo",
    "Maria",
    "Nils",
    "Olga",
    "Paul",
]
THINGS = [
    "lamp",
    "chair",
    "book",
    "kettle",
    "violin",
    "basket",
    "mirror",
    "blanket",
    "ladder",
    "clock",
    "bottle",
    "camera",
    "pillow",
    "hammer",
    "candle",
    "suitcase",
]
COLOURS = ["red", "green", "blue", "yellow", "old", "small", "heavy", "broken"]
ROOMS = ["kitchen", "garden", "cellar", "attic", "office", "hall", "library", "garage", "bathroom", "workshop"]
TIMES = ("in the morning", "at noon", "after lunch", "in the evening", "before the rain came", "last night")
SENTENCES = (
    "{person} carried {thing} to {room} {time} .",
    "{time} {person} left {thing} in {room} .",
    "{thing} was taken to {room} by {person} {time} .",
    "{person} forgot {thing} in {room} , and nobody noticed it .",
)
QUESTIONS = {
    "what did {person} move ?": "thing",
    "where is the {noun} ?": "room",
    "who moved the {noun} ?": "person",
    "where did {person} go ?": "room",
}
FACTS = range(2, 6)


def question(generator: random.Random) -> Question:
    """Return a random passage with a question."""
    count = generator.choice(FACTS)
    people, nouns = generator.sample(PEOPLE, count), generator.sample(THINGS, count)
    facts = [_fact(generator, person, noun) for person, noun in zip(people, nouns, strict=True)]
    asked = generator.randrange(count)
    text, part = generator.choice(list(QUESTIONS.items()))
    words: list[str] = []
    span = (0, 0)
    for index, (sentence, fact) in enumerate(facts):
        for word in sentence.split():
            filled = word.format(**fact).split()
            if index == asked and word == f"{{{part}}}":
                span = (len(words), len(words) + len(filled) - 1)
            words += filled
    return Question(text.format(person=people[asked], noun=nouns[asked]), " ".join(words), *span)


def _fact(generator: random.Random, person: str, noun: str) -> tuple[str, dict[str, str]]:
    """Return a sentence with the values of its parts."""
    colour, room, time = generator.choice(COLOURS), generator.choice(ROOMS), generator.choice(TIMES)
    parts = {"person": person, "thing": f"the {colour} {noun}", "room": f"the {room}", "time": time}
    return generator.choice(SENTENCES), parts

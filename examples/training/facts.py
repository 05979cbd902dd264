"""A grammar of short passages about people, things and rooms: passages as text, with tags of their words, or with questions.

A passage has some sentences, each about another person and another thing. A question names the person or the thing of a sentence and asks
for a part of the same sentence. Every question has exactly one answer, so a perfect model finds all spans.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.step_sets import Question, TaggedWords

# fmt: off
PEOPLE = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karin", "Leo", "Maria", "Nils",
    "Olga", "Paul",
)
THINGS = (
    "lamp", "chair", "book", "kettle", "violin", "basket", "mirror", "blanket", "ladder", "clock", "bottle", "camera",
    "pillow", "hammer", "candle", "suitcase",
)
COLOURS = (
    "red", "green", "blue", "yellow", "old", "small", "heavy", "broken",
)
ROOMS = (
    "kitchen", "garden", "cellar", "attic", "office", "hall", "library", "garage", "bathroom", "workshop",
)
# fmt: on
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
OTHER = "other"


@dataclass(frozen=True)
class Passage:
    """people, nouns: of each sentence. places: the sentence and the part of each word."""

    people: list[str]
    nouns: list[str]
    words: list[str]
    places: list[tuple[int, str]]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def tagged(self) -> TaggedWords:
        """The words, each with the part of the sentence to which it belongs."""
        return TaggedWords(self.words, [part for _, part in self.places])


def passage(generator: random.Random) -> Passage:
    count = generator.choice(FACTS)
    people, nouns = generator.sample(PEOPLE, count), generator.sample(THINGS, count)
    words: list[str] = []
    places: list[tuple[int, str]] = []
    for number, (person, noun) in enumerate(zip(people, nouns, strict=True)):
        colour, room, time = generator.choice(COLOURS), generator.choice(ROOMS), generator.choice(TIMES)
        parts = {"{person}": person, "{thing}": f"the {colour} {noun}", "{room}": f"the {room}", "{time}": time}
        for piece in generator.choice(SENTENCES).split():
            filled = parts.get(piece, piece).split()
            words += filled
            places += [(number, piece.strip("{}") if piece in parts else OTHER)] * len(filled)
    return Passage(people, nouns, words, places)


def question(generator: random.Random) -> Question:
    """Return a random passage with a question."""
    made = passage(generator)
    asked = generator.randrange(len(made.people))
    text, part = generator.choice(list(QUESTIONS.items()))
    span = [index for index, place in enumerate(made.places) if place == (asked, part)]
    return Question(text.format(person=made.people[asked], noun=made.nouns[asked]), made.text, span[0], span[-1])

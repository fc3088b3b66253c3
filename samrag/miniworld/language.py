"""The mini world's English: how facts become documents, questions and captions, and how they are read back. Pure.

Every form has an inverse here, so that the oracle can work from the text it is shown, not from the truth behind it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from samrag.miniworld.world import COLOURS, COUNTS, JOBS, SHAPES, SPORTS, TOWNS, YEARS, Club, Emblem

EMBLEM = " emblem"


class Relation(StrEnum):
    """What a question asks of a club. The value is the word that names it in reasoning."""

    SPORT = "sport"
    TOWN = "town"
    YEAR = "year"
    JOB = "job"
    HOME = "home"
    BACKGROUND = "background"
    COLOUR = "colour"
    SHAPE = "shape"
    COUNT = "count"


TEXT_RELATIONS = (Relation.SPORT, Relation.TOWN, Relation.YEAR)
BRIDGE_RELATIONS = (Relation.JOB, Relation.HOME)
IMAGE_RELATIONS = (Relation.BACKGROUND, Relation.COLOUR, Relation.SHAPE, Relation.COUNT)

VALUES: dict[Relation, tuple[str, ...]] = {
    Relation.SPORT: SPORTS,
    Relation.TOWN: TOWNS,
    Relation.YEAR: YEARS,
    Relation.JOB: JOBS,
    Relation.HOME: TOWNS,
    Relation.BACKGROUND: COLOURS,
    Relation.COLOUR: COLOURS,
    Relation.SHAPE: SHAPES,
    Relation.COUNT: COUNTS,
}

QUESTIONS: dict[Relation, tuple[str, ...]] = {
    Relation.SPORT: ("Which sport do the {} play?", "What is the sport of the {}?"),
    Relation.TOWN: ("In which town do the {} play?", "What is the town of the {}?"),
    Relation.YEAR: ("In which year did the {} begin?", "When did the {} begin?"),
    Relation.JOB: ("What was the job of the founder of the {}?", "Which job had the founder of the {}?"),
    Relation.HOME: ("What was the home of the founder of the {}?", "In which home town lived the founder of the {}?"),
    Relation.BACKGROUND: (
        "What is the background of the emblem of the {}?",
        "Which background has the emblem of the {}?",
    ),
    Relation.COLOUR: (
        "Which colour is on the emblem of the {}?",
        "What is the colour of the shapes on the emblem of the {}?",
    ),
    Relation.SHAPE: ("Which shape is on the emblem of the {}?", "What is the shape on the emblem of the {}?"),
    Relation.COUNT: (
        "How many shapes are on the emblem of the {}?",
        "What is the count of shapes on the emblem of the {}?",
    ),
}
_QUESTION_PATTERNS = [
    (relation, re.compile(re.escape(form).replace(r"\{\}", "(.+)")))
    for relation, forms in QUESTIONS.items()
    for form in forms
]


def ask(relation: Relation, club_name: str, form: int) -> str:
    """Put a question into words."""
    return QUESTIONS[relation][form % len(QUESTIONS[relation])].format(club_name)


def understand(question: str) -> tuple[Relation, str] | None:
    """Inverse of `ask`: the relation and the club's name; None when it is no question of this world."""
    for relation, pattern in _QUESTION_PATTERNS:
        if match := pattern.fullmatch(question.strip()):
            return relation, match[1]
    return None


def club_text(club: Club) -> str:
    """The club's paragraph: the bridge for questions about its founder."""
    return (
        f"The sport is {club.sport}, the town is {club.town}, the year is {club.year}, "
        f"the founder is {club.founder.name}."
    )


def founder_text(club: Club) -> str:
    """The founder's paragraph: names the club by its last word only."""
    return f"The club is the {club.short_name}, the job is {club.founder.job}, the home is {club.founder.home}."


def describe(emblem: Emblem) -> str:
    """A full description, as a question-specific caption gives it."""
    return (
        f"The background is {emblem.background}, the colour is {emblem.colour}, "
        f"the shape is {emblem.shape}, the count is {emblem.count}."
    )


def raw_caption(emblem: Emblem) -> str:
    """A caption made without a question: it leaves out what nobody asked for (SAM-RAG, section 3.4.1)."""
    return f"An emblem with {emblem.shape}."


_CLUB_TEXT = re.compile(
    r"The sport is (?P<sport>\w+), the town is (?P<town>\w+), the year is (?P<year>\d+), "
    r"the founder is (?P<founder>.+)\."
)
_FOUNDER_TEXT = re.compile(r"The club is the (?P<short>\w+), the job is (?P<job>\w+), the home is (?P<home>\w+)\.")
_DESCRIPTION = re.compile(
    r"The background is (?P<background>\w+), the colour is (?P<colour>\w+), "
    r"the shape is (?P<shape>\w+), the count is (?P<count>\w+)\."
)


class Source(StrEnum):
    """What kind of document a passage is."""

    CLUB = "club"
    FOUNDER = "founder"
    EMBLEM = "emblem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a passage says: its kind, the name it is about, and its facts."""

    source: Source
    subject: str
    """The club's full name, or for a founder's text the club's last word; empty when unknown."""
    facts: dict[str, str]


def read_passage(title: str, text: str) -> Reading:
    """Read a passage of this world back into facts; anything else is UNKNOWN."""
    if title.endswith(EMBLEM):
        match = _DESCRIPTION.search(text)
        return Reading(Source.EMBLEM, title.removesuffix(EMBLEM), match.groupdict() if match else {})
    if match := _CLUB_TEXT.fullmatch(text):
        return Reading(Source.CLUB, title, match.groupdict())
    if match := _FOUNDER_TEXT.fullmatch(text):
        return Reading(Source.FOUNDER, match["short"], match.groupdict())
    return Reading(Source.UNKNOWN, "", {})

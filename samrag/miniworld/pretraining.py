"""Examples that teach the tiny LLaVA what any general VLM can do: copy, compare, caption, read, answer. Pure.

Questions that the content does not answer are answered "not stated". No verdicts: judging relevance, use and support is
what the adapter learns from the teacher. Facts are drawn anew for each example, so nothing can be learnt by heart;
names come from the pretraining pool only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from samrag.calls import Call, CallKind, Passage
from samrag.miniworld.language import (
    BRIDGE_RELATIONS,
    EMBLEM,
    IMAGE_RELATIONS,
    TEXT_RELATIONS,
    VALUES,
    Relation,
    ask,
    club_text,
    describe,
    founder_text,
)
from samrag.miniworld.oracle import asked, compare, judged_line, read_passage, reply, sort_of
from samrag.miniworld.world import (
    ANIMALS,
    COLOURS,
    COUNTS,
    FIRST_NAMES,
    JOBS,
    LAST_NAMES,
    PLACES,
    SHAPES,
    SPORTS,
    TOWNS,
    YEARS,
    Club,
    Emblem,
    Founder,
    Split,
    draw_emblem_facts,
    name_pool,
)
from samrag.prompts import PromptStyle, render
from samrag.replies import NOT_STATED, write

PASSAGES = {1: 38, 2: 22, 3: 14, 4: 9, 5: 6, 6: 5, 7: 3, 8: 3}
"""How often a context has so many documents, in per cent: long ones are rare, and so are read less well."""
MAX_PASSAGES = max(PASSAGES)
_WORDS = (
    *COLOURS, *COUNTS, *JOBS, *SHAPES, *SPORTS, *TOWNS, *YEARS, *Relation,
    "True", "False", "Partial", "yes", "no", "same", "other", "nothing",
    "document", "question", "answer", "founder", "club", "emblem",
)  # fmt: skip
_LIST = (*PLACES, *ANIMALS, *FIRST_NAMES, *LAST_NAMES, *_WORDS)


@dataclass(frozen=True, slots=True)
class Example:
    """One pretraining example."""

    task: str
    prompt: str
    target: str
    emblem: Emblem | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """The names an example may use."""

    clubs: Sequence[str]
    people: Sequence[str]

    @classmethod
    def of(cls, split: Split) -> Names:
        """All names of a split's pool."""
        return cls(name_pool(split, PLACES, ANIMALS), name_pool(split, FIRST_NAMES, LAST_NAMES))


def _club(rng: random.Random, names: Names, name: str) -> Club:
    founder = Founder(rng.choice(names.people), rng.choice(JOBS), rng.choice(TOWNS))
    return Club(name, rng.choice(SPORTS), rng.choice(TOWNS), rng.choice(YEARS), founder, True, draw_emblem_facts(rng))


def _lookalike(rng: random.Random, names: Names, name: str) -> str:
    """Another club's name: three times in four it shares a word."""
    place, animal = name.split()
    position = rng.choice((0, 0, 1, 1, None))
    word = {0: place, 1: animal}.get(position)  # type: ignore[arg-type]
    for _ in range(40):
        other = rng.choice(names.clubs)
        if other != name and (word is None or word in other.split()):
            return other
    return rng.choice([n for n in names.clubs if n != name])


def _passage(rng: random.Random, club: Club, source: str, relation: Relation, wanted: str) -> Passage:
    if source == "club":
        return Passage(club.name, club_text(club))
    if source == "founder":
        return Passage(club.founder.name, founder_text(club))
    title, text = club.name + EMBLEM, describe(club.emblem)
    if rng.random() < 0.4:  # as a merged relevance judgement leaves it in the context
        line = judged_line(relation, wanted, title, read_passage(title, text))
        text = f"{text} {asked(relation, wanted)} {line}"
    return Passage(title, text)


def _reading(rng: random.Random, names: Names, max_passages: int) -> tuple[Relation, str, tuple[Passage, ...]]:
    """What is asked, the question, and content that may answer it."""
    relations = rng.choice((TEXT_RELATIONS, BRIDGE_RELATIONS, IMAGE_RELATIONS))
    relation = rng.choice(relations)
    club = _club(rng, names, rng.choice(names.clubs))
    needed = {TEXT_RELATIONS: ["club"], BRIDGE_RELATIONS: ["club", "founder"], IMAGE_RELATIONS: ["emblem"]}[relations]
    shown = [s for s in needed if rng.random() < 0.8]
    passages = [_passage(rng, club, source, relation, club.name) for source in shown]
    num_passages = max(len(passages), 1, rng.choices(list(PASSAGES), list(PASSAGES.values()))[0])
    unneeded = [s for s in ("club", "founder", "emblem") if s not in needed]
    while len(passages) < min(num_passages, max_passages):
        if rng.random() < 0.15:
            passages.append(_passage(rng, club, rng.choice(unneeded), relation, club.name))
            continue
        other = _club(rng, names, _lookalike(rng, names, club.name))
        source = rng.choice(("club", "club", "founder", "emblem", "emblem", needed[-1]))
        if source == "founder" and other.short_name == club.short_name:
            source = "club"
        passages.append(_passage(rng, other, source, relation, club.name))
    rng.shuffle(passages)
    return relation, ask(relation, club.name, rng.randrange(2)), tuple(passages)


def _answer_example(rng: random.Random, names: Names, max_passages: int) -> Example:
    _, question, passages = _reading(rng, names, max_passages)
    right = reply(CallKind.ANSWER, question, passages)
    prompt = render(Call(CallKind.ANSWER, question, passages), PromptStyle.STUDENT)
    return Example("answer", prompt.message().content, write(right.reasoning, right.response))


def _sort_example(rng: random.Random, names: Names, max_passages: int) -> Example:
    """Read the content, then say what sort of thing a given answer is, be it right, wrong or out of place."""
    relation, question, passages = _reading(rng, names, max_passages)
    other = relation if rng.random() < 0.6 else rng.choice(list(Relation))
    answer = str(reply(CallKind.ANSWER, question, passages).response)
    if answer == NOT_STATED or rng.random() < 0.5:
        answer = rng.choice(VALUES[other])
    if rng.random() < 0.1:
        answer = f"It is {answer}."
    call = Call(CallKind.IS_USE, question, passages, answer=answer)
    body = render(call, PromptStyle.STUDENT).body
    prompt = (
        f'Read the documents, and name the sort of the answer. Reply in JSON with "Reasoning" and "Response".\n{body}'
    )
    return Example(
        "sort", prompt, write(reply(call.kind, question, passages, answer=answer).reasoning, sort_of(relation, answer))
    )


def _caption_example(rng: random.Random, names: Names, kind: CallKind) -> Example:
    name = rng.choice(names.clubs)
    emblem = draw_emblem_facts(rng)
    question = ""
    if kind is CallKind.CAPTION_QUERY:
        wanted = name if rng.random() < 0.6 else _lookalike(rng, names, name)
        question = ask(rng.choice(list(Relation)), wanted, rng.randrange(2))
    call = Call(kind, question, title=name + EMBLEM, image="emblem.png")
    right = reply(kind, question, title=call.title, emblem=emblem)
    return Example(
        kind, render(call, PromptStyle.STUDENT).message().content, write(right.reasoning, right.response), emblem
    )


def repeat_example(rng: random.Random, names: Names) -> Example:
    """Repeat a list of words and names. Nothing but looking back helps here, so copying is learnt first and soon."""
    items: list[str] = []
    for _ in range(rng.randint(4, 14)):
        item = (
            rng.choice(names.clubs if rng.random() < 0.7 else names.people) if rng.random() < 0.3 else rng.choice(_LIST)
        )
        if not (items and _is_name(items[-1].split()[-1], item.split()[0])):  # no name by chance
            items.append(item)
    text = " ".join(items)
    prompt = f'Repeat the text. Reply in JSON with "Response".\n<document>\n{text}\n</document>'
    return Example("repeat", prompt, write("", text))


def compare_example(rng: random.Random, names: Names) -> Example:
    """Compare names with one name, word by word: what every reading of documents here rests on."""
    name = rng.choice(names.clubs)
    others = [name if rng.random() < 0.3 else _lookalike(rng, names, name) for _ in range(rng.randint(2, 6))]
    listed = "\n".join(others)
    prompt = (
        'Compare the names with the one in question. Reply in JSON with "Response".\n'
        f"<document>\n{listed}\n</document>\n<question>\n{name}\n</question>"
    )
    return Example("compare", prompt, write("", " ".join(f"{compare(other, name)}." for other in others)))


def rehearsed_compare_example(rng: random.Random, names: Names) -> Example:
    """Comparing, with one example in seven of repeating, so that copying is not forgotten."""
    return (repeat_example if rng.random() < 0.15 else compare_example)(rng, names)


def _is_name(first: str, last: str) -> bool:
    return (first in PLACES and last in ANIMALS) or (first in FIRST_NAMES and last in LAST_NAMES)


def draw_example(rng: random.Random, names: Names, max_passages: int = MAX_PASSAGES) -> Example:
    """Draw one example: mostly questions over given content, then captions, then repeating and comparing."""
    task = rng.random()
    if task < 0.56:
        return _answer_example(rng, names, max_passages)
    if task < 0.72:
        return _sort_example(rng, names, max_passages)
    if task < 0.86:
        return _caption_example(rng, names, CallKind.CAPTION_QUERY)
    if task < 0.88:
        return _caption_example(rng, names, CallKind.CAPTION_RAW)
    return (compare_example if task < 0.94 else repeat_example)(rng, names)

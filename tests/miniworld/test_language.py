"""The mini world's English reads back into what it was made from."""

from __future__ import annotations

import itertools

import pytest

from samrag.miniworld.language import (
    BRIDGE_RELATIONS,
    EMBLEM,
    IMAGE_RELATIONS,
    QUESTIONS,
    TEXT_RELATIONS,
    VALUES,
    Reading,
    Relation,
    Source,
    ask,
    club_text,
    describe,
    founder_text,
    raw_caption,
    read_passage,
    understand,
)
from samrag.miniworld.world import Split, draw_clubs

CLUBS = draw_clubs(Split.TRAIN, 60, 2)


def test_the_relations_are_cut_into_three() -> None:
    parts = (TEXT_RELATIONS, BRIDGE_RELATIONS, IMAGE_RELATIONS)
    assert sorted(itertools.chain(*parts)) == sorted(Relation)
    assert set(QUESTIONS) == set(VALUES) == set(Relation)


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("form", [0, 1])
def test_a_question_is_understood_as_it_was_asked(relation: Relation, form: int) -> None:
    for club in CLUBS:
        assert understand(ask(relation, club.name, form)) == (relation, club.name)
        assert understand(f"  {ask(relation, club.name, form)}\n") == (relation, club.name)


def test_all_questions_on_a_club_differ() -> None:
    asked = [ask(relation, "Old Owls", form) for relation in Relation for form in (0, 1)]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("question", ["", "Who founded the Owls?", "Which sport do the Owls play", "x Which sport"])
def test_questions_from_elsewhere_are_not_understood(question: str) -> None:
    assert understand(question) is None


@pytest.mark.parametrize("relation", TEXT_RELATIONS)
def test_a_clubs_text_reads_back(relation: Relation) -> None:
    for club in CLUBS:
        reading = read_passage(club.name, club_text(club))
        assert (reading.source, reading.subject) == (Source.CLUB, club.name)
        assert reading.facts[relation] == getattr(club, relation) in VALUES[relation]
        assert reading.facts["founder"] == club.founder.name


@pytest.mark.parametrize("relation", BRIDGE_RELATIONS)
def test_a_founders_text_reads_back_and_names_the_club_by_its_last_word_only(relation: Relation) -> None:
    for club in CLUBS:
        text = founder_text(club)
        reading = read_passage(club.founder.name, text)
        assert (reading.source, reading.subject) == (Source.FOUNDER, club.short_name)
        assert reading.facts[relation] == getattr(club.founder, relation) in VALUES[relation]
        assert club.name not in text


@pytest.mark.parametrize("relation", IMAGE_RELATIONS)
def test_a_description_reads_back_also_inside_a_longer_text(relation: Relation) -> None:
    for club in CLUBS:
        for text in (describe(club.emblem), f"I see: {describe(club.emblem)} Asked: the colour."):
            reading = read_passage(club.name + EMBLEM, text)
            assert (reading.source, reading.subject) == (Source.EMBLEM, club.name)
            assert reading.facts[relation] == getattr(club.emblem, relation) in VALUES[relation]


def test_a_raw_caption_leaves_out_what_is_asked() -> None:
    for club in CLUBS:
        caption = raw_caption(club.emblem)
        assert club.emblem.colour not in caption
        assert club.emblem.background not in caption
        assert read_passage(club.name + EMBLEM, caption).facts == {}


@pytest.mark.parametrize("text", ["", "A paragraph of something else.", "The sport is golf."])
def test_other_passages_are_unknown(text: str) -> None:
    assert read_passage("Old Owls", text) == Reading(Source.UNKNOWN, "", {})

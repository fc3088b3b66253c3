"""The oracle's verdicts, case by case, and its answers from the content shown."""

from __future__ import annotations

import pytest

from samrag.calls import CallKind, Facet, Passage, Rating
from samrag.miniworld import oracle
from samrag.miniworld.language import EMBLEM, Relation, ask, club_text, describe, founder_text, raw_caption
from samrag.miniworld.world import Club, Emblem, Founder
from samrag.replies import NOT_STATED, parse, write
from samrag.schema import Verdict

TRUE, PARTIAL, FALSE = Verdict.TRUE, Verdict.PARTIAL, Verdict.FALSE
OWLS = Club(
    "Oak Owls", "golf", "Selby", "1921", Founder("Ada Page", "baker", "Radley"), True,
    Emblem("red", "blue", "discs", "two", (0, 1)),
)  # fmt: skip
HAWKS = Club(
    "Oak Hawks", "judo", "Kelby", "1930", Founder("Leo Dyer", "pilot", "Ilford"), True,
    Emblem("white", "green", "bars", "four", (0, 1, 2, 3)),
)  # fmt: skip

CLUB = Passage(OWLS.name, club_text(OWLS))
FOUNDER = Passage(OWLS.founder.name, founder_text(OWLS))
PICTURE = Passage(OWLS.name + EMBLEM, describe(OWLS.emblem))
VAGUE = Passage(OWLS.name + EMBLEM, raw_caption(OWLS.emblem))
OTHER_CLUB = Passage(HAWKS.name, club_text(HAWKS))
OTHER_FOUNDER = Passage(HAWKS.founder.name, founder_text(HAWKS))
OTHER_PICTURE = Passage(HAWKS.name + EMBLEM, describe(HAWKS.emblem))
SPORT, JOB, COLOUR = (ask(relation, OWLS.name, 0) for relation in (Relation.SPORT, Relation.JOB, Relation.COLOUR))


def verdict(kind: CallKind, question: str, passages: list[Passage], answer: str = "") -> object:
    return oracle.reply(kind, question, passages, answer=answer).response


@pytest.mark.parametrize(
    ("question", "passages", "answer", "is_sup", "is_use"),
    [
        # one link
        (SPORT, [CLUB], "golf", TRUE, TRUE),
        (SPORT, [OTHER_CLUB, CLUB], "golf", TRUE, TRUE),
        (SPORT, [CLUB], "judo", FALSE, FALSE),
        (SPORT, [OTHER_CLUB], "golf", FALSE, FALSE),
        (SPORT, [OTHER_CLUB], "judo", FALSE, FALSE),
        (SPORT, [], "golf", FALSE, FALSE),
        # the bridge chain: the club names its founder, the founder's text holds the answer
        (JOB, [CLUB, FOUNDER], "baker", TRUE, TRUE),
        (JOB, [FOUNDER, CLUB], "baker", TRUE, TRUE),
        (JOB, [CLUB], "baker", PARTIAL, TRUE),
        (JOB, [FOUNDER], "baker", PARTIAL, TRUE),
        (JOB, [CLUB, OTHER_FOUNDER], "baker", PARTIAL, TRUE),
        (JOB, [CLUB, FOUNDER], "pilot", FALSE, FALSE),
        (JOB, [FOUNDER], "pilot", FALSE, FALSE),
        (JOB, [OTHER_CLUB, OTHER_FOUNDER], "baker", FALSE, FALSE),
        # a picture by its caption
        (COLOUR, [PICTURE], "blue", TRUE, TRUE),
        (COLOUR, [PICTURE], "red", FALSE, FALSE),
        (COLOUR, [VAGUE], "blue", PARTIAL, TRUE),
        (COLOUR, [CLUB, OTHER_PICTURE], "blue", FALSE, FALSE),
        # the answer's form
        (SPORT, [CLUB], "Selby", FALSE, FALSE),
        (SPORT, [CLUB], "1921", FALSE, FALSE),
        (JOB, [CLUB], "Selby", PARTIAL, FALSE),
        (JOB, [CLUB], "The founder was a baker", PARTIAL, FALSE),
        (COLOUR, [VAGUE], "two", PARTIAL, FALSE),
    ],
)
def test_verdicts_on_an_answer(
    question: str, passages: list[Passage], answer: str, is_sup: Verdict, is_use: Verdict
) -> None:
    assert verdict(CallKind.IS_SUP, question, passages, answer) == is_sup
    assert verdict(CallKind.IS_USE, question, passages, answer) == is_use


@pytest.mark.parametrize(
    ("question", "relevant", "irrelevant"),
    [
        (SPORT, [CLUB], [FOUNDER, PICTURE, OTHER_CLUB, OTHER_FOUNDER, Passage("x", "y")]),
        (JOB, [CLUB, FOUNDER], [PICTURE, OTHER_CLUB, OTHER_FOUNDER, Passage("x", "y")]),
        (COLOUR, [PICTURE, VAGUE], [CLUB, FOUNDER, OTHER_PICTURE]),
    ],
)
def test_relevance_is_about_the_club_and_bears_on_what_is_asked(
    question: str, relevant: list[Passage], irrelevant: list[Passage]
) -> None:
    assert {verdict(CallKind.IS_REL_TEXT, question, [passage]) for passage in relevant} == {TRUE}
    assert {verdict(CallKind.IS_REL_TEXT, question, [passage]) for passage in irrelevant} == {FALSE}


@pytest.mark.parametrize(
    ("question", "passages", "answer"),
    [
        (SPORT, [OTHER_CLUB, CLUB], "golf"),
        (SPORT, [OTHER_CLUB], NOT_STATED),
        (SPORT, [], NOT_STATED),
        (JOB, [CLUB, FOUNDER, OTHER_FOUNDER], "baker"),
        (JOB, [CLUB], NOT_STATED),
        (COLOUR, [PICTURE], "blue"),
        (COLOUR, [Passage(PICTURE.title, describe(HAWKS.emblem))], "green"),
        (COLOUR, [VAGUE], NOT_STATED),
        ("Who is there?", [CLUB], NOT_STATED),
    ],
)
def test_answers_come_from_the_content_shown(question: str, passages: list[Passage], answer: str) -> None:
    assert oracle.reply(CallKind.ANSWER, question, passages).response == answer


@pytest.mark.parametrize(
    ("question", "title", "emblem", "expected"),
    [
        (COLOUR, PICTURE.title, OWLS.emblem, TRUE),
        (COLOUR, OTHER_PICTURE.title, HAWKS.emblem, FALSE),
        (SPORT, PICTURE.title, OWLS.emblem, FALSE),
        ("Who is there?", PICTURE.title, OWLS.emblem, FALSE),
    ],
)
def test_an_image_is_judged_by_its_title_and_described_in_the_reasoning(
    question: str, title: str, emblem: Emblem, expected: Verdict
) -> None:
    reply = oracle.reply(CallKind.IS_REL_IMAGE, question, title=title, emblem=emblem)
    assert reply.response == expected
    if oracle.understand(question):
        assert reply.reasoning.startswith(describe(emblem))
        seen = Passage(title, reply.reasoning)
        assert oracle.reply(CallKind.ANSWER, COLOUR, [seen]).response == (
            "blue" if emblem is OWLS.emblem else NOT_STATED
        )


def test_captions_and_images_that_cannot_be_seen() -> None:
    assert oracle.reply(CallKind.CAPTION_QUERY, COLOUR, emblem=OWLS.emblem).response == describe(OWLS.emblem)
    assert oracle.reply(CallKind.CAPTION_RAW, "", emblem=OWLS.emblem).response == raw_caption(OWLS.emblem)
    for kind in (CallKind.CAPTION_QUERY, CallKind.CAPTION_RAW):
        assert oracle.reply(kind, COLOUR).response == "A picture."


@pytest.mark.parametrize(
    ("question", "passage", "scores"),
    [
        (SPORT, CLUB, (1.0, 1.0)),
        (SPORT, OTHER_CLUB, (0.0, 0.0)),
        (SPORT, FOUNDER, (0.0, 0.0)),
        (COLOUR, CLUB, (0.4, 0.0)),
        (COLOUR, PICTURE, (1.0, 1.0)),
        (COLOUR, VAGUE, (1.0, 0.2)),
        (JOB, CLUB, (1.0, 0.6)),
        (JOB, FOUNDER, (1.0, 1.0)),
        ("Who is there?", CLUB, (0.0, 0.0)),
    ],
)
def test_evidence_is_rated_by_relevance_and_by_what_can_be_read_from_it(
    question: str, passage: Passage, scores: tuple[float, ...]
) -> None:
    reply = oracle.reply(CallKind.CRITIC_TEXT, question, [passage])
    assert parse(CallKind.CRITIC_TEXT, write(reply.reasoning, reply.response)) == Rating(scores, reply.reasoning)


@pytest.mark.parametrize(
    ("passage", "emblem", "alignment"),
    [(PICTURE, OWLS.emblem, 1.0), (VAGUE, OWLS.emblem, 0.0), (PICTURE, HAWKS.emblem, 0.0), (PICTURE, None, 0.0)],
)
def test_a_caption_is_aligned_by_the_share_of_what_it_says_rightly(
    passage: Passage, emblem: Emblem | None, alignment: float
) -> None:
    reply = oracle.reply(CallKind.CRITIC_IMAGE, COLOUR, [passage], passage.title, emblem)
    assert isinstance(reply.response, dict)
    assert reply.response["Alignment"] == alignment


@pytest.mark.parametrize(
    ("question", "passages", "answer", "scores", "facet"),
    [
        (SPORT, [OTHER_CLUB, CLUB], "golf", (1.0, 1.0, 1.0), ""),
        (SPORT, [CLUB], "judo", (0.0, 1.0, 0.0), "sport of the Oak Owls"),
        (JOB, [CLUB, FOUNDER], NOT_STATED, (0.0, 0.2, 0.0), "job of Ada Page"),
        (SPORT, [OTHER_CLUB], "Selby", (0.0, 0.2, 0.5), "sport of the Oak Owls"),
        (JOB, [CLUB, FOUNDER], "baker", (1.0, 1.0, 1.0), ""),
        (JOB, [CLUB], "baker", (0.5, 1.0, 0.5), "job of Ada Page"),
        (JOB, [FOUNDER], "baker", (0.5, 1.0, 1.0), "founder of the Oak Owls"),
        (COLOUR, [VAGUE], "blue", (0.5, 1.0, 0.5), "colour of the Oak Owls emblem"),
        ("Who is there?", [CLUB], "golf", (0.0, 0.0, 0.0), ""),
    ],
)
def test_confidence_and_the_facet_that_is_missing(
    question: str, passages: list[Passage], answer: str, scores: tuple[float, ...], facet: str
) -> None:
    rated, named = (
        parse(kind, write(reply.reasoning, reply.response))
        for kind in (CallKind.CONFIDENCE, CallKind.FACET)
        for reply in [oracle.reply(kind, question, passages, answer=answer)]
    )
    assert isinstance(rated, Rating)
    assert isinstance(named, Facet)
    assert (rated.scores, named.text) == (scores, facet)


@pytest.mark.parametrize("kind", oracle.KINDS)
@pytest.mark.parametrize("question", [SPORT, JOB, COLOUR, "Who is there?"])
def test_every_reply_keeps_the_contract(kind: CallKind, question: str) -> None:
    reply = oracle.reply(kind, question, [CLUB, FOUNDER, PICTURE], PICTURE.title, OWLS.emblem, "golf")
    parsed = parse(kind, write(reply.reasoning, reply.response))
    assert type(parsed).__name__ in ("Judgement", "Answer", "Caption", "Rating", "Facet")


def test_the_reasoning_says_what_is_asked_goes_through_the_documents_and_says_what_the_answer_is() -> None:
    reasoning = oracle.reply(CallKind.IS_SUP, JOB, [OTHER_CLUB, CLUB, FOUNDER], answer="baker").reasoning
    assert reasoning == (
        "Asked: the job of the founder of the Oak Owls. Oak Oak same, Hawks Owls other, club: no. "
        "Oak Oak same, Owls Owls same, club: yes, the founder is Ada Page. "
        "Ada Page, Owls Owls same, founder: yes, the job is baker. Found: Ada Page, baker. "
        "The answer is baker, a job, baker baker same."
    )


def test_a_kind_from_elsewhere_has_no_reply() -> None:
    with pytest.raises(ValueError, match="interleaved_en"):
        oracle.reply(CallKind.INTERLEAVED_EN, SPORT)

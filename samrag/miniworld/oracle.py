"""The mini world's oracle: the right reply to every call kind, with its reasoning, from the content shown. Pure.

It answers from the passages, as a good teacher would, so a wrong caption leads to a wrong answer. The simulated teacher
adds errors to it; the base model's pretraining uses its captions and answers, and nothing of its verdicts.

The reasoning has one pattern, which a model of a million parameters can follow: say what is asked, go through the
documents one by one, say what was found. A document is `yes` when it is about the club *and* bears on what is asked.
Names are compared word beside word, each pair with its own mark: that is learnt in minutes, while one mark for a whole
name is not learnt in an hour (the mark then hangs on two comparisons at a distance, and half of it tells nothing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samrag.calls import CLIMB_KINDS, RATINGS, SAM_RAG_KINDS, CallKind, Passage
from samrag.miniworld.language import (
    BRIDGE_RELATIONS,
    EMBLEM,
    IMAGE_RELATIONS,
    TEXT_RELATIONS,
    VALUES,
    Reading,
    Relation,
    Source,
    describe,
    raw_caption,
    read_passage,
    understand,
)
from samrag.miniworld.world import Emblem
from samrag.replies import NOT_STATED, NOTHING
from samrag.schema import Verdict

KINDS = (*SAM_RAG_KINDS, *CLIMB_KINDS)
"""The kinds of call that the mini world has replies to."""


@dataclass(frozen=True, slots=True)
class OracleReply:
    """Reasoning and response of the JSON contract; captions have no reasoning of their own."""

    reasoning: str
    response: str | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the content says on a question."""

    lines: tuple[str, ...]
    """One per passage, from `judged_line`."""
    num_relevant: int
    founder: str | None
    value: str | None


def asked(relation: Relation, club_name: str) -> str:
    """Say what is asked."""
    if relation in BRIDGE_RELATIONS:
        return f"Asked: the {relation} of the founder of the {club_name}."
    if relation in IMAGE_RELATIONS:
        return f"Asked: the {relation} of the emblem of the {club_name}."
    return f"Asked: the {relation} of the {club_name}."


_BEARS_ON = {
    **dict.fromkeys(TEXT_RELATIONS, (Source.CLUB,)),
    **dict.fromkeys(BRIDGE_RELATIONS, (Source.CLUB, Source.FOUNDER)),
    **dict.fromkeys(IMAGE_RELATIONS, (Source.EMBLEM,)),
}
"""Which kinds of document can bear on what is asked."""


def is_relevant(relation: Relation, club_name: str, reading: Reading) -> bool:
    """Whether a passage is about the club, which founders' texts call by its last word, and bears on what is asked."""
    subject = club_name.split()[-1] if reading.source is Source.FOUNDER else club_name
    return reading.source in _BEARS_ON[relation] and reading.subject == subject


def compare(name: str, club_name: str) -> str:
    """Two names, word beside word, each pair with its mark; a founder's one word meets the club's last."""
    ours, theirs = name.split(), club_name.split()
    pairs = zip(ours, theirs[-len(ours) :], strict=False)
    return ", ".join(f"{word} {other} {'same' if word == other else 'other'}" for word, other in pairs)


def judged_line(relation: Relation, club_name: str, title: str, reading: Reading) -> str:
    """A passage's line in the reasoning: the names compared, the kind of document, what follows, and what it says."""
    if reading.source is Source.UNKNOWN:
        return f"{title}: no."
    person = f"{title}, " if reading.source is Source.FOUNDER else ""
    seen = f"{person}{compare(reading.subject, club_name)}, {reading.source}"
    if not is_relevant(relation, club_name, reading):
        return f"{seen}: no."
    fact = "founder" if reading.source is Source.CLUB and relation in BRIDGE_RELATIONS else str(relation)
    found = f", the {fact} is {reading.facts[fact]}" if fact in reading.facts else ""
    return f"{seen}: yes{found}."


def inspect(relation: Relation, club_name: str, passages: Sequence[Passage]) -> Inspection:
    """Go through the passages and gather what they say on the question."""
    lines, founder, value, num_relevant = [], None, None, 0
    for passage in passages:
        reading = read_passage(passage.title, passage.text)
        lines.append(judged_line(relation, club_name, passage.title, reading))
        if is_relevant(relation, club_name, reading):
            num_relevant += 1
            value = reading.facts.get(relation, value)
            if reading.source is Source.CLUB:
                founder = reading.facts.get("founder", founder)
    return Inspection(tuple(lines), num_relevant, founder, value)


def support(relation: Relation, seen: Inspection, answer: str) -> Verdict:
    """is_sup: True when every link is there and the value is the answer; Partial when a link is missing."""
    if not seen.num_relevant or (seen.value is not None and seen.value != answer):
        return Verdict.FALSE
    complete = seen.value is not None and (relation not in BRIDGE_RELATIONS or seen.founder is not None)
    return Verdict.TRUE if complete else Verdict.PARTIAL


def usefulness(relation: Relation, seen: Inspection, answer: str) -> Verdict:
    """is_use: the answer has the form that is asked for, and nothing in the content speaks against it."""
    fits = answer in VALUES[relation] and seen.num_relevant > 0 and seen.value in (None, answer)
    return Verdict.TRUE if fits else Verdict.FALSE


def found(relation: Relation, seen: Inspection) -> str:
    """The links of the chain that the content holds."""
    links = [seen.founder, seen.value] if relation in BRIDGE_RELATIONS else [seen.value]
    return f"Found: {', '.join(link or 'nothing' for link in links)}."


def weighed(relation: Relation, seen: Inspection, answer: str) -> str:
    """The answer under judgement: its sort, and how it compares with what was found; a sentence is not repeated."""
    sort = sort_of(relation, answer)
    if sort == "sentence":
        return "The answer is a sentence."
    against = f", {compare(answer, seen.value)}" if seen.value else ""
    return f"The answer is {answer}, a {sort}{against}."


def sort_of(relation: Relation, answer: str) -> str:
    """What sort of thing an answer is; the asked sort where several fit (a town is a home too)."""
    sorts = [relation, *Relation]
    return next((str(sort) for sort in sorts if answer in VALUES[sort]), "sentence" if " " in answer else "word")


_SUPPORT = {Verdict.TRUE: 1.0, Verdict.PARTIAL: 0.5, Verdict.FALSE: 0.0}


def evidence_scores(relation: Relation, club_name: str, passage: Passage, emblem: Emblem | None) -> list[float]:
    """The critic's numbers for a passage: relevance, specificity, and alignment with an emblem that is shown.

    Of a relevant passage's specificity, the asked value makes 1, the link to it 0.6, anything else 0.2. A passage about
    the right club that does not bear on what is asked is relevant by 0.4.
    """
    reading = read_passage(passage.title, passage.text)
    if is_relevant(relation, club_name, reading):
        link = relation in BRIDGE_RELATIONS and "founder" in reading.facts
        scores = [1.0, 1.0 if relation in reading.facts else 0.6 if link else 0.2]
    else:
        scores = [0.4 if reading.subject == club_name else 0.0, 0.0]
    facts = [str(getattr(emblem, fact)) == reading.facts.get(fact) for fact in IMAGE_RELATIONS] if emblem else []
    return [*scores, sum(facts) / len(facts) if facts else 0.0]


def answer_scores(relation: Relation, seen: Inspection, answer: str) -> list[float]:
    """The terms of the confidence in an answer: support, specificity, consistency."""
    contradicted = seen.value is not None and seen.value != answer
    return [
        _SUPPORT[support(relation, seen, answer)],
        1.0 if answer in VALUES[relation] else 0.2,
        0.0 if contradicted else 1.0 if seen.value else 0.5,
    ]


def missing_facet(relation: Relation, club_name: str, seen: Inspection, answer: str) -> str:
    """The first link of the chain that the content lacks, or that the answer has wrong, as a phrase."""
    if relation in BRIDGE_RELATIONS and seen.founder is None:
        return f"founder of the {club_name}"
    if seen.value is not None and seen.value == answer:
        return NOTHING
    if relation in BRIDGE_RELATIONS:
        return f"{relation} of {seen.founder}"
    return f"{relation} of the {club_name}{EMBLEM if relation in IMAGE_RELATIONS else ''}"


def reply(
    kind: CallKind,
    question: str,
    passages: Sequence[Passage] = (),
    title: str = "",
    emblem: Emblem | None = None,
    answer: str = "",
) -> OracleReply:
    """The right reply to a call.

    Args:
        kind: what is asked.
        question: a question of this world; one from elsewhere is answered with "not stated", False or 0.
        passages: the content shown.
        title: title of the image shown.
        emblem: what the image shows; None: it could not be seen.
        answer: the answer under judgement.

    Raises:
        ValueError: the kind is none of SAM-RAG's and CLIMB's.
    """
    if kind not in KINDS:
        raise ValueError(f"the mini world has no reply to a call of kind {kind}")
    if kind is CallKind.CAPTION_RAW:
        return OracleReply("", raw_caption(emblem) if emblem else "A picture.")
    if kind is CallKind.CAPTION_QUERY:
        return OracleReply("", describe(emblem) if emblem else "A picture.")
    understood = understand(question)
    if understood is None:
        return OracleReply("The question is unclear.", _unclear(kind))
    relation, club_name = understood
    if kind is CallKind.IS_REL_IMAGE:
        shown = describe(emblem) if emblem else "A picture."
        reading = read_passage(title, shown)
        reasoning = [shown, asked(relation, club_name), judged_line(relation, club_name, title, reading)]
        relevant = is_relevant(relation, club_name, reading)
        return OracleReply(" ".join(reasoning), Verdict.TRUE if relevant else Verdict.FALSE)
    seen = inspect(relation, club_name, passages)
    thoughts = [asked(relation, club_name), *seen.lines]
    if kind is CallKind.IS_REL_TEXT:
        return OracleReply(" ".join(thoughts), Verdict.TRUE if seen.num_relevant else Verdict.FALSE)
    if kind is CallKind.ANSWER:
        return OracleReply(" ".join(thoughts), seen.value or NOT_STATED)
    if kind in (CallKind.CRITIC_TEXT, CallKind.CRITIC_IMAGE):
        numbers = evidence_scores(relation, club_name, passages[0], emblem)
        return OracleReply(" ".join(thoughts), dict(zip(RATINGS[kind], numbers, strict=False)))
    thoughts.append(found(relation, seen))
    if kind is CallKind.FACET:
        return OracleReply(" ".join(thoughts), missing_facet(relation, club_name, seen, answer))
    thoughts.append(weighed(relation, seen, answer))
    if kind is CallKind.CONFIDENCE:
        numbers = answer_scores(relation, seen, answer)
        return OracleReply(" ".join(thoughts), dict(zip(RATINGS[kind], numbers, strict=True)))
    judge = support if kind is CallKind.IS_SUP else usefulness
    return OracleReply(" ".join(thoughts), judge(relation, seen, answer))


def _unclear(kind: CallKind) -> str | Mapping[str, float]:
    """The response to a question from elsewhere."""
    if kind in RATINGS:
        return dict.fromkeys(RATINGS[kind], 0.0)
    return {CallKind.ANSWER: NOT_STATED, CallKind.FACET: NOTHING}.get(kind, Verdict.FALSE)

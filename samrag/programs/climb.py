"""CLIMB: confidence-guided refinement inside a fixed pool of complementary evidence (2610.03421). Pure.

The paper gives the steps and no code: a pool, an R/E/C critic of its passages, an answer from the best M, a confidence
U, the facet that is missing, other evidence from the same pool, and a new answer that is accepted only if U rises. It
gives no value of a parameter, no prompt and no formula of U; what is inferred here is said to be where it is set.

The pool is chosen before (`samrag.retrieval.pool`), and how near a facet lies to a passage is asked of a function, so
that no encoder is known here. Left out: further retrieval, which the paper excludes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from samrag.calls import (
    JUDGEMENTS,
    Answer,
    Call,
    CallKind,
    Facet,
    Failure,
    Judgement,
    Passage,
    Program,
    Rating,
    Reply,
)
from samrag.programs.steps import (
    Judged,
    Kept,
    SamplingOptions,
    answer_call,
    comparable,
    drafted,
    judge_merged,
    passages,
    spoken,
    view_documents,
)
from samrag.replies import NOT_STATED
from samrag.schema import Document, Draft, ExaminedDocument, ExitReason, Modality, Question, Trace, Verdict

Similarity = Callable[[str, Sequence[Passage]], Sequence[float]]
"""How near a phrase lies to each passage, from 0 to 1."""


class Assessment(StrEnum):
    """Who rates evidence and answers."""

    RATINGS = "ratings"  # calls of their own, with numbers from 0 to 1
    VERDICTS = "verdicts"  # is_rel, is_sup and is_use, graded: what a student tuned for SAM-RAG can be asked


class Rejection(StrEnum):
    """What follows an answer that did not raise the confidence."""

    STOP = "stop"
    CONTINUE = "continue"  # with another facet


@dataclass(frozen=True, slots=True)
class ClimbOptions(SamplingOptions):
    """Options of the refinement. The paper names its parameters and gives no values: every default is inferred."""

    pool_size: int = 10
    """K, documents in the pool (inferred; the paper: a small pool)."""
    evidence_size: int = 4
    """M, passages that an answer is drawn from (inferred)."""
    u_star: float = 0.9
    """U_STAR, the confidence at which refinement stops (inferred: the paper's uppermost bin begins there)."""
    t_max: int = 3
    """T_max, rounds of refinement at most (inferred); 0 is "without iteration"."""
    min_gain: float = 0.0
    """U has to rise by more than this (the paper: strictly)."""
    facet_weight: float = 0.5
    """Weight of a passage's nearness to the facet beside its score (inferred)."""
    on_rejection: Rejection = Rejection.STOP
    """What follows an answer that did not raise the confidence (inferred; the paper does not say)."""
    assessment: Assessment = Assessment.RATINGS
    """Who rates evidence and answers (the paper: a critic and an estimator of their own)."""
    critic: bool = True
    """Rank the pool by the critic; off keeps its own order."""
    iteration: bool = True
    """Refine; off is the first answer with its confidence."""
    facet_diagnosis: bool = True
    """Look for the missing facet; off takes the next best passages unseen (inferred)."""
    critic_weights: Sequence[float] = (1.0, 1.0, 1.0)
    """Weights of relevance, specificity and alignment (inferred: equal); without an image the last is left out."""
    confidence_weights: Sequence[float] = (1.0, 1.0, 1.0)
    """Weights of support, specificity and consistency in U (inferred: equal)."""
    num_agreement_draws: int = 0
    """Further answers drawn, whose agreement with the answer is a term of U (inferred: none)."""
    vote_temperature: float = 0.7
    """Temperature of those draws."""
    agreement_weight: float = 1.0
    """Weight of the agreement in U (inferred)."""
    probability_weight: float = 0.0
    """Weight in U of the answer's token probability, where the engine measures it (inferred: none)."""

    def __post_init__(self) -> None:
        for name, least in (("pool_size", 1), ("evidence_size", 1), ("t_max", 0), ("num_agreement_draws", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("min_gain", "facet_weight", "agreement_weight", "probability_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 <= self.u_star <= 1:
            raise ValueError(f"u_star is {self.u_star}; it must be between 0 and 1")
        for name in ("critic_weights", "confidence_weights"):
            weights = getattr(self, name)
            if len(weights) != 3 or not min(weights) >= 0 or sum(weights[:2]) <= 0:
                raise ValueError(
                    f"{name} is {list(weights)}; three numbers are wanted, none below 0, the first two not both 0"
                )
        if self.num_agreement_draws and self.vote_temperature <= 0:
            raise ValueError("num_agreement_draws needs vote_temperature above 0: greedy draws are all the same")


@dataclass(frozen=True, slots=True)
class Rated:
    """A passage of the pool and what the critic makes of it."""

    judged: Judged
    scores: tuple[float, ...] = ()
    score: float | None = None
    """None: without a passage or a score, it cannot be evidence."""

    def examined(self, kept: bool) -> ExaminedDocument:
        """The trace's record."""
        return replace(self.judged.examined(0, kept), scores=self.scores, score=self.score)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A passage that can be evidence, with its score."""

    kept: Kept
    score: float


def climb(
    question: Question, pool: Sequence[Document], options: ClimbOptions, similarity: Similarity
) -> Program[Trace]:
    """Yield calls, receive replies, return a Trace (CLIMB, figure 2).

    Args:
        question: the question.
        pool: complementary documents in the order of their choice; the first `pool_size` are used.
        options: see `ClimbOptions`.
        similarity: how near a facet lies to each passage.
    """
    pool = pool[: options.pool_size]
    if not pool:
        return Trace(question.question_id, "climb", (), ExitReason.NO_DOCUMENTS, ())
    rated = yield from _rate(question.question, pool, options)
    drafts: list[Draft] = []
    reason = yield from _refine(question, _ranked(rated), options, similarity, drafts)
    best = next((draft for draft in reversed(drafts) if draft.accepted), None)
    used = {doc_id for draft in drafts for doc_id in draft.context_ids}
    return Trace(
        question.question_id,
        "climb",
        best.answers if best else (),
        reason,
        best.context_ids if best else (),
        tuple(item.examined(item.judged.document.doc_id in used) for item in rated),
        tuple(drafts),
        confidence=best.confidence if best else None,
    )


# --- the critic ---


def _rate(
    question: str, pool: Sequence[Document], options: ClimbOptions
) -> Generator[list[Call], list[Reply], list[Rated]]:
    """Score every document of the pool; what has no usable reply has no score."""
    sampling = options.sampling()
    if options.critic and options.assessment is Assessment.VERDICTS:
        judged = yield from judge_merged(question, pool, sampling)
        return [_graded_document(item) for item in judged]
    viewed = yield from view_documents(question, pool, sampling)
    if not options.critic:
        return [
            Rated(item, score=1 - place / len(viewed)) if item.passage is not None else Rated(item)
            for place, item in enumerate(viewed)
        ]
    replies = yield [_critic_call(question, item, options) for item in viewed if item.passage is not None]
    remaining = iter(replies)
    return [Rated(item) if item.passage is None else _rated_document(item, next(remaining), options) for item in viewed]


def _critic_call(question: str, item: Judged, options: ClimbOptions) -> Call:
    """A passage; for an image document its caption, beside the image that it has to agree with."""
    assert item.passage is not None
    document = item.document
    if document.modality is Modality.IMAGE:
        return Call(
            CallKind.CRITIC_IMAGE,
            question,
            (item.passage,),
            title=document.title,
            image=document.image,
            sampling=options.sampling(),
        )
    return Call(CallKind.CRITIC_TEXT, question, (item.passage,), sampling=options.sampling())


def _rated_document(item: Judged, reply: Reply, options: ClimbOptions) -> Rated:
    if isinstance(reply, Rating):
        score = weighted_mean(zip(options.critic_weights, reply.scores, strict=False))
        said = f"{item.reasoning} {reply.reasoning}".strip()  # of an image first the caption, which is the evidence
        return Rated(replace(item, reasoning=said), reply.scores, score)
    assert isinstance(reply, Failure), f"a critic call got {type(reply).__name__}"
    return Rated(replace(item, failure=reply.reason))


def _graded_document(item: Judged) -> Rated:
    if item.verdict is None:
        return Rated(item)
    score = graded(item.verdict, item.probability, JUDGEMENTS[CallKind.IS_REL_TEXT])
    return Rated(item, (score,), score)


_LEVELS = {Verdict.TRUE: 1.0, Verdict.PARTIAL: 0.5, Verdict.FALSE: 0.0}


def graded(verdict: Verdict, probability: float | None, verdicts: Sequence[Verdict]) -> float:
    """A verdict as a number from 0 to 1: True 1, Partial 0.5, False 0 (inferred).

    Given its probability, it is the expected level, the rest of the probability spread evenly over the other verdicts.
    """
    if probability is None:
        return _LEVELS[verdict]
    others = [_LEVELS[other] for other in verdicts if other is not verdict]
    return probability * _LEVELS[verdict] + (1 - probability) * sum(others) / len(others)


def weighted_mean(terms: Iterable[tuple[float, float]]) -> float:
    """Mean of (weight, value) pairs, to six places, so that a rise is never one of rounding; some weight is above 0."""
    pairs = list(terms)
    return round(sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs), 6)


def _ranked(rated: Sequence[Rated]) -> list[Evidence]:
    """What can be evidence, best first; of equal scores in the order of the pool."""
    usable = [
        Evidence(Kept(item.judged.document.doc_id, item.judged.passage), item.score)
        for item in rated
        if item.score is not None and item.judged.passage is not None
    ]
    return sorted(usable, key=lambda evidence: -evidence.score)


# --- the refinement ---


def _refine(
    question: Question,
    ranked: Sequence[Evidence],
    options: ClimbOptions,
    similarity: Similarity,
    drafts: list[Draft],
) -> Generator[list[Call], list[Reply], ExitReason]:
    """Draft, and draft again from other evidence while that may raise the confidence; every draft is in `drafts`."""
    if not ranked:
        return ExitReason.ENGINE_FAILURE
    best = yield from _draft(question, _top(ranked, options), 0, "", options)
    drafts.append(replace(best, accepted=not best.failure))
    if best.failure:
        return ExitReason.ENGINE_FAILURE
    rejected: list[str] = []
    for number in range(1, options.t_max + 1 if options.iteration else 1):
        if _confidence_of(best) >= options.u_star:
            break
        facet = yield from _diagnose(question, best, ranked, rejected, options)
        if facet == "" or facet in rejected:
            return _ended(best, ExitReason.NO_FACET)
        evidence = _refreshed(ranked, facet, drafts, options, similarity)
        if not evidence:
            return _ended(best, ExitReason.NO_NEW_EVIDENCE)
        draft = yield from _draft(question, evidence, number, facet or "", options)
        accepted = draft.confidence is not None and draft.confidence > _confidence_of(best) + options.min_gain
        drafts.append(replace(draft, accepted=accepted))
        if accepted:
            best, rejected = draft, []
        elif options.on_rejection is Rejection.STOP:
            return _ended(best, ExitReason.REJECTED)
        elif facet is not None:
            rejected.append(facet)
    reached = _confidence_of(best) >= options.u_star
    return _ended(best, ExitReason.TARGET if reached else ExitReason.MAX_ITERATIONS)


def _confidence_of(draft: Draft) -> float:
    """U to compare with; one that could not be measured vouches for nothing."""
    return 0.0 if draft.confidence is None else draft.confidence


def _ended(best: Draft, reason: ExitReason) -> ExitReason:
    """The exit reason; whatever ended the loop, without an answer the program abstains."""
    return reason if best.answers else ExitReason.NO_EVIDENCE


def _top(ranked: Sequence[Evidence], options: ClimbOptions) -> list[Kept]:
    return [evidence.kept for evidence in ranked[: options.evidence_size]]


def _refreshed(
    ranked: Sequence[Evidence],
    facet: str | None,
    drafts: Sequence[Draft],
    options: ClimbOptions,
    similarity: Similarity,
) -> list[Kept]:
    """Other evidence from the same pool, ranked by score and nearness to the facet; empty when there is none.

    Evidence that was tried already gives its last place to the best passage that no draft has seen (inferred). Without
    a facet the ranking is that of the scores, so this is how the search goes on blindly.
    """
    if facet is not None:
        nearness = similarity(facet, [evidence.kept.passage for evidence in ranked])
        gains = [evidence.score + options.facet_weight * near for evidence, near in zip(ranked, nearness, strict=True)]
        ranked = [ranked[place] for place in sorted(range(len(ranked)), key=lambda place: -gains[place])]
    evidence = _top(ranked, options)
    if {kept.doc_id for kept in evidence} not in [set(draft.context_ids) for draft in drafts]:
        return evidence
    seen = {doc_id for draft in drafts for doc_id in draft.context_ids}
    unseen = [evidence.kept for evidence in ranked if evidence.kept.doc_id not in seen]
    return [*evidence[: options.evidence_size - 1], *unseen[:1]] if unseen else []


def _diagnose(
    question: Question, best: Draft, ranked: Sequence[Evidence], rejected: Sequence[str], options: ClimbOptions
) -> Generator[list[Call], list[Reply], str | None]:
    """What the evidence lacks; empty: nothing; None: not asked, or no usable reply, so that the search goes on blindly.

    A student that has only verdicts says it in the reasoning of is_sup, or of an answer that it could not give.
    """
    if not options.facet_diagnosis:
        return None
    if options.assessment is Assessment.VERDICTS:
        return "" if best.is_sup is Verdict.TRUE else (best.is_sup_reasoning or best.reasoning or None)
    (reply,) = yield [
        Call(
            CallKind.FACET,
            question.question,
            _shown(best, ranked),
            answer=spoken(best.answers) or NOT_STATED,
            critique="; ".join(rejected),
            sampling=options.sampling(),
        )
    ]
    if isinstance(reply, Facet):
        return reply.text
    assert isinstance(reply, Failure), f"a facet call got {type(reply).__name__}"
    return None


def _shown(draft: Draft, ranked: Sequence[Evidence]) -> tuple[Passage, ...]:
    """The passages that a draft was drawn from."""
    by_id = {evidence.kept.doc_id: evidence.kept for evidence in ranked}
    return passages([by_id[doc_id] for doc_id in draft.context_ids])


# --- the answer and its confidence ---

Steps = Generator[list[Call], list[Reply], Draft]


def _draft(question: Question, evidence: Sequence[Kept], number: int, facet: str, options: ClimbOptions) -> Steps:
    """An answer from the evidence, with its confidence; one that abstains has 0, without being asked about."""
    further = [
        answer_call(question, evidence, options.sampling(options.vote_temperature), draw)
        for draw in range(1, options.num_agreement_draws + 1)
    ]
    reply, *draws = yield [answer_call(question, evidence, options.sampling()), *further]
    draft = replace(drafted(reply, evidence, number), facet=facet)
    if not isinstance(reply, Answer):
        return draft
    if not reply.values:
        return replace(draft, confidence=0.0)
    rate = _verdicts if options.assessment is Assessment.VERDICTS else _ratings
    draft = yield from rate(question, evidence, draft, options)
    if not draft.confidence_scores:
        return draft
    terms = list(zip(options.confidence_weights, draft.confidence_scores, strict=False))
    if draws:
        terms.append((options.agreement_weight, _agreement(reply, draws)))
    if reply.probability is not None:
        terms.append((options.probability_weight, reply.probability))
    return replace(draft, confidence=weighted_mean(terms))


def _agreement(answer: Answer, draws: Sequence[Reply]) -> float:
    """Share of the draws that say the same, without case and order; a failed draw agrees with nothing."""
    said = comparable(answer)
    return sum(isinstance(draw, Answer) and comparable(draw) == said for draw in draws) / len(draws)


def _ratings(question: Question, evidence: Sequence[Kept], draft: Draft, options: ClimbOptions) -> Steps:
    (reply,) = yield [_judge_call(CallKind.CONFIDENCE, question, evidence, draft, options)]
    if isinstance(reply, Rating):
        return replace(draft, confidence_scores=reply.scores, confidence_reasoning=reply.reasoning)
    assert isinstance(reply, Failure), f"a confidence call got {type(reply).__name__}"
    return draft


def _verdicts(question: Question, evidence: Sequence[Kept], draft: Draft, options: ClimbOptions) -> Steps:
    """Support by is_sup, specificity by is_use (inferred); consistency has no verdict of its own."""
    kinds = (CallKind.IS_SUP, CallKind.IS_USE)
    replies = yield [_judge_call(kind, question, evidence, draft, options) for kind in kinds]
    is_sup, is_use = replies
    if isinstance(is_sup, Judgement):
        draft = replace(draft, is_sup=is_sup.verdict, is_sup_reasoning=is_sup.reasoning)
    if isinstance(is_use, Judgement):
        draft = replace(draft, is_use=is_use.verdict, is_use_reasoning=is_use.reasoning)
    scores = tuple(
        graded(reply.verdict, reply.probability, JUDGEMENTS[kind])
        for kind, reply in zip(kinds, replies, strict=True)
        if isinstance(reply, Judgement)
    )
    return replace(draft, confidence_scores=scores) if len(scores) == len(kinds) else draft


def _judge_call(
    kind: CallKind, question: Question, evidence: Sequence[Kept], draft: Draft, options: ClimbOptions
) -> Call:
    return Call(
        kind,
        question.question,
        passages(evidence),
        answer=spoken(draft.answers),
        sampling=options.sampling(),
    )

"""The teacher's work on one question: chain-of-thought rows for every call kind, each checked against gold. Pure.

The recipe is SAM-RAG's section 3.3: query captions, is_rel on positives, is_rel on negatives, answers, is_use, is_sup,
each stage fed by what the last one kept. Ours in addition, each a switch: several samples per item until one passes,
bridge-aware positives, contexts of several documents, wrong answers, and refusals.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from samrag.calls import Answer, Call, CallKind, Caption, Composition, Failure, Judgement, Passage, Program, Reply
from samrag.metrics.answers import mmqa_list_em, mmqa_list_f1
from samrag.programs.steps import (
    Kept,
    SamplingOptions,
    answer_call,
    caption_for,
    passages,
    relevance_of_image,
    relevance_of_text,
    spoken,
)
from samrag.prompts.render import IMAGE_MARK
from samrag.replies import write_reply
from samrag.schema import Document, DroppedItem, Modality, Question, Verdict


@dataclass(frozen=True, slots=True)
class DistillOptions(SamplingOptions):
    """Options of the recipe."""

    temperature: float = 1.2
    """The paper's, for diverse replies."""
    num_samples: int = 3
    """Draws per item at most, until one passes its filter (the paper: one)."""
    bridge_positives: bool = True
    """Keep supports without the answer: is_rel True, is_sup Partial."""
    multi_document: bool = True
    """Also judge contexts as inference has them: all positives, some of them, positives among negatives."""
    refusals: bool = True
    """Also ask for answers from negatives alone, kept when the teacher says "not stated"."""
    wrong_forms: bool = True
    """Also put the right answer to is_use in a form that nobody asked for; the paper judges form, but trains none."""
    min_f1: float = 1.0
    """Least official list F1 of an answer with gold, in 0..1; 1 asks for exact match."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples is {self.num_samples}; it must be at least 1")
        if not 0 < self.min_f1 <= 1:
            raise ValueError(f"min_f1 is {self.min_f1}; it must lie above 0 and be at most 1")


@dataclass(frozen=True, slots=True)
class Passed:
    """A reply that agrees with gold: material for a training row."""

    call: Call
    doc_ids: tuple[str, ...]
    reply: Judgement | Answer | Caption
    filters: tuple[str, ...] = ()
    """The checks it passed."""

    @property
    def label(self) -> str:
        """The target's class: its verdict, `answer`, `abstain` or `caption`."""
        if isinstance(self.reply, Judgement):
            return str(self.reply.verdict)
        if isinstance(self.reply, Answer):
            return "answer" if self.reply.values else "abstain"
        return "caption"


@dataclass(frozen=True, slots=True)
class Distilled:
    """What one question gave."""

    question_id: str
    passed: tuple[Passed, ...]
    dropped: tuple[DroppedItem, ...]
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Replies that did not pass, by kind and reason, those included after which another draw passed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One thing to ask the teacher, and the replies that agree with gold."""

    call: Call
    doc_ids: tuple[str, ...]
    verdicts: Collection[Verdict] = ()
    answers: tuple[str, ...] | None = None
    """Gold for answer calls; () wants the teacher to say that it is not stated."""
    probe: tuple[Passage, ...] | None = None
    """For captions and image judgements: the reply's text, put before these passages, must lead to the gold answer."""

    @property
    def filters(self) -> tuple[str, ...]:
        """The checks a reply has to pass, in words that rows and the data card use."""
        checks = ["the reply's contract"]
        if self.verdicts:
            checks.append("verdict " + " or ".join(self.verdicts))
        if self.answers is not None:
            checks.append("answer matches gold" if self.answers else "says that it is not stated")
        if self.probe is not None:
            checks.append("what it says leads to gold")
        return tuple(checks)

    def accepts(self, reply: Reply, min_f1: float) -> bool:
        """Whether a reply agrees with gold, the probe aside."""
        if isinstance(reply, Judgement):
            return reply.verdict in self.verdicts
        if isinstance(reply, Answer):
            return matches(reply, self.answers or (), min_f1)
        return isinstance(reply, Caption)


def matches(reply: Reply, gold: tuple[str, ...], min_f1: float) -> bool:
    """Normalised, list-aware match: exact, or by F1 when `min_f1` is below 1; with no gold, an abstention."""
    if not isinstance(reply, Answer):
        return False
    if not gold:
        return not reply.values
    return mmqa_list_em(reply.values, gold) == 1.0 if min_f1 == 1.0 else mmqa_list_f1(reply.values, gold) >= min_f1


@dataclass(slots=True)
class _Recipe:
    """The stages for one question; holds what they have kept and dropped."""

    question: Question
    options: DistillOptions
    passed: list[Passed] = field(default_factory=list)
    dropped: list[DroppedItem] = field(default_factory=list)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Replies that did not pass, by kind and reason, those included after which another draw passed."""
    calls: list[Call] = field(default_factory=list)
    """What a plan would have asked."""

    def sampled(self, wanted: Sequence[Wanted]) -> Generator[list[Call], list[Reply], list[Passed | None]]:
        """Draw until each item passes or its samples are used up; what passed, in the order asked."""
        result: list[Passed | None] = [None] * len(wanted)
        reasons = [("", "")] * len(wanted)
        for index in range(self.options.num_samples):
            pending = [i for i, passed in enumerate(result) if passed is None]
            calls = [replace(wanted[i].call, sample_index=index) for i in pending]
            replies = yield calls
            probes = [
                (i, reply) for i, reply in zip(pending, replies, strict=True) if wanted[i].probe is not None
                and wanted[i].accepts(reply, self.options.min_f1)
            ]  # fmt: skip
            probed = yield [self._probe(wanted[i], _said(reply), index) for i, reply in probes]
            gold, min_f1 = self.question.answers, self.options.min_f1
            misled = {i for (i, _), reply in zip(probes, probed, strict=True) if not matches(reply, gold, min_f1)}
            for i, call, reply in zip(pending, calls, replies, strict=True):
                assert not isinstance(reply, Composition), f"a {call.kind} call got an interleaved answer"
                if isinstance(reply, Failure):
                    reasons[i] = (str(reply.reason), reply.detail)
                elif IMAGE_MARK in _said(reply):
                    reasons[i] = ("image_marker", _said(reply))  # a row would count it as an image
                elif not wanted[i].accepts(reply, min_f1):
                    reasons[i] = ("label_mismatch", _written(reply))
                elif i in misled:
                    reasons[i] = ("caption_misses_answer", _written(reply))
                else:
                    assert isinstance(reply, (Judgement, Answer, Caption)), f"a teacher item got {type(reply).__name__}"
                    result[i] = Passed(call, wanted[i].doc_ids, reply, wanted[i].filters)
                if result[i] is None:
                    self.refused[call.kind, reasons[i][0]] += 1
        for item, passed, (reason, detail) in zip(wanted, result, reasons, strict=True):
            if passed is None:
                self.dropped.append(
                    DroppedItem(
                        self.question.question_id,
                        item.call.kind,
                        item.doc_ids,
                        reason,
                        detail[:600],
                        ", ".join(item.filters),
                    )
                )
        self.passed += [passed for passed in result if passed is not None]
        return result

    def distilled(self) -> Distilled:
        """What came of the question."""
        return Distilled(self.question.question_id, tuple(self.passed), tuple(self.dropped), dict(self.refused))

    def _probe(self, item: Wanted, said: str, index: int) -> Call:
        shown = (Passage(item.call.title, said), *(item.probe or ()))
        return Call(
            CallKind.ANSWER, self.question.question, shown, sampling=self.options.sampling(), sample_index=index
        )

    def ask(self, kind: CallKind, context: Sequence[Kept], answer: str) -> Call:
        """Ask a judge about an answer."""
        return Call(kind, self.question.question, passages(context), answer=answer, sampling=self.options.sampling())


_INVENTED = "What a teacher would say here, in some thirty words, so that the prompts that show it are as long. " * 2


class _Plan(_Recipe):
    """A recipe whose teacher is always right at once: it asks nothing, and notes what it would have asked."""

    def sampled(self, wanted: Sequence[Wanted]) -> Generator[list[Call], list[Reply], list[Passed | None]]:
        """Invent replies that pass."""
        self.calls += [item.call for item in wanted]
        self.calls += [self._probe(item, _INVENTED, 0) for item in wanted if item.probe is not None]
        yield from ()
        return [Passed(item.call, item.doc_ids, self._invented(item)) for item in wanted]

    def _invented(self, item: Wanted) -> Judgement | Answer | Caption:
        if item.verdicts:
            return Judgement(next(iter(item.verdicts)), _INVENTED)
        return Caption(f"Shown: {_INVENTED}") if item.answers is None else Answer(item.answers, _INVENTED)


def _written(reply: Reply) -> str:
    """A reply for people to read, its verdict or answer included."""
    return write_reply(reply) if isinstance(reply, (Judgement, Answer, Caption)) else ""


def _said(reply: Reply) -> str:
    if isinstance(reply, Judgement):
        return reply.reasoning
    return reply.text if isinstance(reply, Caption) else spoken(reply.values) if isinstance(reply, Answer) else ""


@dataclass(frozen=True, slots=True)
class Material:
    """What the recipe is applied to: one question with its documents."""

    question: Question
    """With gold answers."""
    positives: Sequence[Document]
    """Its distinct supporting documents."""
    negatives: Sequence[Document]
    """Documents that are not supports, drawn from the top of a ranking."""
    wrong_answers: Sequence[str] = ()
    """Answers of other questions, for the judges to refuse; the paper has none."""


def distill(material: Material, options: DistillOptions) -> Program[Distilled]:
    """Yield the teacher's calls for one question, receive its replies, return what agrees with gold (section 3.3)."""
    return _follow(_Recipe(material.question, options), material)


def planned_calls(material: Material, options: DistillOptions) -> list[Call]:
    """The calls of `distill` when every item passes at its first sample: the plan, and the least it can cost."""
    plan = _Plan(material.question, options)
    for _ in _follow(plan, material):
        raise AssertionError("a plan asks nothing")
    return plan.calls


def _follow(recipe: _Recipe, material: Material) -> Program[Distilled]:
    """The stages, each fed by what the last one kept."""
    question, options, positives = recipe.question, recipe.options, material.positives
    if not options.bridge_positives:
        positives = [document for document in positives if document.doc_id in question.answer_bearing_ids]
    captions = yield from _captions(recipe, positives)
    kept, refused = yield from _relevance(recipe, positives, material.negatives, captions)
    if len(kept) < len(positives) or not kept:
        recipe.dropped.append(
            DroppedItem(
                question.question_id, CallKind.ANSWER, tuple(d.doc_id for d in positives), "positives_filtered_out"
            )
        )
        return recipe.distilled()
    contexts = _Contexts.of(question, kept, refused, captions, options)
    answered = yield from _answers(recipe, contexts)
    if answered:
        yield from _judges(recipe, contexts, material.wrong_answers)
    return recipe.distilled()


def _captions(recipe: _Recipe, positives: Sequence[Document]) -> Generator[list[Call], list[Reply], dict[str, str]]:
    """Stage 1: query captions of image positives, kept when the answer drawn from them is gold."""
    texts = tuple(Passage(d.title, d.text) for d in positives if d.modality is Modality.TEXT)
    images = [document for document in positives if document.modality is Modality.IMAGE]
    sampling = recipe.options.sampling()
    wanted = [
        Wanted(caption_for(recipe.question.question, image, sampling), (image.doc_id,), probe=texts) for image in images
    ]
    passed = yield from recipe.sampled(wanted)
    return {item.doc_ids[0]: _said(item.reply) for item in passed if item is not None}


def _relevance(
    recipe: _Recipe, positives: Sequence[Document], negatives: Sequence[Document], captions: dict[str, str]
) -> Generator[list[Call], list[Reply], tuple[list[Kept], list[Kept]]]:
    """Stages 2 and 3: is_rel of positives (True) and negatives (False); both sides as contexts show them."""
    question, sampling = recipe.question.question, recipe.options.sampling()
    texts = tuple(Passage(d.title, d.text) for d in positives if d.modality is Modality.TEXT)
    wanted = []
    for document in (*positives, *negatives):
        verdict = Verdict.TRUE if document in positives else Verdict.FALSE
        if document.modality is Modality.TEXT:
            call = relevance_of_text(question, Passage(document.title, document.text), sampling)
            wanted.append(Wanted(call, (document.doc_id,), (verdict,)))
        else:
            call = relevance_of_image(question, document, sampling)
            probe = texts if verdict is Verdict.TRUE else None
            wanted.append(Wanted(call, (document.doc_id,), (verdict,), probe=probe))
    two_step = [
        Wanted(
            relevance_of_text(question, Passage(document.title, captions[document.doc_id]), sampling),
            (document.doc_id,),
            (Verdict.TRUE,),
        )
        for document in positives
        if document.doc_id in captions
    ]
    passed = yield from recipe.sampled([*wanted, *two_step])
    kept: list[Kept] = []
    refused: list[Kept] = []
    for document, item in zip((*positives, *negatives), passed, strict=False):
        if item is None:
            continue
        shown = item.call.passages[0] if item.call.passages else Passage(document.title, _said(item.reply))
        (kept if document in positives else refused).append(Kept(document.doc_id, shown))
    return kept, refused


@dataclass(frozen=True, slots=True)
class _Contexts:
    """The contexts that answers and judges are shown."""

    whole: list[list[Kept]]
    """All positives: alone, with query captions in place of judgements, among negatives."""
    parts: list[list[Kept]]
    """Proper subsets of the positives."""
    silent: list[list[Kept]]
    """Contexts without the answer: negatives, or bridges alone."""
    negative: list[list[Kept]]
    """Negatives alone."""

    @classmethod
    def of(
        cls,
        question: Question,
        kept: list[Kept],
        refused: list[Kept],
        captions: dict[str, str],
        options: DistillOptions,
    ) -> _Contexts:
        rng = random.Random(f"{options.seed}:{question.question_id}")
        negative = [[item] for item in refused[:1]]
        if not options.multi_document:
            return cls([[item] for item in kept], [], negative if options.refusals else [], negative)
        captioned = [Kept(k.doc_id, Passage(k.passage.title, captions.get(k.doc_id, k.passage.text))) for k in kept]
        whole = [kept, *([captioned] if captioned != kept else [])]
        if refused:
            mixed = [*rng.choice(whole), *rng.sample(refused, rng.randint(1, len(refused)))]
            rng.shuffle(mixed)
            whole.append(mixed)
        if len(refused) > 1:
            negative.append(refused[:2])
        parts = [[item] for item in kept] if len(kept) > 1 else []
        silent = [[item] for item in kept if item.doc_id in question.bridge_ids and len(kept) > 1]
        if options.refusals:
            silent = [*silent, *negative]
        return cls(whole, parts, silent, negative)


def _ids(context: Sequence[Kept]) -> tuple[str, ...]:
    return tuple(kept.doc_id for kept in context)


def _answers(recipe: _Recipe, contexts: _Contexts) -> Generator[list[Call], list[Reply], bool]:
    """Stage 4: answers from the positives, kept when gold; and "not stated" from contexts without it."""
    sampling = recipe.options.sampling()
    gold = recipe.question.answers
    wanted = [Wanted(answer_call(recipe.question, c, sampling), _ids(c), answers=gold) for c in contexts.whole]
    wanted += [Wanted(answer_call(recipe.question, c, sampling), _ids(c), answers=()) for c in contexts.silent]
    passed = yield from recipe.sampled(wanted)
    return any(item is not None for item in passed[: len(contexts.whole)])


def _judges(
    recipe: _Recipe, contexts: _Contexts, wrong_answers: Sequence[str]
) -> Generator[list[Call], list[Reply], list[Passed | None]]:
    """Stages 5 and 6: is_use and is_sup of the gold answer and of wrong ones, on every kind of context."""
    gold = spoken(recipe.question.answers)
    plan: list[tuple[CallKind, list[Kept], str, tuple[Verdict, ...]]] = []
    plan += [(CallKind.IS_USE, context, gold, (Verdict.TRUE,)) for context in contexts.whole]
    # The paper shows single documents and takes True or Partial; a context known to lack a support can only be Partial.
    partly = (Verdict.PARTIAL,) if recipe.options.multi_document else (Verdict.TRUE, Verdict.PARTIAL)
    for context in contexts.whole:
        complete = set(recipe.question.support_ids) <= set(_ids(context))
        plan.append((CallKind.IS_SUP, context, gold, (Verdict.TRUE,) if complete else partly))
    plan += [(CallKind.IS_SUP, context, gold, (Verdict.PARTIAL,)) for context in contexts.parts]
    for kind in (CallKind.IS_USE, CallKind.IS_SUP):
        plan += [(kind, context, gold, (Verdict.FALSE,)) for context in contexts.negative]
        plan += [
            (kind, contexts.whole[i % len(contexts.whole)], wrong, (Verdict.FALSE,))
            for i, wrong in enumerate(wrong_answers)
        ]
    if recipe.options.wrong_forms:
        plan.append((CallKind.IS_USE, contexts.whole[0], _misworded(recipe.question), (Verdict.FALSE,)))
    return (
        yield from recipe.sampled(
            [
                Wanted(recipe.ask(kind, context, answer), _ids(context), verdicts)
                for kind, context, answer, verdicts in plan
            ]
        )
    )


def _misworded(question: Question) -> str:
    """The right answer in a form that is not the shortest: a sentence, hedged or padded, drawn by the question's id."""
    answer = spoken(question.answers)
    forms = (
        f"The answer to the question is {answer}.",
        f"According to the documents it would be {answer}, as far as one can see.",
        f"It is {answer}; the documents say so, and nothing else is known of it.",
    )
    return random.Random(f"form:{question.question_id}").choice(forms)

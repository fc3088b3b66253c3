"""Records that the stages exchange. Pure: no I/O, no third-party import.

A record has one type, here. Stages meet in JSONL files of these records (`samrag.files` reads and writes them);
a plain dict crosses a function boundary only at the file edge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Modality(StrEnum):
    """What a document is made of."""

    TEXT = "text"
    IMAGE = "image"


class Language(StrEnum):
    """A language that answers are written and scored in."""

    EN = "en"
    ZH = "zh"


class Verdict(StrEnum):
    """Outcome of a verification (SAM-RAG, Table 1). PARTIAL exists for is_sup only."""

    TRUE = "True"
    PARTIAL = "Partial"
    FALSE = "False"


class ExitReason(StrEnum):
    """Why a program stopped working on a question."""

    ANSWERED = "answered"  # no verification was asked for, or the last one asked for passed
    VERIFIED = "verified"  # is_sup was True
    BEST_EFFORT = "best_effort"  # documents ran out; the best partly supported draft is returned
    UNVERIFIED = "unverified"  # returned although no check passed: is_use kept refusing, or on request at the end
    NO_EVIDENCE = "no_evidence"  # documents ran out and nothing in them supports an answer: abstained
    NO_DOCUMENTS = "no_documents"  # the ranking was empty
    ENGINE_FAILURE = "engine_failure"  # the model gave no usable reply where one was needed
    TARGET = "target"  # the confidence reached U_STAR
    MAX_ITERATIONS = "max_iter"  # the last round allowed is over
    NO_FACET = "no_facet"  # the evidence lacks nothing that could be named
    NO_NEW_EVIDENCE = "no_new_evidence"  # the pool holds no other evidence
    REJECTED = "rejected"  # a refined answer did not raise the confidence


@dataclass(frozen=True, slots=True)
class Document:
    """One retrievable unit: a paragraph or an image."""

    doc_id: str
    modality: Modality
    title: str
    text: str = ""
    """The paragraph; empty for images."""
    image: str | None = None
    """Image path relative to the folder of the documents file; None for texts."""
    caption: str | None = None
    """Raw caption d_rc: query-free, for indexing only (SAM-RAG, section 3.4.1)."""
    url: str = ""

    def __post_init__(self) -> None:
        if self.modality is Modality.IMAGE and not self.image:
            raise ValueError(f"document {self.doc_id!r} is an image but has no image path")

    @property
    def retrieval_text(self) -> str:
        """What the retriever embeds: the title, then the paragraph or the raw caption."""
        body = self.text if self.modality is Modality.TEXT else (self.caption or "")
        return f"{self.title}. {body}".strip() if body else self.title


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its gold labels."""

    question_id: str
    question: str
    answers: tuple[str, ...]
    """The gold list, one reference (MultiModalQA); empty when the split has no labels."""
    question_type: str
    split: str
    support_ids: tuple[str, ...] = ()
    """Distinct supporting documents, in file order."""
    answer_bearing_ids: tuple[str, ...] = ()
    """The supports that contain the answer; the others are bridges."""
    candidate_ids: tuple[str, ...] = ()
    """Documents of the question's own list (the distractor setting), supports included."""
    modalities: tuple[Modality, ...] = ()
    """Modalities of the supports."""
    hops: int = 1

    @property
    def bridge_ids(self) -> tuple[str, ...]:
        """Supports without the answer."""
        return tuple(i for i in self.support_ids if i not in self.answer_bearing_ids)


@dataclass(frozen=True, slots=True)
class InterleavedQuestion:
    """One question whose answer is text with images, and the documents it was retrieved with."""

    question_id: str
    question: str
    documents: tuple[Document, ...]
    """In order, each text before its images. Texts are numbered from 1, and so are the images, over all documents."""
    language: Language
    reference: str = ""
    """Gold answer: Markdown with `![alt](IMG#k)` and `<sup>[n](DOC#n)</sup>`; empty without gold, as all below."""
    topic: str = ""
    question_type: str = ""
    """what-is, how-to, yes-or-no or head-to-head, where the data set tells."""
    split: str = ""

    @property
    def texts(self) -> tuple[Document, ...]:
        """The texts, as citations number them."""
        return tuple(document for document in self.documents if document.modality is Modality.TEXT)

    @property
    def images(self) -> tuple[Document, ...]:
        """The candidate images, as references number them."""
        return tuple(document for document in self.documents if document.modality is Modality.IMAGE)


@dataclass(frozen=True, slots=True)
class Usage:
    """What answering cost. Calls answered from a store count as calls, and as cached calls."""

    calls: int = 0
    cached_calls: int = 0
    failures: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.cached_calls + other.cached_calls,
            self.failures + other.failures,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class ExaminedDocument:
    """One document a program looked at, and what it decided."""

    doc_id: str
    batch: int
    kept: bool
    """True when the document entered the context C at that time."""
    verdict: Verdict | None = None
    """is_rel; None when relevance was not asked or the call failed."""
    reasoning: str = ""
    """The reasoning of the verdict; for images it (or the query caption) is what the context holds."""
    probability: float | None = None
    failure: str = ""
    """Reason of the failed call; a failure is never a verdict."""
    scores: tuple[float, ...] = ()
    """The critic's numbers (CLIMB): relevance, specificity and, where an image was shown, alignment."""
    score: float | None = None
    """What the evidence is ranked by (CLIMB); None: it cannot be evidence."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One generated answer with the verdicts that judged it, and no other answer."""

    answers: tuple[str, ...]
    """Empty: the model said that its content does not state the answer."""
    reasoning: str
    context_ids: tuple[str, ...]
    batch: int
    regeneration: int = 0
    is_use: Verdict | None = None
    is_use_reasoning: str = ""
    is_sup: Verdict | None = None
    is_sup_reasoning: str = ""
    failure: str = ""
    confidence: float | None = None
    """U (CLIMB), from 0 to 1; None: not asked for, or a call it needs failed."""
    confidence_scores: tuple[float, ...] = ()
    """The terms of U that were rated: support, specificity, consistency."""
    confidence_reasoning: str = ""
    facet: str = ""
    """What the draft before lacked or had wrong; empty for a first draft, and without a diagnosis."""
    accepted: bool | None = None
    """Whether it became the answer (CLIMB); None: the program has no such step."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything a program did for one question."""

    question_id: str
    method: str
    answers: tuple[str, ...]
    """The final answer; empty when the program abstained."""
    exit_reason: ExitReason
    context_ids: tuple[str, ...]
    """The final context C: what ARN counts."""
    documents: tuple[ExaminedDocument, ...] = ()
    drafts: tuple[Draft, ...] = ()
    usage: Usage = field(default_factory=Usage)
    confidence: float | None = None
    """U of the final answer (CLIMB); it orders answers, and is no probability."""


@dataclass(frozen=True, slots=True)
class InterleavedTrace:
    """Everything a program did for one question that is answered with text and images."""

    question_id: str
    method: str
    markdown: str
    """The final answer, its references checked; empty when the program abstained."""
    exit_reason: ExitReason
    texts: tuple[str, ...]
    """Ids of the texts that were retrieved, in the order that DOC#n counts them, kept or not."""
    images: tuple[str, ...]
    """Ids of the images that were retrieved, in the order that IMG#k counts them, kept or not."""
    context_ids: tuple[str, ...]
    """The documents the answer was written from."""
    problems: tuple[str, ...] = ()
    """References that were flagged or dropped: of the draft that is the answer, or of the last one when none is."""
    documents: tuple[ExaminedDocument, ...] = ()
    drafts: tuple[Draft, ...] = ()
    """Each draft's one answer is its Markdown."""
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `<image>` marks where an image stands (LLaMA-Factory's sharegpt form)."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ("system", "user", "assistant"):
            raise ValueError(f"role is {self.role!r}; it must be system, user or assistant")


@dataclass(frozen=True, slots=True)
class SftRow:
    """One training row for the student: `messages` + `images`, with where it came from."""

    messages: tuple[ChatMessage, ...]
    images: tuple[str, ...]
    """Paths relative to the image root (by default the folder of the SFT file)."""
    kind: str
    label: str
    """The target's verdict, or `answer`, `abstain`, `caption`."""
    question_id: str
    doc_ids: tuple[str, ...]
    template: str
    """Hash of the prompt templates the row was rendered with."""
    direct: bool = False
    """The target is the verdict alone, without reasoning."""
    call_key: str = ""
    """Key of the teacher's reply in the call store."""
    teacher: str = ""
    """Model that wrote the target."""
    teacher_template: str = ""
    """Hash of the templates the teacher was asked with."""
    filters: tuple[str, ...] = ()
    """Checks against gold that the reply passed."""

    def __post_init__(self) -> None:
        markers = sum(message.content.count("<image>") for message in self.messages)
        if markers != len(self.images):
            raise ValueError(
                f"row of question {self.question_id!r} has {markers} <image> markers for {len(self.images)} images"
            )
        if not self.messages or self.messages[-1].role != "assistant":
            raise ValueError(f"row of question {self.question_id!r} must end with an assistant message")


@dataclass(frozen=True, slots=True)
class DroppedItem:
    """One teacher item that did not become a row, and why."""

    question_id: str
    kind: str
    doc_ids: tuple[str, ...]
    reason: str
    detail: str = ""
    wanted: str = ""
    """What the filters asked of the reply."""
    replay: str = ""
    """For an item without a usable reply: the command that tries its question again."""


@dataclass(frozen=True, slots=True)
class RetrieverRow:
    """One row in FlagEmbedding's format, with ids and scores beside the texts."""

    query: str
    pos: tuple[str, ...]
    neg: tuple[str, ...]
    query_id: str = ""
    pos_ids: tuple[str, ...] = ()
    neg_ids: tuple[str, ...] = ()
    pos_scores: tuple[float, ...] = ()
    neg_scores: tuple[float, ...] = ()
    neg_rankers: tuple[str, ...] = ()
    """Which ranker each negative was drawn from."""
    promoted_ids: tuple[str, ...] = ()
    """Positives without a label in the data: the teacher found them among the negatives."""

    def __post_init__(self) -> None:
        if not self.pos:
            raise ValueError(f"query {self.query!r} has no positive")
        overlap = set(self.pos_ids) & set(self.neg_ids)
        if overlap:
            raise ValueError(f"query {self.query!r}: {sorted(overlap)[0]!r} is both a positive and a negative")

"""A page of samples of teacher data: what a person looks at before a student is trained on it.

One file, no network. All text is data: it is escaped, and the page's policy lets no script run but its own. Shown are
at most so many items for each kind, label and fate, drawn by seed. Left out: rows that teach the verdict alone where
their reasoned twins are there, because they say the same.
"""

from __future__ import annotations

import base64
import hashlib
import html
import random
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from samrag.calls import CallKind
from samrag.files import write_text
from samrag.programs.steps import spoken
from samrag.replies import extract_object
from samrag.report.pages import Pictures, Thumbnails, environment
from samrag.schema import Document, DroppedItem, Modality, Question, SftRow

PICTURE_PX = 240
MAX_TEXT = 1500
"""Characters of a document that are shown."""

REASONS = {
    "label_mismatch": "it does not agree with gold",
    "caption_misses_answer": "what it says does not lead to the gold answer",
    "image_marker": "it holds an image marker, which a row would count as an image",
    "positives_filtered_out": "a support was lost at an earlier step, so nothing was asked",
}
"""Reasons for a drop, in words; others are shown as they are."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DocumentView:
    """One document of a sample."""

    title: str
    text: str
    picture: int | None
    """Place in the page's list of pictures."""
    is_image: bool
    role: str
    """`gold`, `bridge`, or empty for a document that is no support."""


@dataclass(frozen=True, slots=True)
class SampleView:
    """One row, or one dropped item."""

    kept: bool
    kind: str
    label: str
    """Empty for a dropped item."""
    question: str
    gold: str
    question_id: str
    documents: tuple[DocumentView, ...]
    why: str
    """The filters it passed, or the reason why it was dropped."""
    response: str = ""
    reasoning: str = ""
    judged: str = ""
    """The answer that was put to a judge."""
    prompt: str = ""
    detail: str = ""
    """What the teacher said, of a dropped item."""
    replay: str = ""


@dataclass(frozen=True, slots=True)
class _Sources:
    """What samples refer to."""

    questions: Mapping[str, Question]
    documents: Mapping[str, Document]
    pictures: Pictures


def write_samples(
    path: Path,
    rows: Sequence[SftRow],
    dropped: Sequence[DroppedItem],
    questions: Iterable[Question],
    documents: Iterable[Document],
    image_root: Path,
    *,
    per_group: int = 12,
    seed: int = 0,
) -> None:
    """Write the page.

    Args:
        path: of the page, such as `samples.html` beside `sft.jsonl`.
        rows: the training rows.
        dropped: the items that became no row.
        questions: that rows and items belong to.
        documents: that they show.
        image_root: folder of the documents' images.
        per_group: rows shown per kind and label at most, and dropped items per kind and reason.
        seed: of the draws.
    """
    thumbnails = Thumbnails(Path(image_root), PICTURE_PX)
    sources = _Sources(
        {question.question_id: question for question in questions},
        {document.doc_id: document for document in documents},
        Pictures(thumbnails),
    )
    write_text(path, render_samples(rows, dropped, sources, per_group, seed))


def render_samples(
    rows: Sequence[SftRow], dropped: Sequence[DroppedItem], sources: _Sources, per_group: int, seed: int
) -> str:
    """The whole page; see `write_samples`."""
    reasoned = {(row.kind, row.label) for row in rows if not row.direct}
    telling = [row for row in rows if not row.direct or (row.kind, row.label) not in reasoned]
    samples = [_row_view(row, sources) for row in _drawn(telling, ("kind", "label"), per_group, seed)]
    samples += [_dropped_view(item, sources) for item in _drawn(dropped, ("kind", "reason"), per_group, seed)]
    order = {str(kind): place for place, kind in enumerate(CallKind)}
    samples.sort(key=lambda s: (order.get(s.kind, len(order)), s.kind, not s.kept, s.label, s.why if s.label else ""))
    made, lost = Counter(row.kind for row in rows), Counter(item.kind for item in dropped)
    kinds = sorted({*made, *lost}, key=lambda kind: (order.get(kind, len(order)), kind))
    script = environment().get_template("samples.js.jinja").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        environment()
        .get_template("samples.html.jinja")
        .render(
            samples=samples,
            counts=[(kind, made[kind], lost[kind]) for kind in kinds],
            labels=sorted({sample.label for sample in samples if sample.label}),
            reasons=Counter(item.reason for item in dropped).most_common(),
            num_rows=len(rows),
            num_dropped=len(dropped),
            per_group=per_group,
            pictures=sources.pictures.uris,
            script=script,
            script_hash=digest,
        )
    )


def _drawn(items: Sequence[T], names: Sequence[str], most: int, seed: int) -> list[T]:
    """At most `most` items of each group, in their order; a group's draw depends on nothing outside it."""
    groups: dict[tuple[Hashable, ...], list[T]] = defaultdict(list)
    for item in items:
        groups[tuple(str(getattr(item, name)) for name in names)].append(item)
    drawn = []
    for group, members in groups.items():
        places = random.Random(f"samples:{seed}:{group}").sample(range(len(members)), min(most, len(members)))
        drawn += [members[place] for place in sorted(places)]
    return drawn


def _row_view(row: SftRow, sources: _Sources) -> SampleView:
    reply = extract_object(row.messages[-1].content) or {"Response": row.messages[-1].content}
    response = reply.get("Response", "")
    prompt = "\n".join(message.content for message in row.messages[:-1])
    judged = re.search(r"<answer>\n(.*?)\n</answer>\s*$", prompt, re.DOTALL)
    question, gold = _asked(row.question_id, sources)
    return SampleView(
        kept=True,
        kind=row.kind,
        label=row.label,
        question=question,
        gold=gold,
        question_id=row.question_id,
        documents=_document_views(row.question_id, row.doc_ids, sources),
        why="; ".join(row.filters),
        response=spoken([str(item) for item in response]) if isinstance(response, list) else str(response),
        reasoning=str(reply.get("Reasoning", "")),
        judged=html.unescape(judged.group(1)) if judged else "",
        prompt=prompt,
    )


def _dropped_view(item: DroppedItem, sources: _Sources) -> SampleView:
    question, gold = _asked(item.question_id, sources)
    return SampleView(
        kept=False,
        kind=item.kind,
        label="",
        question=question,
        gold=gold,
        question_id=item.question_id,
        documents=_document_views(item.question_id, item.doc_ids, sources),
        why=REASONS.get(item.reason, item.reason.replace("_", " "))
        + (f"; wanted: {item.wanted}" if item.wanted else ""),
        detail=item.detail,
        replay=item.replay,
    )


def _asked(question_id: str, sources: _Sources) -> tuple[str, str]:
    question = sources.questions.get(question_id)
    return (question.question, spoken(question.answers)) if question else ("This question is not in the file.", "")


def _document_views(question_id: str, doc_ids: Sequence[str], sources: _Sources) -> tuple[DocumentView, ...]:
    question = sources.questions.get(question_id)
    views = []
    for doc_id in doc_ids:
        document = sources.documents.get(doc_id)
        role = "" if question is None or doc_id not in question.support_ids else "gold"
        if role and question is not None and doc_id in question.bridge_ids:
            role = "bridge"
        if document is None:
            views.append(DocumentView(doc_id, "This document is not in the documents file.", None, False, role))
            continue
        cut = f"{document.text[:MAX_TEXT]} [...]" if len(document.text) > MAX_TEXT else document.text
        is_image = document.modality is Modality.IMAGE
        views.append(DocumentView(document.title, cut, sources.pictures.place(document), is_image, role))
    return tuple(views)

"""The page of a study: self-contained, and no text of a trace is ever markup."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from samrag.miniworld import drawing, language, world
from samrag.report.page import render_page
from samrag.report.pages import Thumbnails
from samrag.report.scores import Cell, CellKey, Checks, Method, Study, evaluate
from samrag.schema import (
    Document,
    Draft,
    ExaminedDocument,
    ExitReason,
    Modality,
    Question,
    Trace,
    Usage,
    Verdict,
)

VOID = {"meta", "img", "br", "input"}
FIELDS = (
    "title text question gold answer reasoning draft-answer draft-reasoning use-reasoning sup-reasoning failure "
    "question-id draft-failure unknown-doc".split()
)


def hostile(field: str) -> str:
    return f"<script>alert('{field}')</script>\"><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Elements, attributes and text of a page; checks that what is opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str, css_class: str = "") -> int:
        return sum(t == tag and (not css_class or css_class in (a.get("class") or "").split()) for t, a in self.tags)


def _trace(question_id: str, method: str) -> Trace:
    draft = Draft(
        (hostile("draft-answer"),), hostile("draft-reasoning"), ("t", "e"), 0, 1,
        Verdict.FALSE, hostile("use-reasoning"), Verdict.PARTIAL, hostile("sup-reasoning"),
    )  # fmt: skip
    failed = Draft((), "", ("t",), 1, failure=hostile("draft-failure"))
    documents = (
        ExaminedDocument("t", 0, True, Verdict.TRUE, hostile("reasoning"), 0.5),
        ExaminedDocument("e", 0, True, Verdict.TRUE, "an emblem", float("nan")),
        ExaminedDocument(hostile("unknown-doc"), 1, False, failure=hostile("failure")),
    )
    answers = (hostile("answer"),)
    return Trace(question_id, method, answers, ExitReason.BEST_EFFORT, ("t", "e"), documents, (draft, failed), Usage(7))


@pytest.fixture
def study(tmp_path: Path) -> Study:
    emblem = world.draw_clubs(world.Split.TEST, 1, seed=0)[0].emblem
    drawing.draw(emblem).save(tmp_path / "e.png")
    documents = [
        Document("t", Modality.TEXT, hostile("title"), hostile("text")),
        Document("e", Modality.IMAGE, "Emblem", image="e.png", caption=language.raw_caption(emblem)),
    ]
    questions = tuple(
        Question(
            f"{i}{hostile('question-id')}", hostile("question"), (hostile("gold"),), "", "test", ("e",), (), (), (m,)
        )
        for i, m in enumerate([Modality.TEXT, Modality.IMAGE] * 3)
    )
    cells = tuple(
        Cell(CellKey(method, method, "R*", "M*", checks), tuple(_trace(q.question_id, method) for q in questions))
        for method, checks in ((Method.SAM_RAG, Checks.ALL), (Method.RAG, Checks.RAG))
    )
    return Study(cells, questions, {d.doc_id: d for d in documents}, tmp_path, (), teacher_is_simulated=True)


def _render(study: Study, **options: int) -> str:
    return render_page(study, evaluate(study), {"recall": "data:image/svg+xml;base64,"}, **options)


def test_every_text_is_shown_and_none_is_markup(study: Study) -> None:
    source = _render(study)
    page = Page(source)
    for field in FIELDS:
        assert hostile(field) in page.text, field
    assert "<script>alert" not in source and "<img src=x" not in source
    assert page.count("script") == 1
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]


def test_rounds_of_refinement_are_shown_with_their_confidence(study: Study) -> None:
    draft = Draft(
        ("old",), "r", ("t",), 0, confidence=0.5, confidence_reasoning=hostile("confidence-reasoning"), accepted=True
    )
    refused = Draft(("new",), "r", ("e",), 1, facet=hostile("facet"), confidence=0.25, accepted=False)
    seen = ExaminedDocument("t", 0, True, reasoning="rated", scores=(0.7, 0.8), score=0.75)
    cells = tuple(
        Cell(
            CellKey(checks, method, "R*", "M*", checks),
            tuple(
                Trace(q.question_id, method, ("old",), ExitReason.REJECTED, ("t",), (seen,), (draft, refused))
                for q in study.questions
            ),
        )
        for method, checks in ((Method.SAM_RAG, Checks.ALL), (Method.CLIMB, Checks.CLIMB))
    )
    page = Page(_render(replace(study, cells=cells)))
    for shown in ("CLIMB(R*+M*)", "0.75", "0.50", "0.25, not accepted", "no gain", "Ablation of CLIMB"):
        assert shown in page.text
    assert hostile("facet") in page.text and hostile("confidence-reasoning") in page.text


def test_nothing_is_loaded_from_elsewhere(study: Study) -> None:
    source = _render(study)
    links = [a[k] or "" for _, a in Page(source).tags for k in ("src", "href", "srcset", "data", "action") if k in a]
    assert links
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|\bimport\b\s*\(", source)
    assert "<link" not in source


def test_a_picture_used_by_many_traces_is_held_once(study: Study) -> None:
    source = _render(study)
    uri = Thumbnails(study.image_root).uri(study.documents["e"])
    assert uri is not None and source.count(uri) == 1
    assert Page(source).count("img", "thumb") == 2 * len(study.questions)
    small = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
    assert max(small.size) <= 96


@pytest.mark.parametrize("path", ["missing.png", "broken.png", "../outside.png", "/etc/hostname"])
def test_a_picture_that_cannot_or_may_not_be_read_leaves_a_frame(study: Study, path: str) -> None:
    (study.image_root / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    drawing.draw(world.draw_clubs(world.Split.TEST, 1, seed=0)[0].emblem).save(study.image_root.parent / "outside.png")
    documents = {**study.documents, "e": replace(study.documents["e"], image=path)}
    page = Page(_render(replace(study, documents=documents)))
    assert page.count("img", "thumb") == 0
    assert page.count("span", "none") == 2 * len(study.questions)


def test_at_most_as_many_traces_and_bytes_as_asked_for(study: Study) -> None:
    assert Page(_render(study)).count("details", "question") == 6
    assert Page(_render(study, max_traces=4)).count("details", "question") == 4
    bare = _render(study, max_traces=0)
    assert Page(bare).count("details", "question") == 0
    limit = (len(bare) + len(_render(study))) // 2
    limited = _render(study, max_bytes=limit)
    assert len(limited.encode()) <= limit
    assert 0 < Page(limited).count("details", "question") < 6
    assert "of 6 questions, spread evenly" in limited


def test_the_simulated_teacher_is_named_exactly_when_there_is_one(study: Study) -> None:
    assert "simulated teacher" in _render(study)
    assert "simulated teacher" not in _render(replace(study, teacher_is_simulated=False))


def test_missing_traces_and_missing_cells_are_shown_as_such(study: Study) -> None:
    main, other = study.cells
    page = Page(_render(replace(study, cells=(Cell(main.key, main.traces[1:]), other))))
    assert page.count("span", "s-missing") == 2
    alone = Page(_render(replace(study, cells=(other,))))
    assert alone.count("div", "trace") == len(study.questions)
    assert alone.count("span", "mark") == 8 and "not measured" in alone.text
    assert Page(_render(replace(study, cells=()))).count("details", "question") == 0

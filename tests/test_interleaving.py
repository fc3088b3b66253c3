"""Drafts, a person's page, filters and rows: nothing is invented or lost in silence, and the page runs as it is."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import data_gen.interleave as script
from samrag.arguments import InterleaveArguments, TeacherArguments
from samrag.asking import interleave_stage
from samrag.calls import INTERLEAVED_KINDS, Passage
from samrag.engines.base import RawReply, Request
from samrag.errors import UserError
from samrag.files import read_records, sha256, write_records
from samrag.interleaved import read_output
from samrag.interleaving import (
    FORMAT,
    Refinement,
    TeacherDraft,
    arranged,
    blocks_of,
    read_refinements,
    rows_of,
)
from samrag.prompts import PromptStyle, template_hash
from samrag.replies import write, write_composition
from samrag.report.refining import refining_page
from samrag.schema import Document, DroppedItem, Language, Modality, Verdict
from samrag.training.sft import load_rows

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MARKDOWN = (
    "Open it. ![box](IMG#1) Then:\n\n1. Lift </script> it.<sup>[1](DOC#1)</sup>\n![bowl](IMG#3)\n\n| a | ![t](IMG#2) |"
)
PASSAGES = tuple(Passage(f"{name} t", "words") for name in ("DOC#1", "IMG#1", "IMG#2", "IMG#3"))
DRAFT = TeacherDraft(
    "q1",
    "How <b>?",
    Language.EN,
    MARKDOWN,
    "verified",
    "because",
    "how-to",
    PASSAGES,
    context_ids=("d", "a", "b", "c"),
    images=("a", "b", "c"),
)
ORDER = [0, 1, 2, 3, 4, 5]
ARGUMENTS = {"stage": "rows", "data_file": "d", "language": Language.EN, "image_root": "i", "output_dir": "o"}


def arguments(**more: Any) -> InterleaveArguments:
    return InterleaveArguments(**(ARGUMENTS | more))


# --- blocks ---


def test_a_draft_is_cut_into_paragraphs_and_images_and_a_table_stays_whole() -> None:
    blocks = blocks_of(DRAFT)
    assert [(block.kind, block.index) for block in blocks] == [
        *(("text", 0), ("image", 1), ("text", 0), ("text", 0), ("image", 3), ("text", 0)),
    ]
    assert blocks[-1].markdown == "| a | ![t](IMG#2) |"
    assert arranged(DRAFT, ORDER) == MARKDOWN


def test_images_move_and_go_and_words_stay() -> None:
    assert arranged(DRAFT, [0, 2, 4, 3, 5]) == (
        "Open it. \n\n Then:\n\n![bowl](IMG#3)\n\n1. Lift </script> it.<sup>[1](DOC#1)</sup>\n\n| a | ![t](IMG#2) |"
    )


@pytest.mark.parametrize("order", [[0, 2, 3], [2, 0, 3, 5], [0, 1, 1, 2, 3, 5], [0, 2, 3, 5, 6], [-1, 0, 2, 3, 5]])
def test_an_order_that_would_change_the_words_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match=r"missing|twice|exist"):
        arranged(DRAFT, order)


@given(st.lists(st.sampled_from(["a b", "\n\n", "![x](IMG#1)", "![y](IMG#2)", "\n", "| c |", "![z](IMG#9)", "* d"])))
def test_every_word_and_image_is_in_one_block_and_the_whole_order_changes_nothing(parts: list[str]) -> None:
    draft = replace(DRAFT, markdown="".join(parts))
    blocks = blocks_of(draft)
    joined = "".join(block.markdown for block in blocks)
    assert re.sub(r"\s", "", joined) == re.sub(r"\s", "", draft.markdown)
    assert arranged(draft, range(len(blocks))) == draft.markdown


# --- the export ---


def export(path: Path, *items: dict[str, Any], drafts: str = "hash", **more: Any) -> Path:
    path.write_text(json.dumps({"format": FORMAT, "drafts": drafts, "items": list(items), **more}), encoding="utf-8")
    return path


def item(question_id: str = "q1", decision: str = "accept", order: Sequence[object] = ORDER) -> dict[str, Any]:
    return {"question_id": question_id, "decision": decision, "order": list(order)}


def test_decisions_come_back_and_open_ones_are_none(tmp_path: Path) -> None:
    drafts = [DRAFT, replace(DRAFT, question_id="q2"), replace(DRAFT, question_id="q3")]
    items = (item(order=[0, 2, 3, 5]), item("q2", "reject"), item("q3", "open"))
    found = read_refinements([export(tmp_path / "x.json", *items)], drafts, "hash")
    assert {i: refinement.accepted for i, refinement in found.items()} == {"q1": True, "q2": False}
    assert "IMG#1" not in found["q1"].markdown


@pytest.mark.parametrize(
    ("items", "more", "message"),
    [
        ([item("q9")], {}, "no such draft"),
        ([item(order=[0])], {}, "a text is missing"),
        ([item(order=["0", 2, 3, 5])], {}, "order"),
        ([item(decision="yes")], {}, "decision"),
        ([item() | {"markdown": "other"}], {}, "markdown"),
        ([item(), item()], {}, "decided before"),
        ([item()], {"drafts": "other"}, "other drafts"),
        ([item()], {"format": "x"}, "format"),
    ],
)
def test_an_export_that_cannot_be_meant_is_refused_by_name(
    tmp_path: Path, items: list[dict[str, Any]], more: dict[str, Any], message: str
) -> None:
    path = export(tmp_path / "x.json", *items, **more)
    with pytest.raises(UserError, match=message) as refused:
        read_refinements([path], [DRAFT], "hash")
    assert "x.json" in str(refused.value)


def test_a_cut_export_is_refused(tmp_path: Path) -> None:
    path = export(tmp_path / "x.json", item())
    path.write_text(path.read_text()[:40])
    with pytest.raises(UserError, match="not valid JSON"):
        read_refinements([path], [DRAFT], "hash")


# --- filters and rows ---


def test_an_accepted_draft_becomes_a_row_with_the_students_prompt() -> None:
    draft = replace(DRAFT, call_key="k", teacher="g")
    markdown = arranged(draft, [0, 2, 3, 4, 5])
    (row,), dropped = rows_of([draft], {"q1": Refinement("q1", True, markdown)}, arguments())
    assert not dropped
    assert row.kind == INTERLEAVED_KINDS[Language.EN]
    assert (row.label, row.images, row.doc_ids, row.call_key, row.teacher) == (
        "answer",
        (),
        draft.context_ids,
        "k",
        "g",
    )
    assert row.template == template_hash(PromptStyle.STUDENT, row.kind)
    assert "images rearranged by a person" in row.filters
    read = read_output(row.messages[1].content)
    assert (read.markdown, read.reason, read.category, read.problems) == (markdown, "because", "how-to", ())
    assert "IMG#3 t" in row.messages[0].content


@pytest.mark.parametrize(
    ("change", "refinement", "options", "reason"),
    [
        ({"markdown": ""}, None, {}, "no_answer"),
        ({}, None, {}, "not_reviewed"),
        ({}, Refinement("q1", False, MARKDOWN), {}, "rejected"),
        ({"passages": PASSAGES[:2]}, Refinement("q1", True, MARKDOWN), {}, "bad_reference"),
        ({"reason": "<image>"}, Refinement("q1", True, MARKDOWN), {}, "image_marker"),
        ({}, Refinement("q1", True, "Words."), {}, "too_few_images"),
        ({}, Refinement("q1", True, MARKDOWN), {"min_citations": 2}, "too_few_citations"),
        ({"reference": "![x](IMG#2)"}, Refinement("q1", True, MARKDOWN), {"min_image_f1": 0.9}, "images_unlike_gold"),
    ],
)
def test_every_other_draft_is_named_with_its_reason(
    change: dict[str, Any], refinement: Refinement | None, options: dict[str, Any], reason: str
) -> None:
    found = {"q1": refinement} if refinement else {}
    rows, (dropped,) = rows_of([replace(DRAFT, **change)], found, arguments(**options))
    assert (rows, dropped.reason, dropped.question_id) == ([], reason, "q1")


# --- the page ---


def page(folder: Path) -> str:
    Image.new("RGB", (30, 20), "red").save(folder / "a.png")
    documents = {i: Document(i, Modality.IMAGE, i, image=f"{i}.png") for i in "abc"}
    return refining_page([DRAFT, replace(DRAFT, question_id="q2")], documents, folder, "hash")


def test_the_page_loads_nothing_and_holds_its_data_as_data(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert not re.search(r"""(?:src|href)=["']?(?!data:)\w""", text.split('id="data"')[0])
    assert "default-src 'none'" in text
    assert text.count("</script>") == 2


def dom(path: Path) -> str:
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={path.parent / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=90, check=True
    )
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_in_a_browser_the_page_runs_under_its_own_policy_and_shows_text_as_text(tmp_path: Path) -> None:
    path = tmp_path / "refine.html"
    path.write_text(page(tmp_path), encoding="utf-8")
    shown = dom(path)
    assert "0 of 2 decided" in shown
    assert "<h2>How &lt;b&gt;?</h2>" in shown
    assert "1. Lift &lt;/script&gt; it." in shown
    assert shown.count('src="data:image/jpeg;base64,') == 2
    assert shown.count("no picture") >= 2


CLICKS = """
const press = (place, label, nth = 0) =>
  [...document.querySelectorAll(`#item-${place} button`)].filter((b) => b.textContent === label)[nth].click();
press(0, "Remove", 0); press(0, "Up", 1); press(0, "Up", 1); press(0, "Accept");
press(1, "Remove", 1); press(1, "Put back"); press(1, "Accept"); press(1, "Reject");
document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: exported() }));
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_in_a_browser_what_a_person_clicks_is_what_comes_back(tmp_path: Path) -> None:
    text = re.sub("<meta http-equiv[^>]*>", "", page(tmp_path)).replace("</body>", f"<script>{CLICKS}</script></body>")
    path = tmp_path / "clicked.html"
    path.write_text(text, encoding="utf-8")
    match = re.search(r"<pre>(.*)</pre>", dom(path), re.DOTALL)
    assert match is not None
    (tmp_path / "refinements.json").write_text(html.unescape(match[1]), encoding="utf-8")
    drafts = [DRAFT, replace(DRAFT, question_id="q2")]
    found = read_refinements([tmp_path / "refinements.json"], drafts, "hash")
    assert found["q1"] == Refinement("q1", True, arranged(DRAFT, [0, 4, 2, 3, 5]))
    assert found["q2"] == Refinement("q2", False, MARKDOWN)


# --- the script ---


class Teacher:
    """Answers by rule; its first draft of the second question shows an image that does not exist."""

    identity = "rules"
    answers_singly = True

    def __init__(self) -> None:
        self.asked = 0

    async def generate(self, requests: Sequence[Request]) -> list[RawReply]:
        self.asked += len(requests)
        return [RawReply(self.reply(request), "stop") for request in requests]

    def reply(self, request: Request) -> str:
        if request.kind not in INTERLEAVED_KINDS.values():
            return write("because", Verdict.TRUE)
        bad = "second" in request.prompt.body and not request.sample_index
        answer = "Open it.<sup>[1](DOC#1)</sup>\n\n![box](IMG#1)\n\nLift it.\n\n![bowl](IMG#2)"
        return write_composition("r", "how-to", answer.replace("IMG#2", "IMG#7") if bad else answer)

    async def close(self) -> None:
        """Nothing is held."""


def test_the_script_goes_from_questions_to_rows_and_pays_for_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
    lines = [
        {
            "id": str(n),
            "query": f"The {name} way?",
            "documents": ["Open.", "Lift."],
            "images": [["a.png"], ["b.png"]],
            "gt_answer": "See ![x](IMG#2)",
            "category": ["craft", "how-to"],
        }
        for n, name in enumerate(("first", "second"))
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    teacher = Teacher()
    monkeypatch.setattr(script, "teacher_backend", lambda *_: teacher)
    given = {
        "data_file": str(tmp_path / "questions.jsonl"),
        "split": None,
        "image_root": str(tmp_path),
        "output_dir": str(tmp_path / "out"),
    }
    for _ in range(2):
        asyncio.run(script.draft(arguments(**given, stage="draft"), TeacherArguments(str(tmp_path / "calls.sqlite"))))
    assert teacher.asked == 2 * 6 + 2
    wanted = arguments(**given, stage="draft")
    programs = list(interleave_stage(wanted, TeacherArguments(str(tmp_path / "calls.sqlite"))).programs())
    assert [len(next(program)) for program in programs] == [4, 4]
    path = tmp_path / "out" / "drafts" / "drafts.jsonl"
    drafts = read_records(path, TeacherDraft)
    assert [draft.exit_reason for draft in drafts] == ["verified", "verified"]
    assert all(draft.call_key and len(draft.passages) == 4 for draft in drafts)
    assert "IMG#7" not in drafts[1].markdown
    items = [item("0", order=[0, 2, 3]), item("1", "open", range(4))]
    exported = str(export(tmp_path / "x.json", *items, drafts=sha256(path)))
    script.make_rows(arguments(**given, refinement_files=[exported]))
    (row,) = load_rows(tmp_path / "out" / "sft.jsonl")
    assert read_output(row.messages[1].content).markdown.endswith("Lift it.\n\n![bowl](IMG#2)")
    (dropped,) = read_records(tmp_path / "out" / "dropped.jsonl", DroppedItem)
    assert (dropped.question_id, dropped.reason) == ("1", "not_reviewed")


def test_rows_without_an_export_or_without_any_row_are_refused(tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path)}
    with pytest.raises(UserError, match="refinement_files is empty"):
        script.make_rows(arguments(**given))
    path = tmp_path / "drafts" / "drafts.jsonl"
    write_records(path, [DRAFT])
    exported = str(export(tmp_path / "x.json", item(decision="reject"), drafts=sha256(path)))
    with pytest.raises(UserError, match="no draft became a row \\(1 rejected\\)"):
        script.make_rows(arguments(**given, refinement_files=[exported]))

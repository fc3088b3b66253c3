"""The page of samples: no text of the data is ever markup, nothing is loaded, and the draws keep their limits."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samrag.replies import write
from samrag.report.samples import write_samples
from samrag.schema import ChatMessage, Document, DroppedItem, Modality, Question, SftRow
from tests.report.test_page import Page, hostile

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
FIELDS = (
    "question gold title text reasoning response judged prompt kind label filter drop-kind drop-reason drop-detail "
    "drop-replay question-id unknown-doc".split()
)


def row(
    kind: str = "is_use", label: str = "True", question_id: str = "q", direct: bool = False, reasoning: str = "why"
) -> SftRow:
    user = ChatMessage("user", f"Is it? {hostile('prompt')}\n<answer>\n{hostile('judged')}\n</answer>")
    reply = ChatMessage("assistant", write("" if direct else reasoning, label))
    return SftRow((user, reply), (), kind, label, question_id, ("t", "e"), "hash", direct, filters=("verdict True",))


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., str]:
    """Write a page about the given rows and items; gives its source."""
    Image.new("RGB", (600, 300), "red").save(tmp_path / "e.png")
    questions = [Question("q", hostile("question"), (hostile("gold"),), "", "train", ("t", "e"), ("e",))]
    documents = [
        Document("t", Modality.TEXT, hostile("title"), f"{hostile('text')}{ATTACK}"),
        Document("e", Modality.IMAGE, "Emblem", image="e.png"),
    ]

    def make(rows: list[SftRow], dropped: tuple[DroppedItem, ...] = (), **options: Any) -> str:
        path = tmp_path / "samples.html"
        write_samples(path, rows, dropped, questions, documents, tmp_path, **options)
        return path.read_text(encoding="utf-8")

    return make


def test_every_text_is_shown_and_none_is_markup(page: Callable[..., str]) -> None:
    h = hostile
    reply = ChatMessage("assistant", write(h("reasoning"), h("response")))
    messages, doc_ids = (row().messages[0], reply), ("t", "e", h("unknown-doc"))
    attack = SftRow(messages, (), h("kind"), h("label"), "q", doc_ids, "", filters=(h("filter"),))
    rows = [attack, row(question_id=h("question-id"))]
    item = DroppedItem("q", h("drop-kind"), ("t",), h("drop-reason"), h("drop-detail"), h("drop-replay"))
    source = page(rows, (item,))
    parsed = Page(source)
    for field in FIELDS:
        assert hostile(field) in parsed.text, field
    assert "<script>alert" not in source and "<img src=x" not in source
    assert parsed.count("script") == 2
    assert not [a for _, attrs in parsed.tags for a in attrs if a.startswith("on")]


def test_the_policy_lets_the_page_s_own_script_run_and_nothing_else(page: Callable[..., str]) -> None:
    source = page([row()])
    policy = next(a["content"] or "" for t, a in Page(source).tags if a.get("http-equiv") == "Content-Security-Policy")
    (script,) = re.findall(r"<script>(.*?)</script>", source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "img-src data:" in policy


def test_nothing_is_loaded_from_elsewhere(page: Callable[..., str]) -> None:
    source = page([row()])
    assert not [a for _, attrs in Page(source).tags for a in attrs if a in ("src", "href", "srcset", "action")]
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|https?:", source)


def test_pictures_are_small_and_held_once(page: Callable[..., str]) -> None:
    source = page([row(), row("is_sup")])
    assert source.count("data:image/jpeg;base64,") == 1
    assert Page(source).count("img", "picture") == 2
    assert len(source) < 40_000


def test_at_most_so_many_of_each_kind_label_and_reason(page: Callable[..., str]) -> None:
    kinds, labels, reasons = ("is_use", "is_sup"), ("True", "False"), ("timeout", "label_mismatch")
    rows = [row(kind, label, reasoning=f"r{i}") for i in range(9) for kind in kinds for label in labels]
    dropped = tuple(DroppedItem("q", "is_use", ("t",), reason) for reason in reasons for _ in "12345")
    cards = [a for t, a in Page(page(rows, dropped, per_group=4)).tags if t == "article"]
    groups = Counter((a["data-fate"], a["data-kind"], a["data-label"]) for a in cards)
    assert groups == {
        **{("kept", kind, label): 4 for kind in kinds for label in labels},
        ("dropped", "is_use", ""): 8,
    }


def test_the_draw_depends_on_the_seed(page: Callable[..., str]) -> None:
    rows = [row(reasoning=f"r{i}") for i in range(50)]
    assert page(rows, seed=1) == page(rows, seed=1) != page(rows, seed=2)


def test_verdicts_alone_are_shown_where_there_is_no_reasoned_row(page: Callable[..., str]) -> None:
    assert Page(page([row(), row(direct=True), row(label="False", direct=True)])).count("article") == 2


def test_roles_pictures_and_what_is_missing_are_named(page: Callable[..., str], tmp_path: Path) -> None:
    source = page([row()])
    assert re.findall(r'badge gold">(\w+)<', source) == ["bridge", "gold"]
    (tmp_path / "e.png").write_bytes(b"no image")
    documents = [Document("e", Modality.IMAGE, "Emblem", image="e.png")]
    write_samples(tmp_path / "other.html", [row()], [], [], documents, tmp_path)
    parsed = Page((tmp_path / "other.html").read_text(encoding="utf-8"))
    assert parsed.count("span", "none") == 1
    assert "This question is not in the file." in parsed.text and "not in the documents file" in parsed.text


def test_a_page_without_samples_says_so(page: Callable[..., str]) -> None:
    assert "nothing to show" in Page(page([])).text

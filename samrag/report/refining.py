"""The page on which a person refines drafts: images are moved and removed, drafts accepted or rejected, all exported.

One file that loads nothing from elsewhere and sends nothing anywhere; its export is read by `samrag.interleaving`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samrag.interleaving import FORMAT, TeacherDraft, blocks_of
from samrag.report.pages import Thumbnails, environment
from samrag.schema import Document

PICTURE_PX = 360
"""Longest side of a picture on the page."""


def refining_page(
    drafts: Sequence[TeacherDraft], documents: Mapping[str, Document], image_root: Path, drafts_hash: str
) -> str:
    """The page of all drafts that have an answer.

    Args:
        drafts: what the teacher wrote.
        documents: at least the candidate images, by id.
        image_root: folder that image paths are relative to.
        drafts_hash: of drafts.jsonl; the export names it.
    """
    pictures = Thumbnails(image_root, PICTURE_PX)
    data = {
        "format": FORMAT,
        "drafts": drafts_hash,
        "items": [_item(draft, documents, pictures) for draft in drafts if draft.markdown],
    }
    script = environment().get_template("refining.js.jinja").render()
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    held = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # cannot end the element it stands in
    return environment().get_template("refining.html.jinja").render(script=script, script_hash=script_hash, data=held)


def _item(draft: TeacherDraft, documents: Mapping[str, Document], pictures: Thumbnails) -> dict[str, Any]:
    """What the page knows of a draft."""
    blocks = []
    for block in blocks_of(draft):
        uri = pictures.uri(documents[draft.images[block.index - 1]]) if block.index else None
        words = block.alt if block.index else block.markdown
        blocks.append({"kind": str(block.kind), "text": words, "index": block.index, "picture": uri})
    sources = [{"title": passage.title, "text": passage.text} for passage in draft.passages]
    return {
        "question_id": draft.question_id,
        "question": draft.question,
        "verified": draft.exit_reason.replace("_", " "),
        "blocks": blocks,
        "sources": sources,
    }

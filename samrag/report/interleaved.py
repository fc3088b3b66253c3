"""The HTML page of one interleaved answer, its pictures in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from samrag.interleaved import structure, to_html
from samrag.report.pages import Thumbnails
from samrag.schema import Document, InterleavedTrace

PICTURE_PX = 800
"""Longest side of a picture on the page."""


def answer_page(
    trace: InterleavedTrace,
    question: str,
    documents: Mapping[str, Document],
    image_root: Path,
    max_px: int = PICTURE_PX,
) -> str:
    """The answer of a trace as a page that loads nothing; an unreadable picture is named in its place.

    Args:
        trace: what the program did.
        question: title of the page.
        documents: at least the retrieved ones, by id.
        image_root: folder that image paths are relative to.
        max_px: pictures are made no larger than this.
    """
    kept = set(trace.context_ids)
    images = {k: documents[i] for k, i in enumerate(trace.images, 1) if i in kept}
    texts = {n for n, i in enumerate(trace.texts, 1) if i in kept}
    answer = structure(trace.markdown, images, texts)
    pictures = Thumbnails(image_root, max_px)
    found = {k: pictures.uri(images[k]) for k in answer.images}
    titles = [documents[i].title or documents[i].text[:80] for i in trace.texts]
    return to_html(answer, {k: uri for k, uri in found.items() if uri is not None}, titles, question)

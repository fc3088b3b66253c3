"""What the HTML pages share: their template environment, and small pictures held once."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING

from samrag.errors import UserError
from samrag.files import within
from samrag.images import IMAGE_ERRORS, read_image
from samrag.schema import Document, Modality

if TYPE_CHECKING:
    import jinja2

THUMBNAIL_PX = 96


@functools.cache
def environment() -> jinja2.Environment:
    """Templates of this package; every value is escaped, and a missing one is an error."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("samrag", "report"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


class Thumbnails:
    """Small pictures as data URIs, each made once; an unreadable one has none."""

    def __init__(self, root: Path, max_px: int = THUMBNAIL_PX) -> None:
        """Pictures of the images below `root`, their longest side at most `max_px`."""
        self._root = root
        self._max_px = max_px
        self._made: dict[str, str | None] = {}

    def uri(self, document: Document) -> str | None:
        """The picture of an image document."""
        if document.doc_id not in self._made:
            self._made[document.doc_id] = self._make(document)
        return self._made[document.doc_id]

    def _make(self, document: Document) -> str | None:
        out = io.BytesIO()
        try:
            small = read_image(within(self._root, document.image or ""))
        except (*IMAGE_ERRORS, UserError):
            return None  # the page shows a frame in its place; the run itself has already recorded the bad image
        small.thumbnail((self._max_px, self._max_px))
        small.save(out, "JPEG", quality=78, optimize=True)
        return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


class Pictures:
    """The pictures of one page, in the order they are first needed."""

    def __init__(self, thumbnails: Thumbnails) -> None:
        """No picture yet; they will come from `thumbnails`."""
        self._thumbnails = thumbnails
        self._places: dict[str, int] = {}
        self.uris: list[str] = []

    def place(self, document: Document) -> int | None:
        """Where an image document's picture lies in the list; None for texts and unreadable pictures."""
        if document.modality is not Modality.IMAGE or (uri := self._thumbnails.uri(document)) is None:
            return None
        if document.doc_id not in self._places:
            self._places[document.doc_id] = len(self.uris)
            self.uris.append(uri)
        return self._places[document.doc_id]

"""A Markdown answer as text, images and citations, each reference checked, and back to Markdown and JSON. Pure.

Images are `![alt](IMG#k)`, k from 1 over the candidate images of all documents; citations `<sup>[n](DOC#n)</sup>`
(RAG-IGBench, arXiv 2512.05119). Blanks and small letters inside a target are read, not flagged. Nothing here raises
over what a model wrote.

Left out: links that are no citations, which stay in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote


class BadReference(StrEnum):
    """What becomes of an image or a citation that does not exist, or comes again."""

    FLAG = "flag"  # it stays, marked with its problem
    DROP = "drop"  # it goes; what it was stays in `problems`


@dataclass(frozen=True, slots=True)
class Text:
    """Markdown between references."""

    text: str

    @property
    def source(self) -> str:
        """The text as written."""
        return self.text


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image's place in the answer."""

    index: int
    """Number of the candidate image, from 1; 0 when the reference names no candidate by number."""
    alt: str
    source: str
    """The reference as written."""
    problem: str = ""
    """Why it cannot be shown, or that it was shown before; empty when it is good."""


@dataclass(frozen=True, slots=True)
class Citation:
    """A document named as the source of what stands before it."""

    index: int
    """Number of the document, from 1; 0 when the reference names no document by number."""
    label: str
    source: str
    """The reference as written."""
    problem: str = ""
    """Why it points nowhere, or that it was named before; empty when it is good."""


Segment = Text | ImageReference | Citation

IMAGE = re.compile(r"!\[((?:[^\[\]\\!]|!(?!\[)|\\.|\[[^\[\]]*\])*)\]\(([^()\n]*(?:\([^()\n]*\)[^()\n]*)*)\)", re.DOTALL)
CITATION = re.compile(r"<sup>\s*\[([^\[\]\n]*)\]\(([^()\n]*)\)\s*</sup>", re.IGNORECASE)
_REFERENCE = re.compile(f"(?P<image>{IMAGE.pattern})|(?P<citation>(?i:{CITATION.pattern}))", re.DOTALL)
_STRAY = re.compile(r"!\[|\b(?:IMG|DOC)\s*#\s*\d*", re.IGNORECASE)
_URL_SAFE = "/:?#[]@!$&'*+,;=%~"
_MAX_DIGITS = 9  # longer numbers name nothing, and very long ones are refused by `int`


@dataclass(frozen=True, slots=True)
class InterleavedAnswer:
    """An answer as a sequence of text, images and citations."""

    segments: tuple[Segment, ...]
    problems: tuple[str, ...] = ()
    """Every reference that was flagged or dropped, and what looks like one but is none."""

    @property
    def images(self) -> tuple[int, ...]:
        """Numbers of the images to show, in order, each once."""
        return tuple(s.index for s in self.segments if isinstance(s, ImageReference) and not s.problem)

    @property
    def citations(self) -> tuple[int, ...]:
        """Numbers of the documents cited, in order, each once."""
        return tuple(s.index for s in self.segments if isinstance(s, Citation) and not s.problem)


def structure(
    markdown: str,
    images: int | Collection[int],
    documents: int | Collection[int] | None = None,
    policy: BadReference = BadReference.FLAG,
) -> InterleavedAnswer:
    """Split an answer into segments and check its references.

    An image must be one of the candidates and may come once, a citation likewise: RAG-IGBench's contract. With `FLAG`
    the sources of all segments, one after the other, are the Markdown again.

    Args:
        markdown: the answer.
        images: numbers of the candidate images; n stands for 1 to n.
        documents: numbers of the documents, likewise; None takes a citation of any number.
        policy: what becomes of a bad reference.
    """
    shown, cited = _numbers(images), None if documents is None else _numbers(documents)
    segments: list[Segment] = []
    problems: list[str] = []
    seen: dict[str, set[int]] = {"IMG": set(), "DOC": set()}
    place = 0
    for match in _REFERENCE.finditer(markdown):
        _add_text(segments, markdown[place : match.start()], problems)
        place = match.end()
        reference: ImageReference | Citation
        if match["image"] is not None:
            index, problem = _checked(match[3], "IMG", shown, seen["IMG"])
            reference = ImageReference(index, match[2], match[0], problem)
        else:
            index, problem = _checked(match[6], "DOC", cited, seen["DOC"])
            reference = Citation(index, match[5], match[0], problem)
        if problem:
            problems.append(f"{match[0]}: {problem}")
        if not problem or policy is BadReference.FLAG:
            segments.append(reference)
    _add_text(segments, markdown[place:], problems)
    return InterleavedAnswer(tuple(segments), tuple(problems))


def _add_text(segments: list[Segment], text: str, problems: list[str]) -> None:
    """Add text to the segments, joined to text before it."""
    if not text:
        return
    if "#" in text or "![" in text:
        problems += [f"{text[m.start() : m.start() + 40]!r}: looks like a reference" for m in _STRAY.finditer(text)]
    if segments and isinstance(segments[-1], Text):
        segments[-1] = Text(segments[-1].text + text)
    else:
        segments.append(Text(text))


def _numbers(numbers: int | Collection[int]) -> Collection[int]:
    """The numbers that exist."""
    return range(1, numbers + 1) if isinstance(numbers, int) else numbers


def _checked(target: str, prefix: str, known: Collection[int] | None, seen: set[int]) -> tuple[int, str]:
    """The number that a link target names, and what is wrong with it."""
    match = re.fullmatch(rf"\s*{prefix}\s*#\s*([0-9]+)\s*", target, re.IGNORECASE)
    if match is None:
        return 0, f"its target is not {prefix}#<number>"
    index = int(match[1]) if len(match[1]) <= _MAX_DIGITS else 0
    if index < 1 or (known is not None and index not in known):
        return index, f"there is no {prefix}#{index}" if index else "there is no such number"
    if index in seen:
        return index, "it comes again"
    seen.add(index)
    return index, ""


# --- segments to Markdown and JSON ---


def to_markdown(answer: InterleavedAnswer, target: Callable[[int], str] | None = None) -> str:
    """The answer as Markdown; with `target`, images point to what it gives for their number, such as a path or a URL.

    A flagged reference stays as the model wrote it.
    """
    parts = []
    for segment in answer.segments:
        if target is not None and isinstance(segment, ImageReference) and not segment.problem:
            parts.append(f"![{segment.alt}]({quote(target(segment.index), safe=_URL_SAFE)})")
        else:
            parts.append(segment.source)
    return "".join(parts)


def to_json(answer: InterleavedAnswer) -> list[dict[str, Any]]:
    """The answer as JSON segments: `type` is `text`, `image` or `citation`; flagged ones have a `problem`."""
    segments: list[dict[str, Any]] = []
    for segment in answer.segments:
        if isinstance(segment, Text):
            segments.append({"type": "text", "text": segment.text})
            continue
        kind = "image" if isinstance(segment, ImageReference) else "citation"
        words = {"alt": segment.alt} if isinstance(segment, ImageReference) else {"label": segment.label}
        bad = {"problem": segment.problem, "source": segment.source} if segment.problem else {}
        segments.append({"type": kind, "index": segment.index, **words, **bad})
    return segments

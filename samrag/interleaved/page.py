"""An interleaved answer as one HTML page that loads nothing from elsewhere. Pure.

Knows the Markdown that answers use: headings, lists, tables, paragraphs, bold, italics, code. Left out: links, which
stay text, nested lists, and block quotes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from samrag.interleaved.segments import ImageReference, InterleavedAnswer, Text

_STYLE = """
body { font: 16px/1.6 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1f; }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; border-radius: 6px; }
figcaption { font-size: .85rem; color: #5c5c66; } table { border-collapse: collapse; }
td, th { border: 1px solid #ccc; padding: .3rem .6rem; } sup a { text-decoration: none; }
.bad { background: #fff0d6; border-bottom: 2px dotted #b36b00; font-size: .9em; }
ol.documents { font-size: .9rem; color: #5c5c66; }
""".strip()


def to_html(
    answer: InterleavedAnswer, images: Mapping[int, str], documents: Sequence[str] = (), title: str = "Answer"
) -> str:
    """The answer as one HTML page that loads nothing: pictures are data URIs, all text is escaped.

    Args:
        answer: the answer.
        images: data URI of each picture, by number; one that is missing shows its alternative text.
        documents: titles of the documents, listed below the answer, where citations lead.
        title: title of the page.

    Raises:
        ValueError: an image is no data URI, so the page would load it from elsewhere.
    """
    for index, uri in images.items():
        if not re.fullmatch(r"data:image/[a-z0-9.+-]+;base64,[A-Za-z0-9+/=]*", uri):
            raise ValueError(
                f"image {index} is {uri[:40]!r}; a data URI of an image is wanted: data:image/...;base64,..."
            )
    pieces: list[str] = []
    body = _MARK.sub(lambda match: pieces[int(match[1])], _blocks(_marked(answer, images, len(documents), pieces)))
    listed = "".join(f'<li id="doc-{n}">{html.escape(name)}</li>' for n, name in enumerate(documents, 1))
    below = f'\n<ol class="documents">{listed}</ol>' if listed else ""
    return (
        '<!doctype html>\n<html><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}\n</style></head>\n<body>\n{body}{below}\n</body></html>\n"
    )


def _marked(answer: InterleavedAnswer, images: Mapping[int, str], num_listed: int, pieces: list[str]) -> str:
    """The answer's Markdown with a mark in place of each reference, whose HTML is put into `pieces`."""
    marked = ""
    for segment in answer.segments:
        if isinstance(segment, Text):
            marked += segment.text.replace("\0", "\ufffd")  # so that no text holds a mark
            continue
        mark = f"\0{len(pieces)}\0"
        if segment.problem:
            problem, source = html.escape(segment.problem), html.escape(segment.source)
            pieces.append(f'<span class="bad" title="{problem}">{source}</span>')
        elif isinstance(segment, ImageReference):
            pieces.append(_figure(segment, images))
            if not marked.rpartition("\n")[2].lstrip().startswith("|"):  # a figure of its own, unless in a table
                mark = f"\n\n{mark}\n\n"
        else:
            label = f"[{html.escape(segment.label or str(segment.index))}]"
            listed = segment.index <= num_listed
            pieces.append(f'<sup><a href="#doc-{segment.index}">{label}</a></sup>' if listed else f"<sup>{label}</sup>")
        marked += mark
    return marked


def _figure(image: ImageReference, images: Mapping[int, str]) -> str:
    alt = html.escape(image.alt)
    picture = f'<span class="bad">image {image.index} could not be read</span>'
    if image.index in images:
        picture = f'<img src="{images[image.index]}" alt="{alt}">'
    return f"<figure>{picture}<figcaption>{alt}</figcaption></figure>" if alt else f"<figure>{picture}</figure>"


_HEADING = re.compile(r"(#{1,6})[ \t]+(.+)")
_ITEM = re.compile(r"[ \t]*(?:[-*+]|([0-9]{1,9})[.)])[ \t]+(.+)")
_ROW = re.compile(r"[ \t]*\|(.+)\|[ \t]*")
_RULE = re.compile(r"[-:| \t]+")
_MARK = re.compile("\0([0-9]+)\0")
_LINE_END = re.compile(r"\r\n|\r|\n|<br\s*/?>")


def _blocks(markdown: str) -> str:
    """The Markdown that answers use, as HTML; text is escaped."""
    out: list[str] = []
    paragraph: list[str] = []
    open_tag = ""

    def enter(tag: str, start: str = "") -> None:
        """End what is open, unless it is `tag`, and open that; "" opens nothing."""
        nonlocal open_tag
        if paragraph:
            out.append("<p>" + "<br>\n".join(paragraph) + "</p>")
            paragraph.clear()
        if open_tag != tag:
            out.extend([f"</{open_tag}>"] * bool(open_tag) + [f"<{tag}{start}>"] * bool(tag))
            open_tag = tag

    for line in map(str.strip, _LINE_END.split(markdown)):
        if not line:
            enter(open_tag if open_tag != "table" else "")
        elif _MARK.fullmatch(line):
            enter("")
            out.append(line)
        elif heading := _HEADING.fullmatch(line):
            enter("")
            level = len(heading[1])
            out.append(f"<h{level}>{_inline(heading[2])}</h{level}>")
        elif item := _ITEM.fullmatch(line):
            enter("ol" if item[1] else "ul", f' start="{int(item[1])}"' if item[1] else "")
            out.append(f"<li>{_inline(item[2])}</li>")
        elif row := _ROW.fullmatch(line):
            enter("table")
            if not _RULE.fullmatch(line):
                cells = (f"<td>{_inline(cell.strip())}</td>" for cell in row[1].split("|"))
                out.append(f"<tr>{''.join(cells)}</tr>")
        else:
            if open_tag:
                enter("")
            paragraph.append(_inline(line))
    enter("")
    return "\n".join(out)


def _inline(text: str) -> str:
    """Escaped text with bold, italics and code."""
    text = html.escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"(?<![*\w])\*([^*\s][^*]*)\*(?![*\w])", r"<em>\1</em>", text)

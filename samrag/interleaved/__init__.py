"""Interleaved answers: a model's output to Markdown, Markdown to segments, segments to Markdown, HTML and JSON. Pure.

`read_output` takes the Markdown answer out of what a model wrote; `structure` splits it into text, images and citations
and checks every reference. Neither ever raises, and neither loses text in silence.
"""

from samrag.interleaved.output import CATEGORIES, Form, ModelOutput, read_output
from samrag.interleaved.page import to_html
from samrag.interleaved.segments import (
    BadReference,
    Citation,
    ImageReference,
    InterleavedAnswer,
    Segment,
    Text,
    structure,
    to_json,
    to_markdown,
)

__all__ = [
    "CATEGORIES",
    "BadReference",
    "Citation",
    "Form",
    "ImageReference",
    "InterleavedAnswer",
    "ModelOutput",
    "Segment",
    "Text",
    "read_output",
    "structure",
    "to_html",
    "to_json",
    "to_markdown",
]

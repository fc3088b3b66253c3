"""Call to prompt text. Pure, apart from reading the packaged templates.

SAM-RAG's templates lie in the folder of their style, those of interleaved answers in `interleaved/`: each of the two
families has a hash of its own, so that a new kind does not make adapters and stored replies of the others obsolete.

A template has two blocks. `instruction` is static, byte-identical for a kind and style, and comes first; then the
image; then `body` with title, documents, question, answer: servers and the local engine can share the prefix's work.
Whatever comes from data is fenced and cannot close its fence: `<`, `>` and `&` in it are written as entities, which
also keeps special tokens such as `<image>` or `</s>` out of the text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

import jinja2

from samrag.calls import INTERLEAVED_KINDS, JUDGEMENTS, Call, CallKind, Passage
from samrag.replies import write, write_composition
from samrag.schema import ChatMessage

IMAGE_MARK = "<image>"


class PromptStyle(StrEnum):
    """`teacher`: worked examples, for general models. `student`: lean, for a model that was tuned to the task."""

    TEACHER = "teacher"
    STUDENT = "student"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered call: one user turn of static instruction, image, and body."""

    instruction: str
    image: str | None
    body: str

    def message(self) -> ChatMessage:
        """The turn as text with the image marker, as SFT rows store it."""
        mark = f"{IMAGE_MARK}\n" if self.image else ""
        return ChatMessage("user", f"{self.instruction}\n{mark}{self.body}")


def fence(text: str) -> str:
    """Make data unable to close its fence, and one block of printable text."""
    cleaned = "".join(c for c in text.replace("\r\n", "\n") if c in "\n\t" or c.isprintable())
    return cleaned.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").strip()


def content_parts(text: str) -> list[dict[str, str | None]]:
    """Text split at the image markers into `text` and `image` parts; no empty text part beside an image."""
    parts: list[dict[str, str | None]] = []
    for i, piece in enumerate(text.split(IMAGE_MARK)):
        if i:
            parts.append({"type": "image", "text": None})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


_DOCUMENT = re.compile(r"(<document>\n[^\n]*\n)(.*?)(\n</document>)", re.DOTALL)


def shorten_documents(prompt: str, keep: float) -> str:
    """A rendered prompt whose documents have this share of their characters left: the longest are cut, at a word's end.

    Titles and all else stay.
    """
    lengths = sorted(len(match[2]) for match in _DOCUMENT.finditer(prompt))
    left, most = int(keep * sum(lengths)), 0
    for number, length in enumerate(lengths):
        most = left // (len(lengths) - number)  # what each of the others may have
        if length > most:
            break
        left -= length

    def cut(match: re.Match[str]) -> str:
        head, text, end = match.groups()
        shorter = text if len(text) <= most else text[:most].rpartition(" ")[0]
        return f"{head}{shorter}{end}"

    return _DOCUMENT.sub(cut, prompt)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("samrag", "prompts"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=False,
    )
    environment.filters["fence"] = fence
    return environment


@dataclass(frozen=True, slots=True)
class WorkedExample:
    """A call with its model reply, shown to a general model in the instruction."""

    call: Call
    reply: str
    """The reply's JSON text."""


@functools.cache
def worked_examples(kind: CallKind) -> tuple[WorkedExample, ...]:
    """The teacher style's examples of a kind. They are data, so that a test can put each through the parser."""
    source = resources.files("samrag").joinpath(
        "prompts", *_folder(kind, PromptStyle.TEACHER).split("/"), "examples.json"
    )
    return tuple(
        WorkedExample(
            Call(
                kind,
                example.get("question", ""),
                tuple(Passage(title, text) for title, text in example.get("passages", [])),
                example.get("title", ""),
                answer=example.get("answer", ""),
            ),
            write_composition(**example["composition"])
            if "composition" in example
            else write(example.get("reasoning", ""), example["response"]),
        )
        for example in json.loads(source.read_text(encoding="utf-8"))[kind]
    )


def _folder(kind: CallKind, style: PromptStyle) -> str:
    """Where the templates of a kind lie."""
    return f"interleaved/{style}" if kind in INTERLEAVED_KINDS.values() else str(style)


def _block(name: str, kind: CallKind, style: PromptStyle, **values: object) -> str:
    template = _environment().get_template(f"{_folder(kind, style)}/{kind}.jinja")
    parts = _environment().get_template(f"{style}/_parts.jinja").module
    return "".join(template.blocks[name](template.new_context({"parts": parts, **values}))).strip()


@functools.cache
def _instruction(kind: CallKind, style: PromptStyle, direct: bool) -> str:
    examples = worked_examples(kind) if style is PromptStyle.TEACHER else ()
    return _block("instruction", kind, style, examples=examples, direct=direct)


def render(call: Call, style: PromptStyle) -> Prompt:
    """Put a call into words.

    Raises:
        ValueError: a direct verdict is asked of a teacher, whose worked examples reason, or of a kind without verdict.
    """
    if call.direct and (style is PromptStyle.TEACHER or call.kind not in JUDGEMENTS):
        raise ValueError(f"a direct {call.kind} in {style} style; only the student's judging kinds have one")
    return Prompt(_instruction(call.kind, style, call.direct), call.image, _block("body", call.kind, style, call=call))


@functools.cache
def template_hash(style: PromptStyle, kind: CallKind) -> str:
    """Hash of what words a kind of call: stored with replies, SFT rows and adapters, and compared before use.

    It is of one kind, so that rewording that kind, or a new one, leaves the replies and adapters of all others valid.
    """
    digest = hashlib.sha256()
    loader = _environment().loader
    assert loader is not None
    for name in (f"{style}/_parts.jinja", f"{_folder(kind, style)}/{kind}.jinja"):
        digest.update(name.encode() + b"\0" + loader.get_source(_environment(), name)[0].encode() + b"\0")
    if style is PromptStyle.TEACHER:
        digest.update(repr(worked_examples(kind)).encode())
    return digest.hexdigest()[:16]


@functools.cache
def style_hash(style: PromptStyle) -> str:
    """Hash of the words of all kinds."""
    return hashlib.sha256("".join(template_hash(style, kind) for kind in CallKind).encode()).hexdigest()[:16]

"""A model's output to its Markdown answer, whatever the output is. Pure.

The contract is RAG-IGBench's JSON object (`reason`, `category`, `answer`; appendix of arXiv 2512.05119). It is tried
first, a repair of it second; what has no object with an answer is the answer itself. Nothing here raises, and whatever
had to be mended or left out is named.

Left out: several objects with an answer in one output (the first whole one counts), and keys under other names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CATEGORIES = ("what-is", "how-to", "yes-or-no", "head-to-head")
"""Types of question in the contract."""


class Form(StrEnum):
    """How an output was read."""

    JSON = "json"  # it kept the contract
    REPAIRED = "repaired"  # an object whose answer could be told, although it does not keep the contract
    MARKDOWN = "markdown"  # no object with an answer: the text itself is the answer


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a model wrote, taken apart."""

    markdown: str
    """The answer; empty when the model gave none."""
    form: Form
    reason: str = ""
    category: str = ""
    problems: tuple[str, ...] = ()
    """What had to be mended, guessed or left out; empty when the contract was kept."""


KEYS = ("reason", "category", "answer")
"""The contract's keys, in its order."""
_KEY = {key: re.compile(rf'(?<!\\)"{key}"\s*:\s*"', re.IGNORECASE) for key in KEYS}
_NEXT_KEY = re.compile(rf'"(?:\s*,)?\s*"(?:{"|".join(KEYS)})"\s*:', re.IGNORECASE)
_OPENING = re.compile(r'\{\s*"')
_CLOSING = re.compile(r'"\s*\}')
_FENCE_OPENS = re.compile(r"\A```[a-zA-Z]*[ \t]*\n")
_THOUGHT_ENDS = "</think>"
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|[A-Za-z]+|.|\Z)", re.DOTALL)
_QUOTE = re.compile(r'\\.|"|\\\Z', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_COMMANDS = frozenset(
    "nabla neq nexists nleq ngeq nmid nolimits nonumber notin nparallel nsubseteq"
    " tanh tau text textbf textit textrm textsf texttt tfrac therefore theta tilde times to triangle triangleq".split()
)
"""Commands of mathematics that JSON would take for a line break or a tab before the rest of a word that is none."""


def read_output(text: str) -> ModelOutput:
    r"""Take the answer out of a model's output, whatever it is; an empty `markdown` means that there is none.

    Backslashes that JSON has no use for are kept (`\(`, `\alpha`), and so are those of commands that it would garble
    (`\times`, `\frac`, `\nabla`). What stands before the end of a thought (`</think>`) is never the answer.
    """
    thought, _, body = text.rpartition(_THOUGHT_ENDS)
    body = _unfenced(body.strip().removeprefix("\ufeff"))
    found, problems = _read_object(body)
    form = Form.JSON
    if found is None:
        found, form = {"answer": body}, Form.MARKDOWN
    values = {key: _as_text(found.get(key), key, problems) for key in KEYS}
    if form is Form.JSON and problems:
        form = Form.REPAIRED
    if not values["answer"]:
        problems.append("the answer is empty")
    reason = values["reason"] or thought.replace("<think>", "").strip()
    return ModelOutput(values["answer"], form, reason, values["category"], tuple(problems))


def _unfenced(text: str) -> str:
    """The inside of a code fence that is the whole text, closed or cut."""
    opening = _FENCE_OPENS.match(text)
    return text[opening.end() :].removesuffix("```").strip() if opening else text


def _read_object(text: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The contract's object and what was mended in it; None when there is no object with an answer."""
    mended = _mend_escapes(text)
    problems = ["backslashes that JSON does not know, or would garble"] if mended != text else []
    decoded = _decoded(mended, strict=True)
    if decoded is None and (decoded := _decoded(mended, strict=False)) is not None:
        problems.append("control characters inside a string")
    if decoded is None and (decoded := _loose(mended)) is not None:
        problems.append("quotes or brackets that do not match, or a cut end")
    if decoded is None:
        return None, ["an object without an answer: the whole text stands for it"] if _OPENING.match(text) else []
    found, outside = decoded
    if outside.strip("` \n\r\t"):
        problems.append(f"text outside the object is left out: {outside.strip()[:80]!r}")
    unknown = [key for key in found if key not in KEYS]
    if unknown:
        problems.append(f"keys that are not the contract's are left out: {', '.join(map(repr, unknown))[:80]}")
    return found, problems


def _decoded(text: str, strict: bool) -> tuple[dict[str, Any], str] | None:
    """The first JSON object with an answer, its keys in lower case, and the text around it.

    What stands in a broken object is never read.
    """
    decoder = json.JSONDecoder(strict=strict)
    place = 0
    while opening := _OPENING.search(text, place):
        try:
            value, place = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number of more than 4,300 digits
            return None
        lowered = {key.lower(): item for key, item in value.items()}
        if "answer" in lowered:
            return lowered, text[: opening.start()] + text[place:]
    return None


def _loose(text: str) -> tuple[dict[str, Any], str] | None:
    """What the strings of a broken object say, and the text around it; None without an answer."""
    found = {key: value for key in KEYS if (value := _loose_value(text, key)) is not None}
    if "answer" not in found:
        return None
    opening = _OPENING.search(text)
    closings = list(_CLOSING.finditer(text))
    return found, text[: opening.start() if opening else 0] + (text[closings[-1].end() :] if closings else "")


def _mend_escapes(text: str) -> str:
    """Double the backslashes that are meant as such; escapes of JSON stay."""

    def mended(match: re.Match[str]) -> str:
        after = match[1]
        if after in ("", "'"):  # a cut end; JavaScript's habit
            return after
        if after[0] in "bfr":  # no answer has a backspace, a form feed, or a bare carriage return before a word
            meant = len(after) > 1
        elif after[0] in "nt":
            meant = after in _COMMANDS
        else:
            meant = after not in ('"', "\\", "/") and not (after[0] == "u" and len(after) == 5 and after[1:].isalnum())
        return f"\\\\{after}" if meant else match[0]

    return _ESCAPE.sub(mended, text) if "\\" in text else text


def _loose_value(text: str, key: str) -> str | None:
    """A string of a broken object: up to the next key, else the object's last closing, else the end of the text."""
    openings = list(_KEY[key].finditer(text))
    if not openings:
        return None
    start = openings[-1 if key == "answer" else 0].end()  # an earlier answer is quoted in the reason
    following = _NEXT_KEY.search(text, start)
    closings = [following] if following else list(_CLOSING.finditer(text, start))
    if closings:
        return _unescaped(text[start : closings[-1].start()])
    rest = text[start:].rstrip()
    return _unescaped(rest[:-1] if rest.endswith('"') and not rest.endswith('\\"') else rest)


def _unescaped(text: str) -> str:
    """What the source of a string says whose escapes are mended; bare quotes are quotes, a lone last backslash goes."""
    quoted = _QUOTE.sub(lambda match: {'"': '\\"', "\\": ""}.get(match[0], match[0]), text)
    return str(json.loads(f'"{quoted}"', strict=False))


def _as_text(value: Any, key: str, problems: list[str]) -> str:
    """A value of the contract as text without blanks around it; adds to `problems`."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        problems.append(f"{key} is a list, not a string")
        value = "\n".join(value)
    elif value is not None and not isinstance(value, str):
        problems.append(f"{key} is of type {type(value).__name__}, not a string")
        value = json.dumps(value, ensure_ascii=False)
    text = value or ""
    whole = _SURROGATE.sub("\ufffd", text)
    if whole != text:
        problems.append(f"{key} holds a lone surrogate, which is half a character")
    return whole.strip()

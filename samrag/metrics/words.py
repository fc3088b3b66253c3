"""Words of a text, as RAG-IGBench's ROUGE-1 counts them. Pure, apart from reading the packaged stop words.

Both languages are cut as jieba 0.42.1 cuts them. Chinese goes through `rjieba`, which has jieba's dictionary and model
at twenty times the speed and keeps runs of Latin letters whole that jieba divides; they are divided here. English needs
no dictionary: five of its words are Latin.

The benchmark drops the words of a Chinese list of 752 lines, published with its code. The packaged `stop_words.txt`
is a list of our own to the same end: particles, pronouns, prepositions and the like, single digits, and punctuation of
either width. To compare with published figures to the last digit, pass the benchmark's list instead.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from importlib import resources

from samrag.errors import UserError
from samrag.schema import Language

_RUN = re.compile(r"[a-zA-Z0-9]+(?:\.[0-9]+)?%?|[#&+._%-]+|\S")
_HAN = re.compile("[\u4e00-\u9fd5]")
_WHOLE = re.compile(r"(AT&T|[cC]#|[cC]\+\+)")  # words of the dictionary without a Chinese character


@functools.cache
def packaged_stop_words() -> frozenset[str]:
    """The words of `stop_words.txt`, one a line."""
    source = resources.files("samrag") / "metrics" / "stop_words.txt"
    return frozenset(source.read_text(encoding="utf-8").splitlines())


def words(text: str, language: Language) -> list[str]:
    """Cut a text into words and signs, blanks left out.

    Raises:
        UserError: Chinese is to be cut and `rjieba` is not installed.
    """
    return [part for piece in _cut(text, language) for part in _divided(piece)]


def _cut(text: str, language: Language) -> Sequence[str]:
    """A text's words, and in Chinese its blanks and whole runs of Latin letters."""
    if language is Language.EN:
        return _latin(text)
    try:
        import rjieba
    except ImportError as error:
        raise UserError("Chinese text needs rjieba; install samrag with its extra: pip install samrag[zh].") from error
    return list(rjieba.cut(text))


def _divided(piece: str) -> list[str]:
    """The words of a piece that `rjieba` gave; one with Chinese characters is a word."""
    return [piece] if "\u4e00" <= piece[0] <= "\u9fd5" or _HAN.search(piece) else _latin(piece)


def _latin(text: str) -> list[str]:
    """The words of a text without Chinese words: each of its odd parts, split so, is a word of the dictionary."""
    if not _WHOLE.search(text):
        return _RUN.findall(text)
    parts = enumerate(_WHOLE.split(text))
    return [word for i, part in parts for word in ([part] if i % 2 else _RUN.findall(part))]


def counted_words(text: str, language: Language, stop_words: Collection[str] | None = None) -> frozenset[str]:
    """The distinct words that ROUGE-1 compares: no stop words, and what has a full stop in it ("3.5") divided there.

    Args:
        text: the text.
        language: how it is cut.
        stop_words: words that do not count; None takes the packaged ones.

    Raises:
        UserError: Chinese is to be cut and `rjieba` is not installed.
    """
    stop_words = packaged_stop_words() if stop_words is None else stop_words
    distinct = {part for piece in set(_cut(text, language)) for part in _divided(piece)}.difference(stop_words)
    dotted = {word for word in distinct if "." in word}
    return frozenset((distinct - dotted).union(*(filter(None, word.split(".")) for word in dotted)))

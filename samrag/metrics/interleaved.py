"""Scores of one interleaved answer: RAG-IGBench's five, and those of its set of images. Pure.

The paper (arXiv 2512.05119) and its released code differ, so a mode says which is meant:

- `paper`: the paper's formulas; the mean is over the five scores.
- `released`: as the released code computes, mistakes included: another denominator in Kendall and a factor that falls
  with the number of candidates, a mean in which alignment stands twice and ROUGE-1 not at all, contexts with markup in
  them. Published figures are partly made so. Where that code fails, there is no score (`UndefinedScoreError`).
- `strict`: the paper's formulas; what cannot be scored counts 0 (see `samrag.metrics.rag_igbench`).

Two empty lists of images agree: edit and Kendall are 1 (the formulas give no number there). Texts are compared as
sets of words in one pass, lists of images by rows of a table: nothing recurs, whatever the length.

Left out: the encoders themselves; whoever has one passes its similarities.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from samrag.interleaved import ImageReference, Text, structure
from samrag.metrics.words import counted_words
from samrag.schema import Language

CONTEXT_CHARACTERS = 20
"""Characters before an image, and as many after it, that are its context."""
CLIP_CHARACTERS = 25
"""Characters of the context, from its beginning, that CLIP compares with the image."""
ALIGNMENT_RANGE = (0.7, 1.0)
"""Cosine of two contexts that scores 0, and the one that scores 1; linear between."""
CLIP_RANGE = (0.1, 0.4)
"""Cosine of image and context that scores 0, and the one that scores 1; linear between."""
RELEASED_BONUS = 0.5
"""Weight of the share of candidates that the reference leaves out, in the released Kendall score."""
_GUARD = 1e-8  # keeps the released F1 from dividing by zero, and a little below 1


class Mode(StrEnum):
    """Whose rules count; see the module."""

    PAPER = "paper"
    RELEASED = "released"
    STRICT = "strict"


class UndefinedScoreError(ValueError):
    """The released code divides by zero, or gives up, on this input."""


# --- words ---


def rouge1(
    candidate: str,
    reference: str,
    language: Language,
    mode: Mode = Mode.PAPER,
    stop_words: Collection[str] | None = None,
) -> float:
    """F1 of the sets of words of two texts, case-sensitive, without stop words: 0 to 1.

    Two texts without words score 1, one of them 0; the released code gives up on both.

    Args:
        candidate: generated text, without images and citations (see `read_answer`).
        reference: gold text.
        language: how the texts are cut into words.
        mode: the released F1 has 1e-8 added to its denominator.
        stop_words: words that do not count; None takes the packaged ones.

    Raises:
        UndefinedScoreError: in mode `released`, a text has no words.
        UserError: Chinese is to be cut and `rjieba` is not installed.
    """
    wanted = counted_words(reference, language, stop_words)
    return _set_f1(counted_words(candidate, language, stop_words), wanted, mode)


def _set_f1(candidate: Collection[str], reference: Collection[str], mode: Mode) -> float:
    """F1 of two sets of words."""
    if not candidate or not reference:
        if mode is Mode.RELEASED:
            raise UndefinedScoreError("ROUGE-1 of a text without words")
        return float(not candidate and not reference)
    common = len(set(candidate) & set(reference))
    if mode is not Mode.RELEASED:
        return 2 * common / (len(candidate) + len(reference))
    precision, recall = common / len(candidate), common / len(reference)
    return 2.0 * (precision * recall / (precision + recall + _GUARD))


# --- lists of images ---


def edit_score(generated: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """1 - Levenshtein distance / longer length, of `generated[G]` and `reference[R]`; 1 for two empty lists."""
    if not generated and not reference:
        return 1.0
    row = list(range(len(reference) + 1))  # row[j]: distance of what is read of `generated` to reference[:j]
    for i, item in enumerate(generated, 1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(reference, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (item != wanted))
    return 1 - row[-1] / max(len(generated), len(reference))


def kendall_score(
    generated: Sequence[Hashable], reference: Sequence[Hashable], num_candidates: int, mode: Mode = Mode.PAPER
) -> float:
    """Share of the pairs of images that stand in the reference's order: 0 to 1.

    Only images that the reference has are looked at, o of them, repetitions included. Paper: concordant pairs over
    C(o, 2); with o of 0 or 1, o over the longer length. It knows no recall: two of four images in order score 1.

    Args:
        generated: image numbers `generated[G]` in order.
        reference: gold numbers `reference[R]` in order; of repeated ones the last place counts.
        num_candidates: candidate images of the question; only mode `released` uses it.
        mode: `released` divides by all generated pairs, then scales with `released_scale`.

    Raises:
        UndefinedScoreError: in mode `released`, the code divides by zero.
    """
    if mode is Mode.RELEASED:
        return released_concordance(generated, reference) * released_scale(len(reference), num_candidates)
    places = _places(generated, reference)
    if len(places) > 1:
        return _concordant(places) / _pairs(len(places))
    longer = max(len(generated), len(reference))
    return len(places) / longer if longer else 1.0


def released_concordance(generated: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """The released code's Kendall score before its scaling.

    Raises:
        UndefinedScoreError: there is no reference, and at most one generated image.
    """
    places = _places(generated, reference)
    if not reference and len(generated) < 2:
        raise UndefinedScoreError(f"Kendall of {len(generated)} images against none")
    if not generated:
        return 0.0
    if len(reference) == 1:
        return len(places) / len(generated)
    if len(generated) == 1:
        return len(places) / len(reference)
    return _concordant(places) / _pairs(len(generated))


def released_scale(num_reference: int, num_candidates: int) -> float:
    """The factor of the released code: (1 + b (N - R) / N) / (1 + b), with b = `RELEASED_BONUS`.

    Raises:
        UndefinedScoreError: there are no candidates.
    """
    if num_candidates < 1:
        raise UndefinedScoreError("Kendall of a question without candidate images")
    left_out = (num_candidates - num_reference) / num_candidates
    return (1 + RELEASED_BONUS * left_out) / (1 + RELEASED_BONUS)


def _places(generated: Sequence[Hashable], reference: Sequence[Hashable]) -> list[int]:
    """Places in the reference of the generated images that it has, in generated order."""
    place = {item: i for i, item in enumerate(reference)}
    return [place[item] for item in generated if item in place]


def _concordant(places: Sequence[int]) -> int:
    """Number of pairs that ascend strictly."""
    count, smaller = 0, list[int]()
    for place in places:
        count += bisect_left(smaller, place)
        insort(smaller, place)
    return count


def _pairs(n: int) -> int:
    return n * (n - 1) // 2


@dataclass(frozen=True, slots=True)
class ImageSetScore:
    """How well the set of shown images agrees with gold, order and repetition aside; ours, not the paper's."""

    precision: float
    recall: float
    f1: float


def image_set_score(generated: Sequence[Hashable], reference: Sequence[Hashable]) -> ImageSetScore:
    """Precision, recall and F1 of the distinct images; two empty sets score 1, an empty one against a filled one 0."""
    shown, wanted = set(generated), set(reference)
    if not shown or not wanted:
        equal = float(shown == wanted)
        return ImageSetScore(equal, equal, equal)
    common = len(shown & wanted)
    return ImageSetScore(common / len(shown), common / len(wanted), 2 * common / (len(shown) + len(wanted)))


# --- similarities ---


def alignment_score(similarities: Sequence[float]) -> float:
    """Mean over images of how alike their contexts are, generated and gold; 0 without images.

    Args:
        similarities: cosine of the two contexts of each image that both answers show, `similarities[I]`.
    """
    return _mean_within(similarities, ALIGNMENT_RANGE)


def clip_score(similarities: Sequence[float]) -> float:
    """Mean over images of how well they fit their context; 0 without images.

    Args:
        similarities: cosine of each generated image, wrong ones too, and the first `CLIP_CHARACTERS` of its context,
            `similarities[I]`.
    """
    return _mean_within(similarities, CLIP_RANGE)


def _mean_within(similarities: Sequence[float], bounds: tuple[float, float]) -> float:
    low, high = bounds
    scores = [min(max((float(value) - low) / (high - low), 0.0), 1.0) for value in similarities]
    if any(score != score for score in scores):
        raise ValueError("a similarity is not a number; look at the encoder for texts or images it cannot take")
    return sum(scores) / len(scores) if scores else 0.0


def mean_score(
    rouge1: float, edit: float, kendall: float, alignment: float, clip: float, mode: Mode = Mode.PAPER
) -> float:
    """Mean of the five scores; the released code counts alignment twice and leaves ROUGE-1 out."""
    first = alignment if mode is Mode.RELEASED else rouge1
    return (first + edit + kendall + alignment + clip) / 5


# --- what is scored of an answer ---


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """An answer as the scores see it."""

    text: str
    """Its text without images and citations."""
    images: tuple[Hashable, ...]
    """Numbers of its images in order, repeated ones too; 0 for one that names no candidate. Digits in mode `released`,
    where "01" is not "1"."""
    contexts: Mapping[Hashable, str]
    """Context of each image; of a repeated one the last."""


_RELEASED_IMAGE = re.compile(r"!\[.*?\]\(IMG#(\d+)\)")
_RELEASED_CITATION = re.compile(r"<sup>\[.*?\]\(.*?\)</sup>")


def read_answer(markdown: str, mode: Mode = Mode.PAPER) -> AnswerReading:
    """Read an answer's text, images, and the contexts of the images.

    A context is `CONTEXT_CHARACTERS` of text on either side. In mode `released` they are cut out of the Markdown, so
    that the half of a neighbour's markup may stand in them; in the others they are cut out of the text alone.
    """
    if mode is Mode.RELEASED:
        return _read_released(markdown)
    text = ""
    places: list[tuple[int, int]] = []
    for segment in structure(markdown, images=0).segments:
        if isinstance(segment, Text):
            text += segment.text
        elif isinstance(segment, ImageReference):
            places.append((segment.index, len(text)))
    contexts: dict[Hashable, str] = {}
    for image, at in places:
        contexts[image] = text[max(at - CONTEXT_CHARACTERS, 0) : at + CONTEXT_CHARACTERS]
    return AnswerReading(text.strip(), tuple(image for image, _ in places), contexts)


def _read_released(markdown: str) -> AnswerReading:
    bare = _RELEASED_CITATION.sub("", markdown)
    contexts: dict[Hashable, str] = {}
    found = list(_RELEASED_IMAGE.finditer(bare))
    for match in found:
        before = bare[max(match.start() - CONTEXT_CHARACTERS, 0) : match.start()]
        window = before + bare[match.end() : match.end() + CONTEXT_CHARACTERS]
        contexts[match[1]] = _RELEASED_IMAGE.sub("", window)
    return AnswerReading(_RELEASED_IMAGE.sub("", bare).strip(), tuple(match[1] for match in found), contexts)


def read_released_output(output: str) -> str | None:
    """The answer that the released parser takes out of a model's output; None where it rejects the output.

    It cuts and patches the JSON as text, so it takes what is broken and rejects or garbles what is whole: for published
    figures alone. `samrag.interleaved.read_output` reads all of it.
    """
    text = output.strip().strip("`json").strip()  # takes letters off the end of cut answers, too
    text = text[max(text.find("{"), 0) :]
    if not text.endswith("}"):
        text += "}" if text.endswith('"') else '"}'
    parts = text.split('"answer": "')
    if len(parts) != 2:
        return None
    head, (answer, _, _) = parts[0], parts[1].rpartition('"')
    answer = answer.replace('"', "'").replace("\\n", "<br>").replace("\n", "<br>")
    try:
        found = json.loads(f'{head}"answer": "{answer}"}}')
    except (ValueError, RecursionError):
        return None
    return str(found["answer"]) if isinstance(found, dict) and "answer" in found else None

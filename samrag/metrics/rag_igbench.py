"""Scores of many interleaved answers, as RAG-IGBench reports them, with what it leaves unsaid. Pure.

What becomes of an answer that cannot be scored depends on the mode (`samrag.metrics.interleaved.Mode`): `paper` and
`released` leave it out of every mean, as published figures do; `strict` scores it 0. All modes count such answers: a
model that fails one time in four is not the better for it. Encoders are given all texts and images of a run at once,
each once, so they can batch as they like; without them alignment, CLIP and the mean are not reported.

Left out: reading files (`samrag.benchmarks.rag_igbench`), and encoders.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from samrag.interleaved import read_output
from samrag.metrics.interleaved import (
    CLIP_CHARACTERS,
    AnswerReading,
    Mode,
    UndefinedScoreError,
    alignment_score,
    clip_score,
    edit_score,
    image_set_score,
    kendall_score,
    mean_score,
    read_answer,
    read_released_output,
    rouge1,
)
from samrag.metrics.significance import bootstrap_interval, paired_permutation_test
from samrag.schema import Language

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vectors = NDArray[np.float64] | NDArray[np.float32]


_MAX_DIGITS = 9


class Metric(StrEnum):
    """What an answer is scored by."""

    ROUGE1 = "rouge1"
    EDIT = "edit"
    KENDALL = "kendall"
    ALIGNMENT = "alignment"
    CLIP = "clip"
    MEAN = "mean"
    IMAGE_PRECISION = "image_precision"
    IMAGE_RECALL = "image_recall"
    IMAGE_F1 = "image_f1"


class Outcome(StrEnum):
    """What became of an answer."""

    SCORED = "scored"
    INVALID = "invalid"  # there is no answer in the model's output
    HALLUCINATED = "hallucinated"  # it shows an image that is not among the candidates
    ERROR = "error"  # there is no output, or (mode `released`) the code divides by zero


@dataclass(frozen=True, slots=True)
class Sample:
    """A model's output with its gold answer."""

    sample_id: str
    output: str
    """What the model wrote, contract and all."""
    reference: str
    """Gold answer, Markdown."""
    num_candidates: int
    """Images that the model could choose from."""
    language: Language
    categories: tuple[str, ...] = ()
    """Groups that are reported on their own: topic, type."""
    candidates: tuple[str, ...] = ()
    """Where each candidate image is, in order: what the image encoder is given."""
    error: str = ""
    """Why there is no output."""

    def __post_init__(self) -> None:
        if self.candidates and len(self.candidates) != self.num_candidates:
            raise ValueError(
                f"sample {self.sample_id!r} has {len(self.candidates)} candidates, num_candidates {self.num_candidates}"
            )


class TextEncoder(Protocol):
    """Embeds texts: the benchmark's is Conan-embedding-v1; any other that knows the language will do."""

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Vectors `[T, D]` of `texts[T]`."""
        ...


class ImageTextEncoder(Protocol):
    """Embeds images and texts into one space: the benchmark's is CLIP ViT-L/14, which knows English alone."""

    def encode_images(self, images: Sequence[str]) -> Vectors:
        """Vectors `[I, D]` of `images[I]`, named as in `Sample.candidates`."""
        ...

    def encode_texts(self, texts: Sequence[str]) -> Vectors:
        """Vectors `[T, D]` of `texts[T]`, cut to what the model takes."""
        ...


@dataclass(frozen=True, slots=True)
class SampleScore:
    """Scores of one answer."""

    sample_id: str
    outcome: Outcome
    values: Mapping[Metric, float]
    """Empty for what is left out of the means."""
    detail: str = ""
    """Why it is not scored."""
    categories: tuple[str, ...] = ()


# --- scoring ---


def score_samples(
    samples: Sequence[Sample],
    mode: Mode = Mode.PAPER,
    text_encoder: TextEncoder | None = None,
    image_encoder: ImageTextEncoder | None = None,
    stop_words: Collection[str] | None = None,
) -> list[SampleScore]:
    """Score answers, in order.

    Args:
        samples: outputs with their gold answers.
        mode: whose rules count.
        text_encoder: for alignment; None leaves it and the mean out.
        image_encoder: for CLIP, together with `Sample.candidates`; None leaves it and the mean out.
        stop_words: words that ROUGE-1 does not count; None takes the packaged ones.

    Raises:
        ValueError: the image encoder is given and a sample with images does not say where they are.
    """
    read = [_read(sample, mode) for sample in samples]
    pairs = [item for item in read if isinstance(item, _Pair)]
    alignment = _alignments(pairs, text_encoder) if text_encoder else None
    clip = _clips(pairs, image_encoder) if image_encoder else None
    scores = iter(
        _values(pair, mode, stop_words, alignment[i] if alignment else None, clip[i] if clip else None)
        for i, pair in enumerate(pairs)
    )
    done = [next(scores) if isinstance(item, _Pair) else item for item in read]
    if mode is not Mode.STRICT:
        return done
    absent = {Metric.ALIGNMENT, Metric.MEAN} if text_encoder is None else set()
    absent |= {Metric.CLIP, Metric.MEAN} if image_encoder is None else set()
    zeros = {metric: 0.0 for metric in Metric if metric not in absent}
    return [score if score.outcome is Outcome.SCORED else replace(score, values=zeros) for score in done]


@dataclass(frozen=True, slots=True)
class _Pair:
    """A readable answer and its gold."""

    sample: Sample
    generated: AnswerReading
    gold: AnswerReading


def _read(sample: Sample, mode: Mode) -> _Pair | SampleScore:
    """What can be scored, or why it cannot."""

    def failed(outcome: Outcome, detail: str) -> SampleScore:
        return SampleScore(sample.sample_id, outcome, {}, detail, sample.categories)

    if sample.error:
        return failed(Outcome.ERROR, sample.error)
    released = mode is Mode.RELEASED
    answer = read_released_output(sample.output) if released else read_output(sample.output).markdown
    if answer is None or not (answer or released):
        return failed(Outcome.INVALID, f"no answer in {sample.output[:80]!r}")
    generated = read_answer(answer, mode)
    lowest = 0 if released else 1  # the released code takes 0 for the last image
    strange = [image for image in generated.images if not lowest <= _number(image) <= sample.num_candidates]
    if strange:
        return failed(Outcome.HALLUCINATED, f"image {strange[0]} of {sample.num_candidates}")
    return _Pair(sample, generated, read_answer(sample.reference, mode))


def _values(
    pair: _Pair, mode: Mode, stop_words: Collection[str] | None, alignment: float | None, clip: float | None
) -> SampleScore:
    """The scores of one answer; in mode `released` there may be none."""
    sample, shown, wanted = pair.sample, pair.generated.images, pair.gold.images
    try:
        rouge = rouge1(pair.generated.text, pair.gold.text, sample.language, mode, stop_words)
        kendall = kendall_score(shown, wanted, sample.num_candidates, mode)
    except UndefinedScoreError as error:
        return SampleScore(sample.sample_id, Outcome.ERROR, {}, str(error), sample.categories)
    edit, image_set = edit_score(shown, wanted), image_set_score(shown, wanted)
    values = {Metric.ROUGE1: rouge, Metric.EDIT: edit, Metric.KENDALL: kendall}
    if alignment is not None:
        values[Metric.ALIGNMENT] = alignment
    if clip is not None:
        values[Metric.CLIP] = clip
    if alignment is not None and clip is not None:
        values[Metric.MEAN] = mean_score(rouge, edit, kendall, alignment, clip, mode)
    values[Metric.IMAGE_PRECISION], values[Metric.IMAGE_RECALL] = image_set.precision, image_set.recall
    values[Metric.IMAGE_F1] = image_set.f1
    return SampleScore(sample.sample_id, Outcome.SCORED, values, categories=sample.categories)


def _alignments(pairs: Sequence[_Pair], encoder: TextEncoder) -> list[float]:
    """Alignment of each pair: contexts of the images that both show."""
    shared = [[image for image in p.generated.contexts if image in p.gold.contexts] for p in pairs]
    left = [p.generated.contexts[image] for p, images in zip(pairs, shared, strict=True) for image in images]
    right = [p.gold.contexts[image] for p, images in zip(pairs, shared, strict=True) for image in images]
    places = _distinct([*left, *right])
    vectors = _normalised(encoder(list(places)), len(places)) if places else np.zeros((0, 1))
    similarities = _cosines(vectors[[places[text] for text in left]], vectors[[places[text] for text in right]])
    return [alignment_score(part) for part in _split(similarities, map(len, shared))]


def _clips(pairs: Sequence[_Pair], encoder: ImageTextEncoder) -> list[float]:
    """CLIP of each pair: all generated images with the beginning of their contexts."""
    images: list[str] = []
    for pair in pairs:
        if pair.generated.contexts and not pair.sample.candidates:
            raise ValueError(f"sample {pair.sample.sample_id!r} does not say where its images are; fill in candidates")
        images += [pair.sample.candidates[_number(image) - 1] for image in pair.generated.contexts]
    texts = [text[:CLIP_CHARACTERS] for pair in pairs for text in pair.generated.contexts.values()]
    image_places, text_places = _distinct(images), _distinct(texts)
    if not images:
        return [0.0] * len(pairs)
    of_images = _normalised(encoder.encode_images(list(image_places)), len(image_places))
    of_texts = _normalised(encoder.encode_texts(list(text_places)), len(text_places))
    similarities = _cosines(of_images[[image_places[i] for i in images]], of_texts[[text_places[t] for t in texts]])
    return [clip_score(part) for part in _split(similarities, (len(pair.generated.contexts) for pair in pairs))]


def _number(image: Hashable) -> int:
    """An image's number; digits without end name nothing, and `int` refuses them."""
    digits = str(image)
    return int(digits) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS


def _distinct(items: Iterable[str]) -> dict[str, int]:
    """Each item with its place among the distinct ones."""
    return {item: place for place, item in enumerate(dict.fromkeys(items))}


def _normalised(vectors: Vectors, count: int) -> NDArray[np.float64]:
    """`vectors[N, D]` of length 1; one of length 0 stays."""
    array = np.asarray(vectors, dtype=np.float64)
    if array.ndim != 2 or len(array) != count:
        raise ValueError(f"the encoder gave an array of shape {array.shape} for {count} items; [items, size] is wanted")
    lengths = np.linalg.norm(array, axis=1, keepdims=True)
    return np.asarray(array / np.where(lengths == 0, 1, lengths))


def _cosines(left: NDArray[np.float64], right: NDArray[np.float64]) -> list[float]:
    """Cosine of each row of `left[N, D]` with its row of `right[N, D]`, both normalised."""
    return [float(value) for value in np.einsum("nd,nd->n", left, right)]


def _split(values: Sequence[float], sizes: Iterable[int]) -> Iterable[Sequence[float]]:
    """Consecutive parts of the given sizes."""
    place = 0
    for size in sizes:
        yield values[place : place + size]
        place += size


# --- summaries ---


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its bootstrap interval."""

    value: float
    low: float
    high: float
    n: int
    """Answers that it is the mean of."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a set of answers."""

    n_total: int
    n_scored: int
    n_invalid: int
    n_hallucinated: int
    n_error: int
    means: Mapping[Metric, Estimate]
    """A metric that no answer has is not in it."""
    categories: Mapping[str, Summary] = field(default_factory=dict)
    """The same for each topic and type; theirs have none of their own."""


def summarize(scores: Sequence[SampleScore], level: float = 0.95, seed: int = 0) -> Summary:
    """Means with intervals, and counts of what is in them and what is not; overall and by category.

    Args:
        scores: of one mode.
        level: coverage of the intervals.
        seed: fixes their resampling.
    """
    names = dict.fromkeys(name for score in scores for name in score.categories)
    groups = {name: [score for score in scores if name in score.categories] for name in names}
    return _summary(scores, level, seed, {name: _summary(group, level, seed, {}) for name, group in groups.items()})


def _summary(scores: Sequence[SampleScore], level: float, seed: int, categories: Mapping[str, Summary]) -> Summary:
    counts = {outcome: sum(score.outcome is outcome for score in scores) for outcome in Outcome}
    means = {}
    for metric in Metric:
        values = [score.values[metric] for score in scores if metric in score.values]
        if values:
            low, high = bootstrap_interval(values, level, seed)
            means[metric] = Estimate(sum(values) / len(values), low, high, len(values))
    return Summary(
        len(scores),
        counts[Outcome.SCORED],
        counts[Outcome.INVALID],
        counts[Outcome.HALLUCINATED],
        counts[Outcome.ERROR],
        means,
        categories,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two systems on the answers that both have a score for."""

    n: int
    difference: float
    """Mean of the second less the first."""
    p_value: float
    """Two-sided paired permutation test."""


def compare(first: Sequence[SampleScore], second: Sequence[SampleScore], metric: Metric, seed: int = 0) -> Comparison:
    """Paired test of one metric; answers that either system has no score for are left out, so prefer mode `strict`.

    Raises:
        ValueError: the two are not of the same samples, or no sample has both scores.
    """
    ours, theirs = ({score.sample_id: score.values for score in scores} for scores in (first, second))
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())[0]
        raise ValueError(f"sample {odd!r} is in one of the two alone; compare scores of the same samples")
    both = [i for i in ours if metric in ours[i] and metric in theirs[i]]
    if not both:
        raise ValueError(f"no sample has a score of {metric} in both")
    a, b = [ours[i][metric] for i in both], [theirs[i][metric] for i in both]
    difference = (sum(b) - sum(a)) / len(both)
    return Comparison(len(both), difference, paired_permutation_test(a, b, seed))

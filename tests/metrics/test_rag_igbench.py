"""Scores of many answers: nothing is lost, failures count as the mode says, and encoders are asked once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from samrag.metrics.interleaved import Mode
from samrag.metrics.rag_igbench import (
    Metric,
    Outcome,
    Sample,
    SampleScore,
    compare,
    score_samples,
    summarize,
)
from samrag.schema import Language

GOLD = "Take sand.\n\n![sand](IMG#2)\n\nWet it well.<sup>[1](DOC#1)</sup>\n\n![water](IMG#1)"
PLACES = ("one.png", "two.png", "three.png")


def contract(answer: str) -> str:
    return json.dumps({"reason": "r", "category": "how-to", "answer": answer})


def sample(output: str, reference: str = GOLD, **changes: object) -> Sample:
    made = Sample("s", output, reference, 3, Language.EN, ("food", "how-to"), PLACES)
    return replace(made, **changes)  # type: ignore[arg-type]


class Letters:
    """Counts of letters: equal texts are alike, texts without a common letter are not."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        self.asked.append(list(texts))
        return np.array([[text.count(chr(code)) for code in range(32, 127)] for text in texts], dtype=np.float32)


class Clip:
    """Every image is like every text: cosine 0.28, between the bounds."""

    def __init__(self) -> None:
        self.images: list[str] = []
        self.texts: list[str] = []

    def encode_images(self, images: Sequence[str]) -> np.ndarray:
        self.images += images
        return np.tile([5.0, 0.0], (len(images), 1))

    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        self.texts += texts
        return np.tile([0.28, 0.96], (len(texts), 1))


def one(item: Sample, mode: Mode = Mode.PAPER) -> SampleScore:
    (score,) = score_samples([item], mode, Letters(), Clip())
    return score


@pytest.mark.parametrize("mode", [Mode.PAPER, Mode.STRICT])
@pytest.mark.parametrize("output", [GOLD, contract(GOLD)])
def test_a_perfect_answer_scores_1_wherever_its_images_allow(output: str, mode: Mode) -> None:
    score = one(sample(output), mode)
    assert score.outcome is Outcome.SCORED
    assert score.values[Metric.CLIP] == pytest.approx(0.6)
    assert score.values[Metric.MEAN] == pytest.approx((4 + 0.6) / 5)
    assert {m: v for m, v in score.values.items() if m not in (Metric.CLIP, Metric.MEAN)} == pytest.approx(
        dict.fromkeys((m for m in Metric if m not in (Metric.CLIP, Metric.MEAN)), 1.0)
    )


def test_released_mode_computes_as_the_released_code() -> None:
    score = one(sample(contract(GOLD)), Mode.RELEASED)
    kendall = (1 + 0.5 * 1 / 3) / 1.5
    assert score.values[Metric.KENDALL] == pytest.approx(kendall)
    assert score.values[Metric.ROUGE1] == pytest.approx(10 / 11)  # its parser's "<br>" counts as a word
    alignment = score.values[Metric.ALIGNMENT]
    assert score.values[Metric.MEAN] == pytest.approx((2 * alignment + 1 + kendall + 0.6) / 5)


BAD = {
    "empty": (contract(""), {Mode.PAPER: Outcome.INVALID, Mode.RELEASED: Outcome.ERROR}),
    "markdown": (GOLD, {Mode.PAPER: Outcome.SCORED, Mode.RELEASED: Outcome.INVALID}),
    "beyond": (contract("Sand ![x](IMG#4)"), {Mode.PAPER: Outcome.HALLUCINATED, Mode.RELEASED: Outcome.HALLUCINATED}),
    "zero": (contract("Sand ![x](IMG#0)"), {Mode.PAPER: Outcome.HALLUCINATED, Mode.RELEASED: Outcome.SCORED}),
    "endless": (
        contract(f"Sand ![x](IMG#{'9' * 5000})"),
        {Mode.PAPER: Outcome.HALLUCINATED, Mode.RELEASED: Outcome.HALLUCINATED},
    ),
    "elsewhere": (
        contract("Sand ![x](https://a.org/b.png)"),
        {Mode.PAPER: Outcome.HALLUCINATED, Mode.RELEASED: Outcome.SCORED},
    ),
    "no images": (contract("Sand."), {Mode.PAPER: Outcome.SCORED, Mode.RELEASED: Outcome.SCORED}),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("mode", Mode)
def test_what_cannot_be_scored_is_left_out_or_scored_0_and_says_why(name: str, mode: Mode) -> None:
    output, outcomes = BAD[name]
    score = one(sample(output), mode)
    assert score.outcome is outcomes[Mode.PAPER if mode is Mode.STRICT else mode]
    if score.outcome is Outcome.SCORED:
        assert set(score.values) == set(Metric)
    else:
        assert score.detail
        assert dict(score.values) == (dict.fromkeys(Metric, 0.0) if mode is Mode.STRICT else {})


def test_texts_without_images_agree_and_the_released_code_gives_up() -> None:
    text = sample("Sand.", "Sand.")
    assert one(text).values[Metric.EDIT] == one(text).values[Metric.KENDALL] == 1
    failed = one(replace(text, output=contract("Sand.")), Mode.RELEASED)
    assert (failed.outcome, failed.detail) == (Outcome.ERROR, "Kendall of 0 images against none")


def test_encoders_are_asked_once_for_distinct_texts_and_images() -> None:
    letters, clip = Letters(), Clip()
    samples = [sample(GOLD), sample(contract(GOLD)), sample("x ![](IMG#3) y"), sample("no image"), sample("")]
    score_samples(samples, Mode.PAPER, letters, clip)
    assert len(letters.asked) == 1
    assert len(letters.asked[0]) == len(set(letters.asked[0])) == 2
    assert sorted(clip.images) == sorted(PLACES)
    assert len(clip.texts) == len(set(clip.texts)) == 3
    assert all(len(text) <= 25 for text in clip.texts)


def test_alignment_looks_at_shared_images_and_clip_at_all_generated_ones() -> None:
    score = one(sample("Take sand.\n\n![s](IMG#2)\n\nWet it well.\n\n![w](IMG#3)"))
    assert score.values[Metric.ALIGNMENT] == pytest.approx(1)
    assert score.values[Metric.CLIP] == pytest.approx(0.6)
    none = one(sample("Take ![s](IMG#3)", "Take ![s](IMG#1)"))
    assert none.values[Metric.ALIGNMENT] == 0


def test_without_an_encoder_its_score_and_the_mean_are_missing_not_0() -> None:
    for mode in (Mode.PAPER, Mode.STRICT):
        scores = score_samples([sample(GOLD), sample("")], mode, image_encoder=Clip())
        for score in scores:
            if score.values:
                assert set(Metric) - set(score.values) == {Metric.ALIGNMENT, Metric.MEAN}


def test_an_encoder_that_loses_a_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 items"):
        score_samples([sample(GOLD)], Mode.PAPER, lambda texts: np.ones((1, 4)))


def test_images_without_a_place_are_an_error_for_clip_alone() -> None:
    bare = sample(GOLD, candidates=())
    assert score_samples([bare])[0].outcome is Outcome.SCORED
    with pytest.raises(ValueError, match="'s' does not say where its images are"):
        score_samples([bare], image_encoder=Clip())
    with pytest.raises(ValueError, match="2 candidates"):
        sample(GOLD, candidates=PLACES[:2])


# --- summaries ---


def many(mode: Mode) -> list[SampleScore]:
    outputs = [GOLD, contract("Sand ![x](IMG#2)"), "", contract("![x](IMG#9)"), contract("Sand ![x](IMG#2)")]
    samples = [
        sample(output, sample_id=str(i), categories=("food" if i % 2 else "craft", "how-to"))
        for i, output in enumerate(outputs)
    ]
    return score_samples([*samples, sample("", sample_id="5", error="server")], mode)


def test_every_answer_is_counted_once_whatever_became_of_it() -> None:
    for mode in (Mode.PAPER, Mode.STRICT):
        summary = summarize(many(mode))
        for part in (summary, *summary.categories.values()):
            parts = part.n_scored + part.n_invalid + part.n_hallucinated + part.n_error
            assert part.n_total == parts
        assert (summary.n_total, summary.n_scored, summary.n_invalid, summary.n_hallucinated, summary.n_error) == (
            6, 3, 1, 1, 1,
        )  # fmt: skip
        assert set(summary.categories) == {"craft", "food", "how-to"}
        assert summary.categories["how-to"].n_total == 6


def test_strict_means_are_over_all_answers_and_paper_means_over_the_scored() -> None:
    paper, strict = summarize(many(Mode.PAPER)), summarize(many(Mode.STRICT))
    edit = paper.means[Metric.EDIT]
    assert (edit.value, edit.n) == (pytest.approx((1 + 0.5 + 0.5) / 3), 3)
    assert (strict.means[Metric.EDIT].value, strict.means[Metric.EDIT].n) == (pytest.approx(2 / 6), 6)
    assert edit.low <= edit.value <= edit.high
    assert Metric.MEAN not in paper.means
    assert summarize([]).n_total == 0


def test_two_systems_are_compared_sample_by_sample() -> None:
    good = [sample(GOLD, sample_id=str(i)) for i in range(12)]
    poor = [replace(item, output="Sand ![x](IMG#3)" if i < 11 else "") for i, item in enumerate(good)]
    first, second = score_samples(poor), score_samples(good)
    result = compare(first, second, Metric.EDIT)
    assert (result.n, result.difference) == (11, 1)
    assert result.p_value == pytest.approx(2 / 2**11)
    assert compare(second, first, Metric.EDIT).difference == -1
    with pytest.raises(ValueError, match="'11' is in one of the two alone"):
        compare(first[:11], second, Metric.EDIT)
    with pytest.raises(ValueError, match="clip in both"):
        compare(first, second, Metric.CLIP)

"""Scores of interleaved answers: golden values of both modes, closed forms, and the released code's mistakes kept."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samrag.errors import UserError
from samrag.metrics.interleaved import (
    ImageSetScore,
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
    released_concordance,
    rouge1,
)
from samrag.metrics.words import counted_words, packaged_stop_words, words
from samrag.schema import Language

ASSETS = Path(__file__).parent.parent / "assets"
GOLDEN: list[dict[str, Any]] = json.loads((ASSETS / "rag_igbench_scores.json").read_text(encoding="utf-8"))
JIEBA: list[dict[str, Any]] = json.loads((ASSETS / "jieba_words.json").read_text(encoding="utf-8"))
IMAGES = st.lists(st.integers(1, 7), max_size=8)


def or_none(score: Callable[..., float], *arguments: Any) -> float | None:
    try:
        return score(*arguments)
    except UndefinedScoreError:
        return None


def near(value: float | None) -> Any:
    return value if value is None else pytest.approx(value, abs=1e-9)


# --- lists of images ---


def test_all_golden_scores_of_both_modes_to_nine_places() -> None:
    assert len(GOLDEN) == 120
    undefined = 0
    for case in GOLDEN:
        shown, wanted, n = case["generated"], case["reference"], case["num_candidates"]
        assert or_none(kendall_score, shown, wanted, n, Mode.RELEASED) == near(case["kendall_released"])
        assert or_none(released_concordance, shown, wanted) == near(case["kendall_released_unscaled"])
        if not shown and not wanted:  # the formulas give no number
            assert case["edit"] is case["kendall_paper"] is None
            undefined += 1
            continue
        assert edit_score(shown, wanted) == near(case["edit"])
        assert (
            kendall_score(shown, wanted, n)
            == kendall_score(shown, wanted, n, Mode.STRICT)
            == near(case["kendall_paper"])
        )
    assert 0 < undefined < 20


@pytest.mark.parametrize(
    ("shown", "wanted", "n", "edit", "released", "paper"),
    [
        ("1 3 2", "1 2 3", 10, 1 / 3, 0.6, 2 / 3),
        ("1 4 2", "1 2 3", 10, 1 / 3, 0.3, 1.0),
        ("1 2 3", "1", 10, 1 / 3, 0.29 / 0.9, 1 / 3),
        ("1 9", "1 2", 12, 0.5, 0.0, 0.5),
        ("1 2", "1 2 3 4", 4, 0.5, 2 / 3, 1.0),
        ("1", "", 5, 0.0, None, 0.0),
        ("", "1", 5, 0.0, 0.0, 0.0),
        ("", "", 5, 1.0, None, 1.0),
        ("1", "1", 0, 1.0, None, 1.0),
    ],
)
def test_edge_cases_of_both_modes(
    shown: str, wanted: str, n: int, edit: float, released: float | None, paper: float
) -> None:
    lists = shown.split(), wanted.split()
    assert edit_score(*lists) == near(edit)
    assert kendall_score(*lists, n) == near(paper)
    assert or_none(kendall_score, *lists, n, Mode.RELEASED) == near(released)


@given(IMAGES, IMAGES)
def test_kendall_counts_pairs_in_order(shown: list[int], wanted: list[int]) -> None:
    place = {image: i for i, image in enumerate(wanted)}
    kept = [place[image] for image in shown if image in place]
    pairs = list(combinations(kept, 2))
    if pairs:
        assert kendall_score(shown, wanted, 7) == pytest.approx(sum(a < b for a, b in pairs) / len(pairs))


@given(IMAGES, IMAGES)
def test_edit_is_a_similarity(shown: list[int], wanted: list[int]) -> None:
    score = edit_score(shown, wanted)
    assert 0 <= score <= 1
    assert score == edit_score(wanted, shown) == edit_score(shown[::-1], wanted[::-1])
    assert (score == 1) == (shown == wanted)
    assert edit_score([0, *shown], [0, *wanted]) >= score or not shown


@given(IMAGES)
def test_a_perfect_list_scores_1_in_paper_mode(images: list[int]) -> None:
    distinct = list(dict.fromkeys(images))
    assert edit_score(distinct, distinct) == kendall_score(distinct, distinct, 7) == 1
    assert image_set_score(distinct, distinct) == ImageSetScore(1, 1, 1)


def test_image_sets() -> None:
    assert image_set_score([3, 1, 1, 9], [1, 2]) == ImageSetScore(1 / 3, 1 / 2, 2 / 5)
    assert image_set_score([], [1]) == image_set_score([1], []) == ImageSetScore(0, 0, 0)


def test_long_lists_take_milliseconds() -> None:
    rng = random.Random(0)
    shown, wanted = ([rng.randrange(50) for _ in range(n)] for n in (1000, 50))
    start = time.perf_counter()
    edit_score(shown, wanted), kendall_score(shown, wanted, 50), kendall_score(wanted, wanted, 50, Mode.RELEASED)
    assert time.perf_counter() - start < 0.2


# --- words ---


@pytest.mark.parametrize("case", JIEBA, ids=lambda case: case["text"][:12])
def test_texts_are_cut_as_jieba_cuts_them(case: dict[str, Any]) -> None:
    pytest.importorskip("rjieba")
    assert words(case["text"], Language.ZH) == case["words"]


def test_english_is_cut_without_a_dictionary_to_the_same_words() -> None:
    english = [case for case in JIEBA if case["text"].isascii()]
    assert len(english) >= 4
    for case in english:
        assert words(case["text"], Language.EN) == case["words"]


@pytest.mark.parametrize("language", Language)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("candidate", "reference", "f1"),
    [
        (
            "\u6728\u5170\u82b1\u7684\u82b1\u8bed\u662f\u6301\u4e45\u7684\u53cb\u8c0a",
            "\u6728\u5170\u82b1\u8c61\u5f81\u6301\u4e45\u7684\u53cb\u8c0a",
            0.75,
        ),
        ("The cat sat on the mat.", "the cat is on the mat", 0.7272727),
        ("Sand painting is an art form", "Sand painting is an ancient art form", 0.9230769),
        ("1. \u4e2d\u539f\u798f\u5854\uff1a\u9ad8388\u7c73", "2. \u4e2d\u539f\u798f\u5854\uff1a\u9ad8388\u7c73", 1.0),
        ("\u53cb\u8c0a\u53cb\u8c0a\u53cb\u8c0a", "\u53cb\u8c0a", 1.0),
        ("\u8eab\u9ad8 3.5 \u7c73", "\u8eab\u9ad8 3 \u7c73", 0.6666667),
        ("Running runs", "run run", 0.0),
        ("a a a", "a", 1.0),
    ],
)
def test_rouge_1_of_the_published_package(
    candidate: str, reference: str, f1: float, mode: Mode, language: Language
) -> None:
    if language is Language.ZH:
        pytest.importorskip("rjieba")
    if candidate.isascii() or language is Language.ZH:
        assert rouge1(candidate, reference, language, mode) == pytest.approx(f1, abs=1e-6)


def test_chinese_without_its_cutter_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rjieba", None)
    with pytest.raises(UserError, match=r"pip install samrag\[zh\]"):
        rouge1("\u7684", "\u7684", Language.ZH)


def test_the_latin_words_of_the_dictionary_are_found_inside_other_runs() -> None:
    assert words("DOC#1 aAT&Tb c++c+", Language.EN) == ["DO", "C#", "1", "a", "AT&T", "b", "c++", "c", "+"]


def test_the_stop_words_can_be_others() -> None:
    pytest.importorskip("rjieba")
    text = "\u8eab\u9ad8 3.5 \u7c73", "\u8eab\u9ad8 3 \u7c73"
    assert rouge1(*text, Language.ZH, stop_words=()) == pytest.approx(6 / 7)
    assert counted_words("a . * 7", Language.EN, ()) == {"a", "*", "7"}
    packaged = packaged_stop_words()
    assert packaged >= set("0123456789.*,") | {"\u7684", "\u662f", "\uff0c"}
    assert not packaged & {"the", "is", "a", ""}


def test_the_released_f1_stays_below_1_and_gives_up_on_a_text_without_words() -> None:
    assert rouge1("one two", "two one", Language.EN, Mode.RELEASED) == pytest.approx(0.999999995, abs=1e-12)
    assert rouge1("one two", "two one", Language.EN) == 1
    for pair in (("", "a"), ("a", ""), ("", ""), ("...", "a")):
        with pytest.raises(UndefinedScoreError):
            rouge1(*pair, Language.EN, Mode.RELEASED)
    assert rouge1("", "a", Language.EN) == rouge1("a", "", Language.EN) == 0
    assert rouge1("", ".", Language.EN) == 1


@given(st.text(), st.text())
def test_rouge_1_is_a_similarity(a: str, b: str) -> None:
    score = rouge1(a, b, Language.EN)
    assert 0 <= score <= 1
    assert score == rouge1(b, a, Language.EN)
    assert rouge1(a, a, Language.EN) == 1


@pytest.mark.parametrize("language", Language)
def test_three_thousand_words_take_milliseconds(language: Language) -> None:
    if language is Language.ZH:
        pytest.importorskip("rjieba")
        rouge1("\u70ed\u8eab", "\u70ed", language)
    rng = random.Random(0)
    vocabulary = [word for case in JIEBA for word in case["words"]]
    a, b = (" ".join(rng.choices(vocabulary, k=3000)) for _ in range(2))
    start = time.perf_counter()
    rouge1(a, b, language)
    assert time.perf_counter() - start < 0.1


# --- similarities and the mean ---


def test_similarities_are_scaled_between_their_bounds_and_averaged() -> None:
    assert alignment_score([0.7, 1.0, 0.85, -1, 1.0000001]) == pytest.approx((0 + 1 + 0.5 + 0 + 1) / 5)
    assert clip_score([0.1, 0.4, 0.25, 0.9, 0]) == pytest.approx((0 + 1 + 0.5 + 1 + 0) / 5)
    assert alignment_score([]) == clip_score([]) == 0
    with pytest.raises(ValueError, match="not a number"):
        clip_score([float("nan")])


def test_the_mean_of_five_reproduces_published_rows_and_the_released_mean_its_mistake() -> None:
    gpt_4o = (57.42, 51.28, 46.50, 38.81, 36.04)
    assert mean_score(*gpt_4o) == pytest.approx(46.01, abs=0.005)
    assert mean_score(*gpt_4o, Mode.RELEASED) == pytest.approx(42.29, abs=0.005)


# --- answers ---

NEIGHBOURS = "![a](IMG#12) adjacent ![b](IMG#3) end text here that continues"


def test_contexts_hold_no_markup_but_in_released_mode_what_the_released_code_leaves() -> None:
    released = read_answer(NEIGHBOURS, Mode.RELEASED)
    assert released.contexts == {"12": " adjacent ![b](IMG#3", "3": "a](IMG#12) adjacent  end text here that "}
    paper = read_answer(NEIGHBOURS)
    assert paper.contexts == {12: " adjacent  end text ", 3: " adjacent  end text here that "}
    assert paper.text == released.text == "adjacent  end text here that continues"
    assert (paper.images, released.images) == ((12, 3), ("12", "3"))


@pytest.mark.parametrize("mode", Mode)
def test_citations_are_no_text(mode: Mode) -> None:
    reading = read_answer("One.<sup>[1](DOC#1)</sup> Two ![x [y]](IMG#2)<sup>[2](DOC#2)</sup>", mode)
    assert reading.text == "One. Two"
    assert [str(image) for image in reading.images] == ["2"]


def test_a_repeated_image_stays_in_the_list_and_has_its_last_context() -> None:
    reading = read_answer("one ![](IMG#1) two ![](IMG#01)")
    assert reading.images == (1, 1)
    assert reading.contexts == {1: "one  two "}
    assert read_answer("one ![](IMG#1) two ![](IMG#01)", Mode.RELEASED).images == ("1", "01")


def contract(answer: str, end: str = '"}') -> str:
    return f'{{"reason": "r", "category": "how-to", "answer": "{answer}{end}'


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (contract("a ![x](IMG#1)"), "a ![x](IMG#1)"),
        ("```json\n" + contract("fenced") + "\n```", "fenced"),
        ("Sure: " + contract("prose"), "prose"),
        ('{"reason":"r","answer":"compact"}', None),
        (contract(r"say \"yes\""), None),
        (contract('say "yes" now'), "say 'yes' now"),
        ('{"answer": "first", "category": "how-to"}', "first', 'category': 'how-to"),
        (contract("cut short", end=""), "cut short"),
        (contract("no brace", end='"'), "no brace"),
        (contract("a melon, a bison", end=""), "a melon, a bi"),
        (contract(r"\(x\)"), None),
        (contract(r"\alpha"), None),
        (contract(r"2 \times 3"), "2 \times 3"),
        (contract(r"\frac \beta"), "\frac \beta"),
        (contract(r"\nabla"), "<br>abla"),
        (contract("a\tb"), None),
        (contract("a\nb"), "a<br>b"),
        ("plain ![x](IMG#1)", None),
        (contract(""), ""),
        ("", None),
    ],
)
def test_the_released_parser_rejects_and_garbles_as_it_did(output: str, answer: str | None) -> None:
    assert read_released_output(output) == answer


@given(st.text() | st.lists(st.sampled_from(['{"', '"answer": "', '"', "}", "\\", "n", "[" * 99])).map("".join))
def test_the_released_parser_never_raises(output: str) -> None:
    read_released_output(output)

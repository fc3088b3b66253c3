"""Answer scores: official vectors, closed forms, and defined results for every input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samrag.metrics.answers import mmqa_list_em, mmqa_list_f1, mmqa_normalize, squad_em, squad_f1, squad_join

ASSETS = Path(__file__).parent.parent / "assets"
OFFICIAL = json.loads((ASSETS / "mmqa_list_metrics.json").read_text(encoding="utf-8"))

ODD_TOKENS = [
    *("", " ", "-", "a", "the", "two", "2", "3 horses", "horse", "point", "million", "million\tone"),
    *("thousand\x0bone", "nan", "-inf", "1e999", "1_000", "9" * 6000, "0x10", "+5", ".", "$"),
    *("\u0663", "\u00b2", "\u00bd", "1\u20132", "\u0130"),
]
ODD_TEXTS = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(ODD_TOKENS), max_size=4).map(" ".join))
ODD_LISTS = st.lists(st.one_of(ODD_TEXTS, st.floats(), st.integers()), max_size=5)


# --- MultiModalQA ---


def test_all_200_official_vectors_are_reproduced_exactly() -> None:
    assert len(OFFICIAL) == 200
    wrong = [
        case
        for case in OFFICIAL
        if mmqa_list_em(case["prediction"], case["gold"]) != case["em"]
        or mmqa_list_f1(case["prediction"], case["gold"]) != case["f1"]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("two", "2.0"),
        ("2.0", "2.0"),
        ("Twenty-One", "20.0 1.0"),
        ("-5", "5.0"),
        ("point", "0.0"),
        ("million", "1000000.0"),
        ("1,000", "1000.0"),
        ("100%", "100.0"),
        ("$5", "5.0"),
        ("1e3", "1000.0"),
        ("U.S.", "us"),
        ("a", ""),
        ("1\u20132", "1\u20132"),
        ("\u0663", "3.0"),
        ("nan", "nan"),
        ("Infinity", "inf"),
        ("9" * 6000, "inf"),
        ("\u00b2", "\u00b2"),
        ("million\tone", "million one"),
    ],
)
def test_normal_form_of_one_answer(text: str, normal: str) -> None:
    assert mmqa_normalize(text) == normal


@pytest.mark.parametrize(
    ("prediction", "gold", "em", "f1"),
    [
        (["two"], ["2"], 1.0, 1.0),
        (["2.0"], ["two"], 1.0, 1.0),
        ([""], ["a"], 1.0, 1.0),
        ([], ["x"], 0.0, 0.0),
        (["x"], [], 0.0, 0.0),
        ([], [], 1.0, 1.0),
        (["Bing Crosby"], ["Bing Crosby", "David Bowie"], 0.0, 0.5),
        (["Bing Crosby, David Bowie"], ["Bing Crosby", "David Bowie"], 0.0, 0.33),
        (["Bing Crosby", "David Bowie", "Cher"], ["Bing Crosby", "David Bowie"], 0.0, 0.67),
        (["horse"], ["3 horses"], 0.0, 0.0),
        (["horses"], ["3 horses"], 0.0, 0.0),
        (["3"], ["3 horses"], 0.0, 0.67),
        (["red", "blue", "blue"], ["red", "red", "blue"], 1.0, 0.67),
    ],
)
def test_list_scores_of_the_documented_cases(prediction: list[str], gold: list[str], em: float, f1: float) -> None:
    assert mmqa_list_em(prediction, gold) == em
    assert mmqa_list_f1(prediction, gold) == f1


def test_numbers_are_scored_as_their_text_and_a_bare_answer_as_a_list_of_one() -> None:
    assert mmqa_list_em([2.0], ["two"]) == mmqa_list_f1([2.0], ["two"]) == 1.0
    assert mmqa_list_em("red car", ["red car"]) == mmqa_list_f1("red car", ["red car"]) == 1.0


def test_f1_pairs_answers_by_the_best_alignment_not_by_greed() -> None:
    # The best single pair scores 0.8 and leaves 0 for the other; the best alignment scores 2/3 + 1/2.
    assert mmqa_list_f1(["red car wheel", "red"], ["red car", "wheel"]) == 0.58


def test_half_a_hundredth_rounds_like_the_official_script() -> None:
    # 3 of 40 right: NumPy scales 0.075 to 7.5 and gives 0.08; Python's own round gives 0.07.
    assert mmqa_list_f1([f"q{i}x" for i in range(3)], [f"q{i}x" for i in range(40)]) == 0.08


@settings(max_examples=150, deadline=None)
@given(ODD_LISTS, ODD_LISTS)
def test_every_input_has_a_score_that_order_does_not_change(prediction: list, gold: list) -> None:
    em, f1 = mmqa_list_em(prediction, gold), mmqa_list_f1(prediction, gold)
    assert em in (0.0, 1.0)
    assert 0.0 <= f1 <= 1.0
    assert mmqa_list_em(prediction[::-1], gold[::-1]) == em
    assert mmqa_list_f1(prediction[::-1], gold[::-1]) == pytest.approx(f1, abs=0.011)


@settings(max_examples=100, deadline=None)
@given(ODD_LISTS)
def test_a_list_matches_itself_in_any_order(answers: list) -> None:
    assert mmqa_list_em(answers[::-1], answers) == 1.0
    assert mmqa_list_f1(answers[::-1], answers) == 1.0


# --- SQuAD ---


def test_squad_ignores_case_articles_and_punctuation_but_not_number_words() -> None:
    assert squad_em("The U.S.", ["us"]) == 1.0
    assert squad_em("two", ["2"]) == 0.0
    assert mmqa_list_em(["two"], ["2"]) == 1.0


def test_squad_f1_counts_repeated_tokens() -> None:
    assert squad_f1("red red", ["red"]) == pytest.approx(2 / 3)
    assert squad_f1("red red", ["red red"]) == 1.0


@pytest.mark.parametrize(("shared", "extra", "missing"), [(1, 0, 1), (2, 3, 0), (3, 1, 2), (0, 2, 2)])
def test_squad_f1_is_the_harmonic_mean_of_precision_and_recall(shared: int, extra: int, missing: int) -> None:
    common = [f"c{i}" for i in range(shared)]
    prediction = " ".join([*common, *(f"x{i}" for i in range(extra))])
    gold = " ".join([*common, *(f"m{i}" for i in range(missing))])
    assert squad_f1(prediction, [gold]) == pytest.approx(2 * shared / (2 * shared + extra + missing))


@settings(max_examples=100, deadline=None)
@given(ODD_TEXTS, st.lists(ODD_TEXTS, min_size=1, max_size=4))
def test_squad_scores_are_the_maximum_over_golds(prediction: str, golds: list[str]) -> None:
    assert squad_em(prediction, golds) == max(squad_em(prediction, [gold]) for gold in golds)
    assert squad_f1(prediction, golds) == max(squad_f1(prediction, [gold]) for gold in golds)
    assert squad_f1(prediction, golds) >= squad_em(prediction, golds)


def test_without_golds_only_an_empty_prediction_is_right() -> None:
    assert squad_em("", []) == squad_f1("the", []) == 1.0
    assert squad_em("x", []) == squad_f1("x", []) == 0.0


@given(st.permutations(["Bing Crosby", "the Beatles", "Abba"]))
def test_joined_answers_are_scored_without_regard_to_their_order(answers: list[str]) -> None:
    gold = squad_join(["Abba", "Beatles", "Bing Crosby"])
    assert squad_em(squad_join(answers), [gold]) == 1.0
    assert squad_em(squad_join(answers[:2]), [gold]) == 0.0

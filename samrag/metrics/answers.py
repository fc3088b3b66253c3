"""Answer scores: SQuAD's and MultiModalQA's. Pure.

The two families differ for several answers and for numbers, so each function bears the name of its family and a
report says which it shows.

- SQuAD: one text against alternative golds, the best counts. Text is lower-cased; ASCII punctuation and articles go.
  F1 compares bags (multisets) of tokens. Source: the SQuAD 2.0 evaluation script.
- MultiModalQA: a list of answers against a list that is *one* reference. Numbers and number words are unified, F1
  compares sets of tokens after an optimal one-to-one alignment and is rounded to two decimals per question.
  Source: `baselines/evaluate.py` of allenai/multimodalqa, reproduced to the last bit where that script gives a result.

Left out: totals and their x 100 (a mean, taken where the report is made), and the rule that a question without a
prediction scores 0 (the caller's, who knows the questions).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from word2number.w2n import word_to_num  # type: ignore[import-untyped]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


# --- SQuAD ---


def squad_normalize(text: str) -> str:
    """Lower-case a text and drop its ASCII punctuation, its articles and its surplus spaces."""
    bare = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def squad_join(answers: Sequence[str]) -> str:
    """Make one text of a list of answers: joined by ", " in the order of their normal forms.

    SQuAD scores one text. For a gold list that is one reference (MultiModalQA), score
    `squad_em(squad_join(prediction), [squad_join(gold)])`: the order of a list then does not matter, every answer
    of the list is wanted, and a single answer is scored as SQuAD does. Passing the gold list itself as `golds` is
    the lenient reading: any one of them suffices.
    """
    return ", ".join(sorted(answers, key=squad_normalize))


def squad_em(prediction: str, golds: Sequence[str]) -> float:
    """Exact match of normal forms, maximum over the alternative golds: 0 or 1.

    No golds means "there is no answer": only a prediction that normalises to nothing is then right (SQuAD 2.0).
    """
    wanted = {squad_normalize(gold) for gold in golds or [""]}
    return float(squad_normalize(prediction) in wanted)


def squad_f1(prediction: str, golds: Sequence[str]) -> float:
    """F1 of the bags of normalised tokens, maximum over the alternative golds: 0 to 1.

    Two empty bags score 1, an empty bag against a filled one 0. No golds: see `squad_em`.
    """
    bag = Counter(squad_normalize(prediction).split())
    return max(_bag_f1(bag, Counter(squad_normalize(gold).split())) for gold in golds or [""])


def _bag_f1(prediction: Counter[str], gold: Counter[str]) -> float:
    """F1 of two multisets of tokens."""
    if not prediction or not gold:
        return float(prediction == gold)
    common = (prediction & gold).total()
    return 2 * common / (prediction.total() + gold.total())


# --- MultiModalQA ---


def mmqa_normalize(text: str) -> str:
    """Normal form of one answer: tokens between spaces and hyphens, each unified on its own.

    A token is lower-cased; unless it is a number it loses its ASCII punctuation; a number or number word becomes
    `str(float)` ("two" and "2" are "2.0"); articles and empty tokens go. Whatever Python's `float` reads is a number,
    as in the official script: "nan", "inf", "1e3", "1_000" and the digits of other scripts. A number beyond the range
    of floats is "inf".
    """
    tokens = (_normalize_token(token) for token in re.split("[ -]", text))
    return " ".join(token for token in tokens if token)


def mmqa_list_em(prediction: Sequence[str | float], gold: Sequence[str | float]) -> float:
    """Official list EM: 1 if both lists are equally long and their *sets* of normal forms are equal, else 0.

    A bare string or number stands for a list of one. Two empty lists match.
    """
    predicted, wanted = _normal_forms(prediction), _normal_forms(gold)
    return float(len(predicted) == len(wanted) and set(predicted) == set(wanted))


def mmqa_list_f1(prediction: Sequence[str | float], gold: Sequence[str | float]) -> float:
    """Official list F1: mean token-set F1 of the best alignment over the longer length, rounded to two decimals.

    A pair scores 0 when the gold answer has numbers and the predicted one has none of them. A bare string or number
    stands for a list of one. Two empty lists score 1 (the official script gives no number there), one empty list 0.
    """
    import numpy as np
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    predicted = [set(form.split()) for form in _normal_forms(prediction)]
    wanted = [set(form.split()) for form in _normal_forms(gold)]
    if not predicted and not wanted:
        return 1.0
    scores = np.zeros((len(wanted), len(predicted)))  # scores[gold, predicted]
    for row, gold_bag in enumerate(wanted):
        numbers = {token for token in gold_bag if _is_number(token)}
        for column, bag in enumerate(predicted):
            if not numbers or numbers & bag:
                scores[row, column] = _set_f1(bag, gold_bag)
    rows, columns = linear_sum_assignment(scores, maximize=True)
    aligned = np.zeros(max(len(wanted), len(predicted)))
    aligned[rows] = scores[rows, columns]
    # NumPy's rounding (scale, then half to even), not Python's exact one: the official figures are made with it.
    return float(np.round(np.mean(aligned), 2))


def _normal_forms(answers: Sequence[str | float] | float) -> list[str]:
    """Normal forms of a list of answers; a bare string or number is a list of one, as in the official script."""
    items = [answers] if isinstance(answers, (str, int, float)) else answers
    return [mmqa_normalize(str(item)) for item in items]


def _set_f1(prediction: set[str], gold: set[str]) -> float:
    """F1 of two sets of tokens, in the official order of operations (the last bit decides some roundings)."""
    common = len(prediction & gold)
    precision = common / len(prediction) if prediction else 1.0
    recall = common / len(gold) if gold else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _normalize_token(token: str) -> str:
    """Normal form of what stands between two spaces or hyphens; may be empty."""
    token = token.lower()
    if not _is_number(token):
        token = token.translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", _unify_number(token)).split())


def _is_number(token: str) -> bool:
    """Whether `float` reads the token."""
    try:
        float(token)
    except ValueError:
        return False
    return True


def _unify_number(token: str) -> str:
    """A number or number word as `str(float)`; any other token as it is."""
    if _is_number(token):
        return str(float(token))
    try:
        return str(float(word_to_num(token)))
    except (ValueError, IndexError):  # IndexError: word2number 1.1 on a bare multiplier ("million\tone")
        return token

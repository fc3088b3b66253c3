"""Rankings by words: BM25, and the title rule.

Both are baselines that any learned retriever must beat: in MultiModalQA most questions about an image name its title.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from samrag.calls import Passage
from samrag.errors import UserError
from samrag.retrieval.index import Hit
from samrag.schema import Document

LexicalRanker: TypeAlias = "Bm25Ranker | TitleRanker"

WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Case-folded words of a text, accents and punctuation removed (`Beyonce's` gives `beyonce`, `s`)."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return WORD.findall("".join(character for character in plain if not unicodedata.combining(character)))


def word_overlap(phrase: str, passages: Sequence[Passage]) -> list[float]:
    """How much of a phrase stands in each passage, from 0 to 1; a word that few of the passages have counts more."""
    sets = [set(words(f"{passage.title} {passage.text}")) for passage in passages]
    wanted = dict.fromkeys(words(phrase))
    weights = {word: math.log((len(sets) + 1) / (sum(word in found for found in sets) + 0.5)) for word in wanted}
    total = sum(weights.values())
    return [sum(weights[word] for word in wanted if word in found) / total if total else 0.0 for found in sets]


class Bm25Ranker:
    """Documents ranked by BM25 (Lucene's form, k1 1.5, b 0.75) over their retrieval texts."""

    def __init__(self, documents: Sequence[Document]) -> None:
        if not documents:
            raise UserError("the corpus is empty; BM25 needs at least one document.")
        import bm25s

        self._doc_ids = [document.doc_id for document in documents]
        self._index = bm25s.BM25()
        self._index.index([words(document.retrieval_text) for document in documents], show_progress=False)

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        """The k best documents of each question, best first; equal scores in corpus order.

        Documents that share no word with the question are left out, so a list may be shorter than k.
        """
        return [self._search_one(question, k) for question in questions]

    def _search_one(self, question: str, k: int) -> list[Hit]:
        vocabulary = self._index.vocab_dict
        known = [word for word in words(question) if word in vocabulary]
        if not known:
            return []
        scores = self._index.get_scores(known)
        matches = np.flatnonzero(scores > 0)
        if len(matches) > k:
            border = np.partition(scores[matches], -k)[-k]
            matches = matches[scores[matches] >= border]
        best = matches[np.argsort(-scores[matches], kind="stable")][:k]
        return [Hit(self._doc_ids[i], float(scores[i])) for i in best]


class TitleRanker:
    """Documents ranked by the longest title that the question contains.

    A title counts when all its words stand in the question, adjacent and in order, whatever the case, the accents and
    the punctuation. Longer titles (in characters) come first. Ties, above all documents that share one title, keep the
    order of the corpus: the rule cannot tell them apart. Documents whose title is not in the question are left out.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        if not documents:
            raise UserError("the corpus is empty; the title rule needs at least one document.")
        self._doc_ids = [document.doc_id for document in documents]
        self._positions: dict[str, list[int]] = defaultdict(list)
        for position, document in enumerate(documents):
            title = " ".join(words(document.title))
            if title:
                self._positions[title].append(position)
        self._lengths = sorted({title.count(" ") + 1 for title in self._positions})

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        """At most k documents a question, best first; the score is the length of the title in characters."""
        return [self._search_one(question, k) for question in questions]

    def _search_one(self, question: str, k: int) -> list[Hit]:
        tokens = words(question)
        grams = {
            " ".join(tokens[start : start + length])
            for length in self._lengths
            for start in range(len(tokens) - length + 1)
        }
        found = [(-len(gram), position) for gram in grams for position in self._positions.get(gram, ())]
        return [Hit(self._doc_ids[position], float(-size)) for size, position in sorted(found)[:k]]


LEXICAL_RANKERS: dict[str, Callable[[Sequence[Document]], LexicalRanker]] = {
    "title": TitleRanker,
    "bm25": Bm25Ranker,
}
"""Rankers by the names they have in configurations."""

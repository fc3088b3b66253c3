"""Hard negatives for the retriever.

The paper's rule (SAM-RAG, section 3.2): of the fifty best documents that are not positives, ten at random. Ours in
addition, each a switch: a positive-aware threshold, candidates of several rankers, and a teacher that looks at what was
drawn (`samrag.relabelling`).

Questions are worked on in blocks, so memory grows with the rows alone, and a row depends on its question, the corpus,
the rule and the seed, not on the block it fell into.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from samrag.errors import UserError
from samrag.retrieval.lexical import LEXICAL_RANKERS, LexicalRanker
from samrag.retrieval.nearest import ExactSearch
from samrag.schema import Document, Question, RetrieverRow

logger = logging.getLogger(__name__)

DENSE = "dense"
"""The retriever's own ranking."""
_BLOCK = 1024
"""Questions worked on at a time."""
_DEEPER = 10
"""How much deeper questions are searched of which the threshold left too few candidates."""


@dataclass(frozen=True, slots=True)
class MiningRule:
    """Which documents become negatives."""

    num_negatives: int = 10
    """Negatives a question (the paper: 10)."""
    top: int = 50
    """Candidates of each ranker they are drawn from (the paper: 50)."""
    relative_margin: float | None = None
    """Drop candidates that score within this share of the best positive's score, which are likely positives without a
    label (NV-Retriever, 2407.15831: 0.05); None is the paper's rule."""
    rankers: tuple[str, ...] = (DENSE,)
    """Where candidates come from; negatives are taken from each in turn while it has any."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_negatives <= self.top:
            raise UserError(
                f"num_negatives is {self.num_negatives} and top is {self.top}; 1 <= num_negatives <= top must hold."
            )
        if self.relative_margin is not None and not 0 <= self.relative_margin < 1:
            raise UserError(f"relative_margin is {self.relative_margin}; it must be in [0, 1), or left out.")
        known = (DENSE, *LEXICAL_RANKERS)
        if not self.rankers or len(set(self.rankers)) < len(self.rankers) or not set(self.rankers) <= set(known):
            raise UserError(f"rankers is {list(self.rankers)}; name some of {', '.join(known)}, each once.")


def mine_negatives(
    questions: Sequence[Question],
    documents: Sequence[Document],
    query_vectors: NDArray[np.float32],
    document_vectors: NDArray[np.float32],
    rule: MiningRule,
    missing: Literal["error", "skip"] = "error",
) -> list[RetrieverRow]:
    """One row a question: its supports as positives, and negatives drawn from the rankings.

    Positives are left out by id, and so are documents of the same text; of documents that share a text, at most one
    becomes a negative. The draw depends on the seed and the question's id alone. Negatives stand in the order drawn, so
    their first n are a sample by the same rule. All scores are the retriever's, whoever ranked.

    Args:
        questions: questions with supports.
        documents: the corpus, N documents.
        query_vectors: of the questions, [Q, D].
        document_vectors: of the corpus, [N, D].
        rule: which documents become negatives.
        missing: what to do with supports that the corpus lacks: refuse, or leave them out, and with them questions
            that have no other.

    Raises:
        UserError: vectors that do not fit, a question without supports, or a support that the corpus lacks.
    """
    for name, vectors, records in (("queries", query_vectors, questions), ("documents", document_vectors, documents)):
        if len(vectors) != len(records):
            raise UserError(f"there are {len(vectors)} vectors of {name}, but {len(records)} {name}; give one each.")
    miner = _Miner(documents, ExactSearch(document_vectors), rule)
    asked = [(number, miner.positives(question, missing)) for number, question in enumerate(questions)]
    asked = [(number, positives) for number, positives in asked if positives]
    rows: list[RetrieverRow] = []
    for start in range(0, len(asked), _BLOCK):
        block = asked[start : start + _BLOCK]
        numbers = [number for number, _ in block]
        rows.extend(
            miner.rows([questions[n] for n in numbers], query_vectors[numbers], [positives for _, positives in block])
        )
    if len(rows) < len(questions):
        logger.warning(
            "%d of %d questions have no support in the corpus; left out", len(questions) - len(rows), len(questions)
        )
    return rows


class _Miner:
    """The corpus, its rankers and the rule."""

    def __init__(self, documents: Sequence[Document], search: ExactSearch, rule: MiningRule) -> None:
        self._search = search
        self._rule = rule
        self._lexical: dict[str, LexicalRanker] = {
            name: LEXICAL_RANKERS[name](documents) for name in rule.rankers if name != DENSE
        }
        self._doc_ids = [document.doc_id for document in documents]
        self._position = {doc_id: position for position, doc_id in enumerate(self._doc_ids)}
        self._texts = [document.retrieval_text for document in documents]
        numbers: dict[str, int] = {}
        self._text = np.array([numbers.setdefault(_plain(text), len(numbers)) for text in self._texts])
        """Number of each document's text, [N]; equal for equal texts."""
        self._num_alike = np.bincount(self._text)

    def positives(self, question: Question, missing: Literal["error", "skip"]) -> list[int]:
        """Positions of the question's distinct supports that are in the corpus."""
        if not question.support_ids and missing == "error":
            raise UserError(f"question {question.question_id!r} has no supporting documents; mine on a labelled split.")
        unknown = [doc_id for doc_id in question.support_ids if doc_id not in self._position]
        if unknown and missing == "error":
            raise UserError(
                f"the support {unknown[0]!r} of question {question.question_id!r} is not in the corpus; "
                "take the corpus of the same split, or skip such questions."
            )
        return [self._position[doc_id] for doc_id in dict.fromkeys(question.support_ids) if doc_id in self._position]

    def rows(
        self, questions: Sequence[Question], vectors: NDArray[np.float32], positives: Sequence[Sequence[int]]
    ) -> list[RetrieverRow]:
        """One row a question; those with too few candidates are searched once more, deeper."""
        known = _padded(positives)
        known_scores = self._search.scores_of(vectors, known)
        alike = np.where(known >= 0, self._num_alike[self._text[known]], 0)
        depths = self._rule.top + alike.sum(axis=1)
        drawn = self._draw(questions, vectors, known, known_scores, depths)
        wanted = self._rule.num_negatives
        short = [n for n, (chosen, _, _) in enumerate(drawn) if len(chosen) < wanted and depths[n] < len(self._search)]
        if short:
            some = [questions[n] for n in short]
            again = self._draw(some, vectors[short], known[short], known_scores[short], _DEEPER * depths[short])
            for n, found in zip(short, again, strict=True):
                drawn[n] = found
        return [
            self._row(question, found, known_scores[n, : len(found)], *drawn[n])
            for n, (question, found) in enumerate(zip(questions, positives, strict=True))
        ]

    def _draw(
        self,
        questions: Sequence[Question],
        vectors: NDArray[np.float32],
        known: NDArray[np.int64],
        known_scores: NDArray[np.float32],
        depths: NDArray[np.int64],
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]]:
        """Positions, scores and rankers of each question's negatives, in the order drawn.

        Args:
            questions: Q of them.
            vectors: of the questions, [Q, D].
            known: positions of their positives, [Q, P], -1 where they end.
            known_scores: scores of their positives, [Q, P].
            depths: how deep each question's rankings are looked into, [Q].
        """
        best = known_scores.max(axis=1)
        margin = self._rule.relative_margin
        limit = np.full_like(best, np.inf) if margin is None else best - margin * np.abs(best)
        found, orders = [], []
        for positions, scores in self._rankings(questions, vectors, min(int(depths.max()), len(self._search))):
            fits = (positions >= 0) & (scores <= limit[:, None]) & (np.arange(positions.shape[1]) < depths[:, None])
            text = self._text[positions]
            for column in known.T:
                fits &= (text != self._text[column][:, None]) | (column < 0)[:, None]
            fits = _first_of_each(text, fits)
            fits &= fits.cumsum(axis=1) <= self._rule.top
            found.append((positions, scores, text))
            orders.append(np.where(fits, 0.0, np.inf))
        for number, (ranker, order) in enumerate(zip(self._rule.rankers, orders, strict=True)):
            streams = [f"{self._rule.seed}:{question.question_id}:{ranker}" for question in questions]
            turn = (order + _chances(streams, order.shape[1])).argsort(axis=1).argsort(axis=1)
            order += turn * len(orders) + number  # each ranker's first, then each one's second, ...
        positions, scores, text = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        order = np.concatenate(orders, axis=1)
        in_turn = order.argsort(axis=1, kind="stable")
        positions, scores, text, order = (
            np.take_along_axis(array, in_turn, axis=1) for array in (positions, scores, text, order)
        )
        taken = _first_of_each(text, np.isfinite(order))
        taken &= taken.cumsum(axis=1) <= self._rule.num_negatives
        ranker_of = np.where(taken, order, 0).astype(np.int64) % len(orders)
        places = map(np.flatnonzero, taken)
        return [(positions[n, row], scores[n, row], ranker_of[n, row]) for n, row in enumerate(places)]

    def _rankings(
        self, questions: Sequence[Question], vectors: NDArray[np.float32], depth: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Positions[Q, K] and the retriever's scores[Q, K], ranker by ranker; each best first, -1 where it ends."""
        for name in self._rule.rankers:
            if name == DENSE:
                nearest = self._search.search(vectors, depth)
                yield nearest.positions, nearest.scores
            else:
                hits = self._lexical[name].search([question.question for question in questions], depth)
                positions = _padded([[self._position[hit.doc_id] for hit in ranking] for ranking in hits])
                yield positions, self._search.scores_of(vectors, positions)

    def _row(
        self,
        question: Question,
        positives: Sequence[int],
        positive_scores: NDArray[np.float32],
        negatives: NDArray[np.int64],
        scores: NDArray[np.float32],
        rankers: NDArray[np.int64],
    ) -> RetrieverRow:
        chosen = negatives.tolist()
        return RetrieverRow(
            query=question.question,
            pos=tuple(map(self._texts.__getitem__, positives)),
            neg=tuple(map(self._texts.__getitem__, chosen)),
            query_id=question.question_id,
            pos_ids=tuple(map(self._doc_ids.__getitem__, positives)),
            neg_ids=tuple(map(self._doc_ids.__getitem__, chosen)),
            pos_scores=tuple(positive_scores.tolist()),
            neg_scores=tuple(scores.tolist()),
            neg_rankers=tuple(map(self._rule.rankers.__getitem__, rankers.tolist())),
        )


def with_negatives(rows: Sequence[RetrieverRow]) -> list[RetrieverRow]:
    """The rows that have a negative; says how many have none.

    Raises:
        UserError: no row has one.
    """
    kept = [row for row in rows if row.neg]
    if not kept:
        raise UserError("no question has a negative; widen the corpus or lower relative_margin.")
    if len(kept) < len(rows):
        logger.warning("%d of %d questions have no negative; left out", len(rows) - len(kept), len(rows))
    return kept


def source_counts(rows: Sequence[RetrieverRow]) -> Mapping[str, int]:
    """Number of negatives by ranker."""
    counts: dict[str, int] = {}
    for row in rows:
        for ranker in row.neg_rankers:
            counts[ranker] = counts.get(ranker, 0) + 1
    return counts


def _padded(lists: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Lists of positions as one array[Q, longest]; -1 where they end."""
    array = np.full((len(lists), max(1, *map(len, lists))), -1, dtype=np.int64)
    for row, positions in zip(array, lists, strict=True):
        row[: len(positions)] = positions
    return array


def _first_of_each(text: NDArray[np.int64], fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of the entries[Q, K] of a row that fit and share a text, the first."""
    order = np.where(fits, text, -1).argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(text, order, axis=1)
    ordered_fits = np.take_along_axis(fits, order, axis=1)
    first = ordered_fits.copy()
    first[:, 1:] &= (ordered[:, 1:] != ordered[:, :-1]) | ~ordered_fits[:, :-1]
    result = np.empty_like(first)
    np.put_along_axis(result, order, first, axis=1)
    return result


def _chances(streams: Sequence[str], width: int) -> NDArray[np.float64]:
    """Random numbers[Q, width], each row from the stream of that name."""
    chances = np.empty((len(streams), width))
    for row, stream in zip(chances, streams, strict=True):
        key = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:16], "big")
        np.random.Generator(np.random.Philox(key=key)).random(out=row)
    return chances


def _plain(text: str) -> str:
    """A text without differences of case and white space."""
    return " ".join(text.casefold().split())

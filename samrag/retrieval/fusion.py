"""Rankings made of rankings: reciprocal rank fusion, and a cross-encoder that orders the best anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from samrag.errors import UserError
from samrag.retrieval.embedder import resolve_model
from samrag.retrieval.index import Hit
from samrag.schema import Document

RRF_CONSTANT = 60
"""Of the authors (Cormack, Clarke and Buettcher, SIGIR 2009): how slowly a rank's worth falls."""


def fuse(
    rankings: Sequence[Sequence[Sequence[Hit]]],
    k: int,
    weights: Sequence[float] | None = None,
    constant: int = RRF_CONSTANT,
) -> list[list[Hit]]:
    """Reciprocal rank fusion: a document scores the sum of weight / (constant + rank) over the rankings that have it.

    Only ranks count, so rankers whose scores mean different things can be fused. Equal sums are ordered by the best
    rank, then by the first ranker that has it.

    Args:
        rankings: of each ranker, one ranking a question, best first; all of the same questions.
        k: documents a question.
        weights: one a ranker; none counts all alike.
        constant: see `RRF_CONSTANT`.

    Raises:
        UserError: no ranker, rankers of different questions, k below 1, or weights that do not fit.
    """
    weights = [1.0] * len(rankings) if weights is None else list(weights)
    if not rankings or len({len(of_ranker) for of_ranker in rankings}) != 1:
        raise UserError("fusion needs at least one ranker, and rankers of the same questions.")
    if len(weights) != len(rankings) or any(not weight > 0 for weight in weights):
        raise UserError(f"weights is {weights}; give one above 0 to each of the {len(rankings)} rankers.")
    if k < 1 or constant < 0:
        raise UserError(f"k is {k} and the constant {constant}; k >= 1 and constant >= 0 must hold.")
    return [_fuse_one(of_question, k, weights, constant) for of_question in zip(*rankings, strict=True)]


def _fuse_one(rankings: Sequence[Sequence[Hit]], k: int, weights: Sequence[float], constant: int) -> list[Hit]:
    sums: dict[str, float] = defaultdict(float)
    best: dict[str, int] = {}  # in the order of the rankers
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, hit in enumerate(ranking, start=1):
            sums[hit.doc_id] += weight / (constant + rank)
            best[hit.doc_id] = min(rank, best.get(hit.doc_id, rank))
    order = sorted(best, key=lambda doc_id: (-sums[doc_id], best[doc_id]))
    return [Hit(doc_id, sums[doc_id]) for doc_id in order[:k]]


class Reranker:
    """A cross-encoder: reads question and document together, which is slow and better than comparing vectors.

    Args:
        name_or_path: folder or hub name of a sentence-transformers cross-encoder, for example
            `BAAI/bge-reranker-base`; weights are read from safetensors alone.
        batch_size: pairs a forward pass.

    Raises:
        UserError: there is no such model.
    """

    def __init__(self, name_or_path: str, batch_size: int = 32) -> None:
        from sentence_transformers import CrossEncoder

        folder = resolve_model(name_or_path)
        try:
            self._model = CrossEncoder(
                str(folder), local_files_only=True, trust_remote_code=False, model_kwargs={"use_safetensors": True}
            )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder} could not be loaded as a cross-encoder: {error}") from error
        self._batch_size = batch_size

    def rerank(
        self, questions: Sequence[str], rankings: Sequence[Sequence[Hit]], documents: Mapping[str, Document]
    ) -> list[list[Hit]]:
        """The same documents in the order of the model's scores; equal scores keep the order they had.

        Args:
            questions: the questions.
            rankings: what to order, one list a question; give only as many as shall be read.
            documents: the corpus by id.
        """
        pairs = [
            (question, documents[hit.doc_id].retrieval_text)
            for question, ranking in zip(questions, rankings, strict=True)
            for hit in ranking
        ]
        if not pairs:
            return [[] for _ in questions]
        scores = np.asarray(self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False))
        if scores.ndim != 1:
            raise UserError(
                f"the cross-encoder gives {scores.shape[1]} scores a pair; one with a single score is needed."
            )
        result, start = [], 0
        for ranking in rankings:
            own = scores[start : start + len(ranking)]
            start += len(ranking)
            result.append([Hit(ranking[i].doc_id, float(own[i])) for i in np.argsort(-own, kind="stable")])
        return result

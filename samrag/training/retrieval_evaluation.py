"""How well an embedder finds the positives of held-out rows: while it is trained, and before against after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from samrag.metrics.retrieval import ndcg_at_k, recall_at_k, recall_at_n, reciprocal_rank
from samrag.metrics.significance import bootstrap_interval, paired_permutation_test

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

DEPTHS = (1, 5, 10)
_BLOCK = 256  # queries scored at once
Scores = dict[str, list[float]]
"""By metric, one value a query."""


class HeldOutEvaluator(SentenceEvaluator):  # type: ignore[misc]
    """Strict recall@N (SAM-RAG, eq. 2), recall@k, MRR@10 and nDCG@10 of the rows' queries.

    The corpus is all texts of the rows and of `distractors`, each once; equal scores keep its order.
    """

    def __init__(self, rows: Dataset, distractors: Dataset | None = None, batch_size: int = 32) -> None:
        """Collect queries, their positives and the corpus.

        Args:
            rows: Held-out rows (`samrag.training.retriever.load_rows`).
            distractors: Rows whose texts are searched too.
            batch_size: Texts encoded at once.
        """
        super().__init__()
        self.batch_size = batch_size
        corpus: dict[str, int] = {}
        for part in (rows, distractors):
            for row in part if part is not None else ():
                for text in [*row["pos"], *row["neg"]]:
                    corpus.setdefault(text, len(corpus))
        self.corpus = list(corpus)
        self.positives: dict[str, set[str]] = {}
        for row in rows:
            self.positives.setdefault(row["query"], set()).update(str(corpus[text]) for text in row["pos"])
        self.depths = [k for k in DEPTHS if k <= len(self.corpus)]
        self.primary_metric = f"strict_recall@{self.depths[min(1, len(self.depths) - 1)]}"
        self.greater_is_better = True

    def __call__(
        self, model: SentenceTransformer, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        """Mean scores, for the trainer."""
        return {name: float(np.mean(values)) for name, values in self.scores(model).items()}

    def scores(self, model: SentenceTransformer) -> Scores:
        """Scores query by query."""
        options = {"batch_size": self.batch_size, "normalize_embeddings": True, "show_progress_bar": False}
        texts = model.encode_document(self.corpus, **options)
        queries = model.encode_query(list(self.positives), **options)
        deepest = self.depths[-1]
        found: Scores = {}
        positives = list(self.positives.values())
        for start in range(0, len(queries), _BLOCK):
            similar = queries[start : start + _BLOCK] @ texts.T
            best = np.argsort(-similar, axis=1, kind="stable")[:, :deepest]
            for ranked, wanted in zip(best.tolist(), positives[start : start + _BLOCK], strict=True):
                ranking = list(map(str, ranked))
                values = {
                    **{f"strict_recall@{k}": recall_at_n(ranking, wanted, k) for k in self.depths},
                    **{f"recall@{k}": recall_at_k(ranking, wanted, k) for k in self.depths},
                    f"mrr@{deepest}": reciprocal_rank(ranking, wanted, deepest),
                    f"ndcg@{deepest}": ndcg_at_k(ranking, wanted, deepest),
                }
                for name, value in values.items():
                    found.setdefault(name, []).append(value)
        return found


def comparison(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], num_texts: int) -> str:
    """Markdown: every metric before and after training, the difference with its 95 % interval, and a paired test."""
    count = len(next(iter(before.values())))
    lines = [
        "# The retriever before and after training",
        "",
        f"{count:,} held-out queries, {num_texts:,} texts. Differences are paired: 95 % bootstrap intervals, and the p"
        " of a permutation test; the metrics are not independent of one another, so no single p decides.",
        "",
        "| metric | before | after | difference | p |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in before:
        gains = [b - a for a, b in zip(before[name], after[name], strict=True)]
        low, high = bootstrap_interval(gains)
        p = paired_permutation_test(after[name], before[name])
        lines.append(
            f"| {name} | {np.mean(before[name]):.3f} | {np.mean(after[name]):.3f} |"
            f" {np.mean(gains):+.3f} [{low:+.3f}, {high:+.3f}] | {p:.4f} |"
        )
    return "\n".join([*lines, ""])

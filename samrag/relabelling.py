"""Mined rows after a teacher's second look: true positives move to the positives, doubtful ones go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from samrag.engines.base import Engine
from samrag.programs.relabel import Finding, RelabelOptions, relabel
from samrag.progress import progress
from samrag.schedule import Schedule, run
from samrag.schema import Document, RetrieverRow, Usage


async def relabel_rows(
    rows: Sequence[RetrieverRow],
    documents: Mapping[str, Document],
    engine: Engine,
    num_negatives: int,
    options: RelabelOptions,
    concurrency: int,
) -> tuple[list[RetrieverRow], Counter[Finding], Usage]:
    """Ask the teacher about every row's negatives.

    Args:
        rows: from `samrag.retrieval.mining`, with spare negatives at their ends.
        documents: the corpus by id.
        engine: the teacher, behind a call store.
        num_negatives: negatives a row is to keep.
        options: how the teacher is asked.
        concurrency: rows in flight.

    Returns:
        The rows in their order, the findings counted, and what was asked.
    """
    programs = [
        relabel(row.query, [documents[doc_id] for doc_id in row.neg_ids], num_negatives, options) for row in rows
    ]
    result, counts, total = list(rows), Counter[Finding](), Usage()
    with progress("relabelling", len(rows)) as advance:
        async for position, outcome in run(programs, engine, Schedule.CONCURRENT, concurrency):
            result[position] = relabelled(rows[position], outcome.value, num_negatives)
            counts.update(outcome.value)
            total += outcome.usage
            advance(note=f"{counts[Finding.POSITIVE]:,} positives found, {total.calls:,} calls")
    return result, counts, total


def relabelled(row: RetrieverRow, findings: Sequence[Finding], num_negatives: int) -> RetrieverRow:
    """A row by what was found of its first negatives; those that were not looked at are left out."""
    kept = [n for n, finding in enumerate(findings) if finding in (Finding.NEGATIVE, Finding.UNKNOWN)][:num_negatives]
    promoted = [n for n, finding in enumerate(findings) if finding is Finding.POSITIVE]
    found = tuple(row.neg_ids[n] for n in promoted)
    return replace(
        row,
        pos=row.pos + tuple(row.neg[n] for n in promoted),
        pos_ids=row.pos_ids + found,
        pos_scores=row.pos_scores + tuple(row.neg_scores[n] for n in promoted),
        promoted_ids=found,
        neg=tuple(row.neg[n] for n in kept),
        neg_ids=tuple(row.neg_ids[n] for n in kept),
        neg_scores=tuple(row.neg_scores[n] for n in kept),
        neg_rankers=tuple(row.neg_rankers[n] for n in kept),
    )

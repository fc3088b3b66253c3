"""Answer questions with one system: python inference/run.py --config configs/run.yaml.

Writes traces.jsonl, one question a line, as questions are finished; run again after a stop, it goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from samrag.answering import Method, documents_for, looked_up, open_index, similarity_for, write_traces
from samrag.arguments import LoopArguments, RunArguments, TeacherArguments
from samrag.config import parse, run
from samrag.files import read_records
from samrag.loading import load_engine
from samrag.provenance import write_run_record
from samrag.schedule import Schedule
from samrag.schema import Document, Question, Trace

log = logging.getLogger(__name__)


async def answer_all(arguments: RunArguments, loop: LoopArguments, teacher: TeacherArguments) -> list[Trace]:
    """Rank, run, write."""
    questions = read_records(Path(arguments.questions_file), Question)[: arguments.max_questions]
    documents = read_records(Path(arguments.documents_file), Document)
    method = Method.of(arguments)
    opened = open_index(questions, documents, Path(arguments.index_dir), arguments.embedder)
    hits = documents_for(method, *opened, loop)
    local = arguments.engine == "local"
    async with load_engine(arguments, teacher) as engine:
        return await write_traces(
            Path(arguments.output_dir),
            {"engine": engine.identity, "rankings": [[hit.doc_id for hit in ranking] for ranking in hits]},
            method,
            questions,
            looked_up(hits, documents),
            engine,
            Schedule.LOCKSTEP if local else Schedule.CONCURRENT,
            loop,
            arguments.max_in_flight if local else teacher.concurrency,
            similarity_for(loop, arguments.embedder),
        )


def main() -> None:
    """Parse, answer, record."""
    arguments, loop, teacher = groups = parse(RunArguments, LoopArguments, TeacherArguments)
    traces = asyncio.run(answer_all(arguments, loop, teacher))
    inputs = [Path(arguments.questions_file), Path(arguments.documents_file), Path(arguments.index_dir)]
    write_run_record(Path(arguments.output_dir), groups, inputs, loop.seed)
    answered = sum(bool(trace.answers) for trace in traces)
    log.info(
        "%s: %d questions, %d answered, %d abstained",
        arguments.output_dir,
        len(traces),
        answered,
        len(traces) - answered,
    )


if __name__ == "__main__":
    run(main)

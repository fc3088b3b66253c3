"""Answer one question and show how: python inference/answer.py --config configs/answer.yaml --question "...".

Prints every document with its verdict, the drafts with theirs, and the answer with its evidence.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from rich.console import Console

from samrag.answering import Method, documents_for, looked_up, open_index, similarity_for
from samrag.arguments import AnswerArguments, LoopArguments, RunArguments, TeacherArguments
from samrag.config import parse, run
from samrag.errors import UserError
from samrag.files import read_records
from samrag.loading import load_engine
from samrag.report.console import show_trace
from samrag.schedule import Schedule, gather
from samrag.schema import Document, Question, Trace


async def answer(question: Question, arguments: RunArguments, loop: LoopArguments, teacher: TeacherArguments) -> Trace:
    """Rank, run the program, return its trace."""
    documents = read_records(Path(arguments.documents_file), Document)
    method = Method.of(arguments)
    opened = open_index([question], documents, Path(arguments.index_dir), arguments.embedder)
    hits = documents_for(method, *opened, loop)
    async with load_engine(arguments, teacher) as engine:
        program = method.program(
            question, looked_up(hits, documents)[0], loop, similarity_for(loop, arguments.embedder)
        )
        (result,) = await gather([program], engine, Schedule.CONCURRENT)
    return dataclasses.replace(result.value, usage=result.usage)


def main() -> None:
    """Parse, answer, show."""
    asked, arguments, loop, teacher = parse(AnswerArguments, RunArguments, LoopArguments, TeacherArguments)
    if not asked.question.strip():
        raise UserError("there is no question; give one with --question.")
    question = Question("question", asked.question, (), "", "")
    trace = asyncio.run(answer(question, arguments, loop, teacher))
    documents = {document.doc_id: document for document in read_records(Path(arguments.documents_file), Document)}
    show_trace(Console(), asked.question, trace, documents)


if __name__ == "__main__":
    run(main)

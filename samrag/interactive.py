"""SAM-RAG from Python: load once, then ask, one question or many, at once or step by step.

from samrag import SamRag
rag = SamRag.load(index="index", documents="documents.jsonl", model="base", adapter="adapter", embedder="bge")
print(rag.answer("...").answers)
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from samrag.answering import Method, depth, looked_up
from samrag.arguments import LoopArguments
from samrag.calls import Call, Completion, Program, Reply
from samrag.engines.base import Backend, Engine
from samrag.errors import UserError
from samrag.files import read_records
from samrag.prompts import PromptStyle
from samrag.schedule import Completer, Schedule, gather
from samrag.schema import Document, Question, Trace

if TYPE_CHECKING:
    from samrag.retrieval.embedder import Embedder
    from samrag.retrieval.index import Index

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was asked on the way to an answer: a document's verdict, a draft, a verdict on a draft."""

    call: Call
    reply: Reply


class _Watched:
    """An engine whose every reply is also put into a queue."""

    def __init__(self, engine: Completer, steps: asyncio.Queue[Step | None]) -> None:
        self._engine, self._steps = engine, steps

    async def complete(self, calls: Sequence[Call]) -> list[Completion]:
        completions = await self._engine.complete(calls)
        for call, completion in zip(calls, completions, strict=True):
            self._steps.put_nowait(Step(call, completion.reply))
        return completions


class SamRag:
    """Documents, their index, and a model that judges them and answers from them."""

    def __init__(
        self,
        documents: Sequence[Document],
        index: Index,
        embedder: Embedder,
        backend: Backend,
        style: PromptStyle = PromptStyle.STUDENT,
        method: Method | None = None,
        loop: LoopArguments | None = None,
    ) -> None:
        """Take what is loaded already; `load` reads it from files.

        Raises:
            UserError: the index is of other documents, or the method reads pools.
        """
        index.check_documents(documents)
        method = method or Method("sam_rag")
        if method.name == "climb" or method.pool:
            raise UserError(f"method {method.name} reads pools; run it with inference/run.py.")
        self.documents, self.index, self.embedder, self.backend = documents, index, embedder, backend
        self.engine = Engine(backend, style)
        self.method, self.loop = method, loop or LoopArguments()
        self._schedule = Schedule.LOCKSTEP if style is PromptStyle.STUDENT else Schedule.CONCURRENT
        self._runner = asyncio.Runner()

    @classmethod
    def load(
        cls,
        *,
        index: str | Path,
        documents: str | Path,
        model: str,
        embedder: str,
        adapter: str | None = None,
        image_root: str | Path = ".",
        loop: LoopArguments | None = None,
    ) -> SamRag:
        """Load a local model, its adapter, and an index.

        Raises:
            UserError: something is missing, or does not belong together.
        """
        from samrag.engines.local import LocalBackend
        from samrag.retrieval.embedder import Embedder
        from samrag.retrieval.index import Index

        encoder = Embedder.load(embedder)
        backend = LocalBackend.load(model, adapter=adapter, image_root=Path(image_root))
        return cls(
            read_records(Path(documents), Document), Index.load(Path(index), encoder), encoder, backend, loop=loop
        )

    def answer(self, question: str) -> Trace:
        """Answer one question; the trace has the answers, the evidence and every verdict."""
        return self._run(self.aanswer(question))

    def answer_all(self, questions: Sequence[str]) -> list[Trace]:
        """Answer many questions together, in their order."""
        return self._run(self.aanswer_all(questions))

    def stream(self, question: str) -> Generator[Step | Trace, None, None]:
        """Every step as it is answered, and at last the trace."""
        events = self.astream(question)
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            self._run(_closed(events))

    async def aanswer(self, question: str) -> Trace:
        """As `answer`, within a running loop."""
        return (await self.aanswer_all([question]))[0]

    async def aanswer_all(self, questions: Sequence[str]) -> list[Trace]:
        """As `answer_all`, within a running loop."""
        return await self._traces(self._programs(questions), self.engine)

    async def astream(self, question: str) -> AsyncGenerator[Step | Trace, None]:
        """As `stream`, within a running loop."""
        steps: asyncio.Queue[Step | None] = asyncio.Queue()
        task = asyncio.create_task(self._traces(self._programs([question]), _Watched(self.engine, steps)))
        task.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (step := await steps.get()) is not None:
                yield step
            yield (await task)[0]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def aclose(self) -> None:
        """As `close`, within a running loop."""
        await self.backend.close()

    def close(self) -> None:
        """Let go of the model or the server."""
        self._run(self.aclose())
        self._runner.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(work)
        work.close()
        raise UserError("a loop is running here (a notebook has one): await aanswer, aanswer_all or astream instead.")

    def _programs(self, questions: Sequence[str]) -> list[Program[Trace]]:
        if not questions or not all(question.strip() for question in questions):
            raise UserError("there is no question, or an empty one; give its text.")
        vectors = self.embedder.encode_queries(list(questions))
        rankings = looked_up(self.index.search(vectors, depth(self.loop)), self.documents)
        asked = [Question(f"question-{i}", text, (), "", "") for i, text in enumerate(questions)]
        return [self.method.program(one, ranking, self.loop) for one, ranking in zip(asked, rankings, strict=True)]

    async def _traces(self, programs: Sequence[Program[Trace]], engine: Completer) -> list[Trace]:
        results = await gather(programs, engine, self._schedule)
        return [dataclasses.replace(result.value, usage=result.usage) for result in results]


async def _next(events: AsyncIterator[Step | Trace]) -> Step | Trace | None:
    return await anext(events, None)


async def _closed(events: AsyncGenerator[Step | Trace, None]) -> None:
    await events.aclose()

"""Questions to traces: rank once, run the programs, write each trace as it finishes; a second run goes on there."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from samrag.arguments import LoopArguments, RunArguments, TeacherArguments
from samrag.calls import Program
from samrag.engines.base import Backend, Engine
from samrag.engines.recorded import RecordedBackend, Store
from samrag.errors import UserError
from samrag.files import append_record, drop_cut_line, read_json, read_records, write_json
from samrag.programs.climb import ClimbOptions, Similarity, climb
from samrag.programs.rag import RagOptions, rag
from samrag.programs.sam_rag import SamRagOptions, sam_rag
from samrag.programs.verdicts import VerdictOptions, with_verdicts
from samrag.progress import progress
from samrag.prompts import PromptStyle
from samrag.retrieval.lexical import word_overlap
from samrag.retrieval.pool import PoolOptions, PoolStrategy, pools_of
from samrag.schedule import Schedule, run
from samrag.schema import Document, Question, Trace, Usage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from samrag.engines.api import ApiBackend
    from samrag.retrieval.index import Hit, Index

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """A program with its switches."""

    name: str
    """`rag`, `sam_rag` or `climb`."""
    is_rel: bool = True
    is_use: bool = True
    is_sup: bool = True
    pool: bool = False
    """Whether it reads complementary pools instead of rankings."""
    critic: bool = True
    iteration: bool = True
    facet_diagnosis: bool = True

    @classmethod
    def of(cls, arguments: RunArguments) -> Method:
        """The method that a run asks for."""
        switches = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(cls)[1:]}
        if arguments.pool is None:
            switches["pool"] = arguments.method == "climb"
        return cls(arguments.method, **switches)

    def program(
        self,
        question: Question,
        ranking: Sequence[Document],
        loop: LoopArguments,
        similarity: Similarity = word_overlap,
    ) -> Program[Trace]:
        """The program for one question; CLIMB asks `similarity` how near a facet lies to passages."""
        return with_verdicts(self._program(question, ranking, loop, similarity), options_of(VerdictOptions, loop))

    def _program(
        self, question: Question, ranking: Sequence[Document], loop: LoopArguments, similarity: Similarity
    ) -> Program[Trace]:
        if self.name == "rag":
            return rag(question, ranking, options_of(RagOptions, loop))
        if self.name == "climb":
            refined = options_of(ClimbOptions, loop)
            switches = {name: getattr(self, name) for name in ("critic", "iteration", "facet_diagnosis")}
            return climb(question, ranking, dataclasses.replace(refined, **switches), similarity)
        options = options_of(SamRagOptions, loop)
        options = dataclasses.replace(options, is_rel=self.is_rel, is_use=self.is_use, is_sup=self.is_sup)
        return sam_rag(question, ranking, options)


Options = TypeVar("Options", RagOptions, SamRagOptions, ClimbOptions, VerdictOptions)


def options_of(kind: type[Options], loop: LoopArguments) -> Options:
    """A program's options from the arguments that bear their names.

    Raises:
        UserError: a value is out of range.
    """
    given = dataclasses.asdict(loop)
    try:
        return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given})
    except ValueError as error:
        raise UserError(f"{error}.") from error


def depth(loop: LoopArguments) -> int:
    """How many ranked documents any method may look at."""
    return max(loop.k, loop.batch_size * loop.max_batches, loop.pool_size)


def teacher_backend(arguments: TeacherArguments, image_root: Path) -> ApiBackend:
    """The teacher's server.

    Raises:
        UserError: the price file cannot be used, or there is a budget and no price.
    """
    from samrag.engines.api import ApiBackend
    from samrag.engines.costs import Ledger, price_of

    price = price_of(arguments.teacher_model, Path(arguments.price_file) if arguments.price_file else None)
    return ApiBackend(
        arguments.teacher_model,
        arguments.teacher_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1",
        arguments.api_key_env,
        image_root=image_root,
        concurrency=arguments.concurrency,
        requests_per_minute=arguments.requests_per_minute,
        tokens_per_minute=arguments.tokens_per_minute,
        timeout_s=arguments.timeout_s,
        max_attempts=arguments.max_attempts,
        structured_output=arguments.structured_output,
        max_image_px=arguments.max_image_px,
        max_tokens_name=arguments.max_tokens_name,
        repairs=arguments.repair,
        ledger=Ledger(price, arguments.budget_usd),
    )


def recorded(backend: Backend, store: Store, image_root: Path, style: PromptStyle) -> Engine:
    """An engine whose replies are all stored; a teacher's unusable replies are asked about once more.

    Raises:
        UserError: there is no folder of images.
    """
    if not image_root.is_dir():
        raise UserError(f"image_root: there is no folder {image_root}; check the path.")
    repairs, meter = getattr(backend, "repairs", False), getattr(backend, "meter", None)
    return Engine(RecordedBackend(backend, store, image_root), style, repairs=repairs, meter=meter)


def rank_documents(
    questions: Sequence[Question], documents: Sequence[Document], index_dir: Path, embedder: str, k: int
) -> list[list[Hit]]:
    """The k best documents of each question by an index, all questions encoded at once.

    Raises:
        UserError: the index is of another embedder or of other documents.
    """
    index, vectors = open_index(questions, documents, index_dir, embedder)
    return index.search(vectors, k)


def documents_for(method: Method, index: Index, queries: NDArray[np.float32], loop: LoopArguments) -> list[list[Hit]]:
    """What a method reads for each of the queries[Q, D]: the best documents of an index, or a complementary pool."""
    if not method.pool:
        return index.search(queries, depth(loop))
    options = PoolOptions(
        loop.pool_size,
        loop.num_candidates,
        PoolStrategy(loop.pool_strategy),
        loop.pool_trade_off,
        loop.pool_stretched,
    )
    return pools_of(index, queries, options)


def similarity_for(loop: LoopArguments, embedder: str) -> Similarity:
    """How near a facet lies to passages, as the loop's arguments ask."""
    if loop.facet_similarity == "words":
        return word_overlap
    from samrag.retrieval.embedder import Embedder, nearness_by

    return nearness_by(Embedder.load(embedder))


def open_index(
    questions: Sequence[Question], documents: Sequence[Document], index_dir: Path, embedder: str
) -> tuple[Index, NDArray[np.float32]]:
    """An index over the documents, and the vectors[Q, D] of the questions by its embedder.

    Raises:
        UserError: the index is of another embedder or of other documents.
    """
    from samrag.retrieval.embedder import Embedder
    from samrag.retrieval.index import Index

    model = Embedder.load(embedder)
    index = Index.load(index_dir, model)
    index.check_documents(documents)
    with progress("questions", len(questions)) as advance:
        vectors = model.encode_queries([question.question for question in questions], advance=advance)
    return index, vectors


def looked_up(rankings: Sequence[Sequence[Hit]], documents: Sequence[Document]) -> list[list[Document]]:
    """Rankings as documents."""
    by_id = {document.doc_id: document for document in documents}
    return [[by_id[hit.doc_id] for hit in ranking] for ranking in rankings]


async def write_traces(
    folder: Path,
    facts: Mapping[str, object],
    method: Method,
    questions: Sequence[Question],
    rankings: Sequence[Sequence[Document]],
    engine: Engine,
    schedule: Schedule,
    loop: LoopArguments,
    max_in_flight: int,
    similarity: Similarity = word_overlap,
) -> list[Trace]:
    """Answer all questions into `<folder>/traces.jsonl`; questions that already have a trace are not asked again.

    Args:
        folder: where the traces go.
        facts: what else decides the traces; a folder with other facts is begun anew (stored calls are not paid again).
        method: which program.
        questions: the questions.
        rankings: ranked documents, one list a question.
        engine: who answers.
        schedule: in which order calls are asked.
        loop: the program's options.
        max_in_flight: questions worked on at once.
        similarity: how near a facet lies to passages.

    Returns:
        All traces, in the order of the questions.
    """
    path, done = folder / "traces.jsonl", {}
    facts = json.loads(json.dumps({**facts, "method": dataclasses.asdict(method), "loop": dataclasses.asdict(loop)}))
    facts_path = folder / "traces.json"
    if facts_path.exists() and read_json(facts_path) == facts:
        drop_cut_line(path)
        done = (
            {trace.question_id: trace for trace in read_records(path, Trace, allow_empty=True)} if path.exists() else {}
        )
    else:
        path.unlink(missing_ok=True)
        write_json(facts_path, facts)
    pending = [i for i, question in enumerate(questions) if question.question_id not in done]
    if not pending:
        log.info("%s: all %d questions are answered: nothing to do.", folder.name, len(questions))
    else:
        programs = (method.program(questions[i], rankings[i], loop, similarity) for i in pending)
        with progress(folder.name, len(questions), len(questions) - len(pending)) as advance:
            total = Usage()
            async for position, result in run(programs, engine, schedule, max_in_flight):
                trace = dataclasses.replace(result.value, usage=result.usage)
                append_record(path, trace)
                done[questions[pending[position]].question_id] = trace
                total += result.usage
                advance(note=f"{total.calls:,} calls, {total.cached_calls:,} stored")
    return [done[question.question_id] for question in questions]

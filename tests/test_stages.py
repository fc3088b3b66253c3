"""The whole pipeline in a temporary folder by its real commands, run again, cut short, and by the paper's settings.

The world is as small as it may be and the student is untrained, so only counts and properties are checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import samrag
from samrag.calls import SAM_RAG_KINDS, Answer, CallKind, Caption, Judgement
from samrag.files import read_json, read_lines, read_records
from samrag.metrics.answers import mmqa_list_em
from samrag.miniworld.dataset import IMAGES_FOLDER
from samrag.programs.steps import spoken
from samrag.replies import parse
from samrag.retrieval.embedder import QUICKSTART_PACKAGE
from samrag.retrieval.index import Index
from samrag.schema import Document, Question, RetrieverRow, SftRow, Trace, Verdict
from samrag.study import grid

pytestmark = [
    pytest.mark.entry,
    pytest.mark.skipif(
        importlib.util.find_spec(QUICKSTART_PACKAGE) is None, reason="the quickstart embedder is not installed"
    ),
]
ROOT = Path(samrag.__file__).parent.parent
TRAIN_QUESTIONS, DEV_QUESTIONS = 8, 6
SKIPPED_WHEN_DONE = (
    *("make_mini_world", "prepare", "index_train", "distill", "mine", "sft", "retriever"),
    *("index_dev", "index_dev_tuned", "study"),
)
REPEATED = {
    "caption": ("data/train/documents.captioned.jsonl", "data/dev/documents.captioned.jsonl"),
    "evaluate_retrieval": ("study/retrieval.json", "study/retrieval.md"),
    "evaluate": ("metrics.json", "tables.md", "report.html", "tables/table2.csv"),
}
"""Stages that do their work again without asking anyone, and what comes out the same."""
RECORDS = {
    "make_mini_world": ("world", 0),
    "prepare": ("data", 4),
    "index_train": ("index_train", 1),
    "distill": ("sft", 3),
    "mine": ("mined", 3),
    "sft": ("student", 2),
    "retriever": ("retriever", 1),
    "index_dev": ("index_dev", 1),
    "index_dev_tuned": ("index_dev_tuned", 1),
    "study": ("study", 6),
    "evaluate": (".", 3),
}
"""The folder of each stage that has a run.json, and how many inputs that names."""
OF_THE_USER = {"WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"}
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in OF_THE_USER},
    "OPENAI_API_KEY": "not-needed-on-loopback",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclasses.dataclass(slots=True)
class Pipeline:
    """A pipeline's folder, its stages in order, and what they said."""

    root: Path
    model: Path
    url: str = ""
    said: dict[str, str] = dataclasses.field(default_factory=dict)

    def path(self, name: str) -> str:
        return str(self.root / name)

    def records(self, split: str, captioned: bool = True) -> list[str]:
        """The flags that name a split's records."""
        documents = self.path(f"data/{split}/documents{'.captioned' if captioned else ''}.jsonl")
        return ["--questions_file", self.path(f"data/{split}/questions.jsonl"), "--documents_file", documents]

    def teacher(self, store: str = "calls.sqlite") -> list[str]:
        """The flags that name the call store and the server."""
        return ["--store", self.path(store), "--teacher_url", self.url]

    def index(self, folder: str, split: str, embedder: str) -> list[str]:
        documents = self.records(split)[2:]
        return ["inference/build_index.py", *documents, "--output_dir", self.path(folder), "--embedder", embedder]

    def stages(self) -> dict[str, list[str]]:
        """Script and flags of each stage, beside its configuration in configs/quickstart."""
        path = self.path
        images = ["--image_root", path(f"world/{IMAGES_FOLDER}")]
        indexes = ["--index_dir", path("index_dev"), "--tuned_index_dir", path("index_dev_tuned")]
        tuned = path("retriever")
        return {
            "make_mini_world": [
                "scripts/make_mini_world.py", "--output_dir", path("world"), "--train_clubs", "20",
                "--train_questions", str(TRAIN_QUESTIONS), "--dev_clubs", "12", "--dev_questions", str(DEV_QUESTIONS),
                "--test_clubs", "4", "--test_questions", "2",
            ],
            "prepare": ["data_gen/prepare.py", "--data_dir", path("world"), "--output_dir", path("data"), *images],
            "caption": [
                "data_gen/caption.py", "--documents_files", path("data/train/documents.jsonl"),
                path("data/dev/documents.jsonl"), *images, *self.teacher(),
            ],
            "index_train": self.index("index_train", "train", "quickstart"),
            "distill": self.distill(),
            "mine": [
                "data_gen/mine.py", *self.records("train"), "--index_dir", path("index_train"),
                "--output_dir", path("mined"),
            ],
            "sft": [
                "train/sft.py", "--model_path", str(self.model), "--train_files", path("sft/sft.jsonl"), *images,
                "--output_dir", path("student"), "--max_steps", "2", "--per_device_train_batch_size", "2",
                "--num_threads", "1",
            ],
            "retriever": [
                "train/retriever.py", "--train_file", path("mined/retriever.jsonl"), "--output_dir", tuned,
                "--max_steps", "2", "--per_device_train_batch_size", "4", "--num_threads", "1",
            ],
            "index_dev": self.index("index_dev", "dev", "quickstart"),
            "index_dev_tuned": self.index("index_dev_tuned", "dev", tuned),
            "evaluate_retrieval": [
                "inference/evaluate_retrieval.py", *self.records("dev"), "--output_dir", path("study"),
                "--indexes", f"R={path('index_dev')}=quickstart", f"R*={path('index_dev_tuned')}={tuned}",
            ],
            "study": [
                "inference/study.py", *self.records("dev"), *images, *indexes, "--tuned_embedder", tuned,
                "--model_path", str(self.model), "--adapter", path("student"), "--output_dir", path("study"),
                "--num_threads", "1", *self.teacher(),
            ],
            "evaluate": [
                "inference/evaluate.py", "--study_dir", path("study"), "--output_dir", str(self.root),
                "--wandb", "true",
            ],
        }  # fmt: skip

    def distill(self, output: str = "sft", store: str = "calls.sqlite") -> list[str]:
        """Script and flags of the teacher data."""
        return [
            "data_gen/distill.py", *self.records("train"), "--image_root", self.path(f"world/{IMAGES_FOLDER}"),
            "--index_dir", self.path("index_train"), "--output_dir", self.path(output), *self.teacher(store),
        ]  # fmt: skip

    def answer(self, output: str, store: str) -> list[str]:
        """Script and flags of the study's SAM-RAG(R*+G), one question at a time."""
        return [
            "inference/run.py", *self.records("dev"), "--image_root", self.path(f"world/{IMAGES_FOLDER}"),
            "--index_dir", self.path("index_dev_tuned"), "--embedder", self.path("retriever"), "--engine", "api",
            "--teacher_model", "simulated-teacher", "--concurrency", "1", "--output_dir", self.path(output),
            *self.teacher(store),
        ]  # fmt: skip

    def run(self, stage: str) -> None:
        """Run a stage in a process of its own; its words are kept."""
        started = [*launcher(stage), *command(*self.stages()[stage])]
        done = subprocess.run(
            started, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{stage}: {done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr
        self.said[stage] = done.stdout + done.stderr


def launcher(stage: str) -> list[str]:
    """One trainer is started by accelerate, as the documentation has it; the other works without."""
    if stage != "sft":
        return [sys.executable]
    return [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]


def command(script: str, *flags: str, configs: str = "configs/quickstart") -> list[str]:
    """A script with its configuration, flags after it."""
    return [script, "--config", str(ROOT / configs / f"{Path(script).stem}.yaml"), *flags]


def count_rows(store: Path) -> int:
    """Replies in a call store, which another process may be writing."""
    if not store.is_file():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM replies").fetchone()[0])
        except sqlite3.OperationalError:  # no table yet
            return 0


@contextlib.contextmanager
def simulated_teacher(world: Path, folder: Path) -> Iterator[str]:
    """The server as the quickstart starts it, on a free port; stopped at the end."""
    flags = ["--world", str(world), "--port", "0", "--port_file", str(folder / "teacher.port")]
    with (folder / "teacher.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [sys.executable, "scripts/simulated_teacher.py", *flags], cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "teacher.port").is_file():
            assert server.poll() is None and time.monotonic() < deadline, (folder / "teacher.log").read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{(folder / 'teacher.port').read_text().strip()}/v1"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, tiny_llava: Path) -> Pipeline:
    """The pipeline after its first run. Its teacher is gone, so a stage that asks anything from here on fails."""
    pipeline = Pipeline(tmp_path_factory.mktemp("pipeline"), tiny_llava)
    pipeline.run("make_mini_world")
    with simulated_teacher(pipeline.root / "world", pipeline.root) as pipeline.url:
        for stage in pipeline.stages():
            if stage != "make_mini_world":
                pipeline.run(stage)
    return pipeline


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- what the first run leaves ---


@pytest.mark.parametrize("stage", RECORDS)
def test_an_artefact_says_how_it_came_about(pipeline: Pipeline, stage: str) -> None:
    folder, num_inputs = RECORDS[stage]
    record = read_json(pipeline.root / folder / "run.json")
    script, *flags = command(*pipeline.stages()[stage])
    assert record["command"] == [Path(script).name, *flags]
    assert len(record["inputs"]) == num_inputs
    for digest in [record["identity"], *record["inputs"].values()]:
        assert re.fullmatch(r"[0-9a-f]{64}", digest)
    assert record["samrag"] == samrag.__version__
    assert record["python"].count(".") == 2
    assert all(record["libraries"].values()) and {"torch", "transformers", "trl", "peft"} <= set(record["libraries"])
    values = {key: value for group in record["configuration"].values() for key, value in group.items()}
    given = dict(itertools.pairwise(flags))
    for key in ("output_dir", "max_steps", "embedder", "teacher_url"):
        if f"--{key}" in given:
            assert str(values[key]) == given[f"--{key}"]


def test_the_records_are_all_there_and_captioned(pipeline: Pipeline) -> None:
    for split, num_questions in (("train", TRAIN_QUESTIONS), ("dev", DEV_QUESTIONS)):
        folder = pipeline.root / "data" / split
        questions = read_records(folder / "questions.jsonl", Question)
        documents = read_records(folder / "documents.captioned.jsonl", Document)
        assert len(questions) == num_questions
        ids = [document.doc_id for document in documents]
        assert ids == [d.doc_id for d in read_records(folder / "documents.jsonl", Document)]
        assert {i for question in questions for i in question.candidate_ids} == set(ids)
        images = [document for document in documents if document.image]
        assert images and all((pipeline.root / "world" / IMAGES_FOLDER / str(i.image)).is_file() for i in images)
        assert sum(bool(image.caption) for image in images) >= 0.9 * len(images)


def test_an_index_holds_every_document_and_the_tuned_embedder_is_another_one(pipeline: Pipeline) -> None:
    embedders = {}
    for folder, split in (("index_train", "train"), ("index_dev", "dev"), ("index_dev_tuned", "dev")):
        index = Index.load(pipeline.root / folder)
        documents = read_records(pipeline.root / "data" / split / "documents.captioned.jsonl", Document)
        assert list(index.doc_ids) == [document.doc_id for document in documents]
        embedders[folder] = index.manifest.space.embedder
    assert embedders["index_train"] == embedders["index_dev"] != embedders["index_dev_tuned"]


def test_every_row_for_the_student_agrees_with_gold(pipeline: Pipeline) -> None:
    questions = {q.question_id: q for q in read_records(pipeline.root / "data/train/questions.jsonl", Question)}
    rows = read_records(pipeline.root / "sft" / "sft.jsonl", SftRow)
    assert {row.kind for row in rows} == {str(kind) for kind in SAM_RAG_KINDS} - {CallKind.CAPTION_RAW}
    assert len({row.question_id for row in rows}) == TRAIN_QUESTIONS
    for row in rows:
        question, reply = questions[row.question_id], parse(CallKind(row.kind), row.messages[-1].content)
        shown, supports = set(row.doc_ids), set(question.support_ids)
        judged = re.search(r"<answer>\n(.*?)\n</answer>", row.messages[0].content, re.DOTALL)
        is_gold = judged is not None and judged.group(1) == spoken(question.answers)
        if isinstance(reply, Judgement):
            assert row.label == reply.verdict
            assert reply.verdict is gold_verdict(row.kind, shown, supports, is_gold)
        elif isinstance(reply, Answer):
            assert row.label == ("answer" if reply.values else "abstain")
            if reply.values:
                assert mmqa_list_em(reply.values, question.answers) == 1
                assert shown & set(question.answer_bearing_ids)
            else:
                assert not shown & set(question.answer_bearing_ids)
        else:
            assert isinstance(reply, Caption)
            assert row.label == "caption" and row.images and shown <= supports
    card = (pipeline.root / "sft" / "data_card.md").read_text(encoding="utf-8")
    assert f"{len(rows)} rows from {TRAIN_QUESTIONS} questions." in card
    assert "| teacher | `simulated-teacher` |" in card
    for name in ("dropped.jsonl", "quarantine.jsonl", "samples.html"):
        assert (pipeline.root / "sft" / name).is_file()


def gold_verdict(kind: str, shown: set[str], supports: set[str], is_gold: bool) -> Verdict:
    """The right verdict on documents, or on an answer from them."""
    if kind in (CallKind.IS_REL_TEXT, CallKind.IS_REL_IMAGE):
        return Verdict.TRUE if shown <= supports else Verdict.FALSE
    if not is_gold or not shown & supports:
        return Verdict.FALSE
    return Verdict.PARTIAL if kind == CallKind.IS_SUP and not supports <= shown else Verdict.TRUE


def test_every_query_of_the_retriever_has_its_supports_and_hard_negatives(pipeline: Pipeline) -> None:
    questions = {q.question_id: q for q in read_records(pipeline.root / "data/train/questions.jsonl", Question)}
    rows = read_records(pipeline.root / "mined" / "retriever.jsonl", RetrieverRow)
    assert len(rows) == TRAIN_QUESTIONS
    for row in rows:
        assert row.pos_ids == questions[row.query_id].support_ids
        assert len(set(row.neg_ids)) == 10
        assert not set(row.neg_ids) & set(row.pos_ids)


def test_a_second_look_at_negatives_is_paid_once(
    pipeline: Pipeline, tmp_path: Path, run_script: Any, serve_teacher: Any
) -> None:
    questions = read_records(pipeline.root / "data/train/questions.jsonl", Question)
    supports = {question.question_id: set(question.support_ids) for question in questions}
    teacher = serve_teacher(pipeline.root / "world")
    flags = [
        *pipeline.stages()["mine"], "--relabel", "true", "--image_root", pipeline.path(f"world/{IMAGES_FOLDER}"),
        "--rankers", "dense", "bm25", "--store", str(tmp_path / "calls.sqlite"), "--teacher_url", teacher.url,
        "--teacher_model", "simulated-teacher",
    ]  # fmt: skip
    found = []
    for name in ("first", "again"):
        outcome = run_script(*command(*flags, "--output_dir", str(tmp_path / name)))
        assert outcome.code == 0, outcome.err
        found.append(read_records(tmp_path / name / "retriever.jsonl", RetrieverRow))
    assert found[0] == found[1]
    assert teacher.asked.total() == len(teacher.asked) == count_rows(tmp_path / "calls.sqlite") >= 10 * TRAIN_QUESTIONS
    assert {ranker for row in found[0] for ranker in row.neg_rankers} == {"dense", "bm25"}
    for row in found[0]:
        assert len(row.neg_ids) == len(row.neg_rankers) == 10
        assert set(row.pos_ids) == supports[row.query_id] | set(row.promoted_ids)


def test_the_trained_folders_are_whole_and_hold_no_pickle(pipeline: Pipeline) -> None:
    student, retriever = pipeline.root / "student", pipeline.root / "retriever"
    for name in ("adapter_model.safetensors", "adapter_config.json", "samrag.json", "chat_template.jinja"):
        assert (student / name).is_file()
    for name in ("model.safetensors", "modules.json", "tokenizer.json", "metrics.json"):
        assert (retriever / name).is_file()
    for folder in (student, retriever):
        assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


def test_every_system_has_one_trace_a_question(pipeline: Pipeline) -> None:
    questions = read_records(pipeline.root / "data" / "dev" / "questions.jsonl", Question)
    cells = read_json(pipeline.root / "study" / "study.json")["cells"]
    assert [cell["name"] for cell in cells] == [cell.name for cell in grid(with_teacher=True)]
    assert len({cell["name"] for cell in cells}) == 15
    for cell in cells:
        path = pipeline.root / "study" / "cells" / cell["name"] / "traces.jsonl"
        traces = read_records(path, Trace)
        assert Counter(trace.question_id for trace in traces) == Counter(q.question_id for q in questions)
        assert path.read_bytes().endswith(b"\n")
        assert {trace.method for trace in traces} == {cell["method"]}
        assert all(trace.usage.calls > 0 for trace in traces)
    oracle_like = read_records(pipeline.root / "study" / "cells" / "sam_rag-Rstar-G" / "traces.jsonl", Trace)
    assert any(trace.answers for trace in oracle_like)


def test_the_figures_have_the_agreed_keys(pipeline: Pipeline) -> None:
    metrics = read_json(pipeline.root / "metrics.json")
    assert metrics["num_questions"] == DEV_QUESTIONS
    assert metrics["teacher_is_simulated"] is True
    systems = {(row["method"], row["retriever"], row["student"]) for row in metrics["table2"]}
    assert systems == {(m, r, s) for m in ("rag", "sam_rag") for r in ("R", "R*") for s in ("M", "M*", "G")}
    wanted = {"method", "retriever", "student", "em", "em_ci", "f1", "arn", "documents_examined", "calls", "n"}
    for row in metrics["table2"]:
        assert wanted <= set(row)
        assert row["n"] == DEV_QUESTIONS and row["missing"] == 0
        assert 0 <= row["em_ci"][0] <= row["em"] <= row["em_ci"][1] <= 100
    assert [row["checks"] for row in metrics["table3"]] == [
        "RAG", "with is_rel", "without is_sup", "without is_use", "all",
    ]  # fmt: skip
    assert {row["system"] for row in metrics["table4"]} == {"gold", "rag", "sam_rag"}
    assert {row["modality"] for row in metrics["table4"]} == {"all", "text", "image"}
    retrieval = metrics["retrieval"]
    assert {(row["ranker"], row["n"]) for row in retrieval} == {
        (ranker, n) for ranker in ("BM25", "R", "R*", "fusion") for n in (1, 2, 5, 10)
    }
    for row in retrieval:
        assert row["questions"] == DEV_QUESTIONS
        assert 0 <= row["recall_ci"][0] <= row["recall"] <= row["recall_ci"][1] <= 100
    for ranker in ("BM25", "R", "R*", "fusion"):
        recalls = [row["recall"] for row in retrieval if row["ranker"] == ranker]
        assert recalls == sorted(recalls)


def test_the_report_is_one_file_that_says_the_teacher_is_simulated(pipeline: Pipeline) -> None:
    page = (pipeline.root / "report.html").read_text(encoding="utf-8")
    assert "simulat" in page
    assert not re.search(r"""(?:src|href)=["']https?://""", page)
    for question in read_records(pipeline.root / "data" / "dev" / "questions.jsonl", Question):
        assert question.question in page
    assert "report.html" in pipeline.said["evaluate"].replace("\n", "")
    assert {path.name for path in (pipeline.root / "tables").iterdir()} >= {"table2.csv", "table3.csv", "table4.csv"}
    assert list((pipeline.root / "plots").glob("*.svg"))


@pytest.mark.parametrize("folder", ["student", "retriever", "."])
def test_weights_and_biases_stays_offline(pipeline: Pipeline, folder: str) -> None:
    paths = (pipeline.root / folder / "wandb").iterdir()
    (run,) = [path.name for path in paths if path.is_dir() and not path.is_symlink()]
    assert run.startswith("offline-run-")


def test_no_secret_is_written_down(pipeline: Pipeline) -> None:
    for record in pipeline.root.rglob("run.json"):
        assert ENVIRONMENT["OPENAI_API_KEY"] not in record.read_text(encoding="utf-8")


# --- run again ---


@pytest.mark.parametrize("stage", SKIPPED_WHEN_DONE)
def test_a_finished_stage_has_nothing_to_do(pipeline: Pipeline, run_script: Any, stage: str) -> None:
    rows = count_rows(pipeline.root / "calls.sqlite")
    record = pipeline.root / RECORDS[stage][0] / "run.json"
    before = record.read_bytes()
    outcome = run_script(*command(*pipeline.stages()[stage]))
    assert outcome.code == 0, outcome.err
    assert "nothing to do" in outcome.log
    assert record.read_bytes() == before
    assert count_rows(pipeline.root / "calls.sqlite") == rows


@pytest.mark.parametrize("stage", REPEATED)
def test_a_stage_that_runs_again_asks_nothing_and_writes_the_same(
    pipeline: Pipeline, run_script: Any, stage: str
) -> None:
    rows = count_rows(pipeline.root / "calls.sqlite")
    before = {name: (pipeline.root / name).read_bytes() for name in REPEATED[stage]}
    outcome = run_script(*command(*pipeline.stages()[stage]), *(["--wandb", "false"] if stage == "evaluate" else []))
    assert outcome.code == 0, outcome.err
    assert {name: (pipeline.root / name).read_bytes() for name in REPEATED[stage]} == before
    assert count_rows(pipeline.root / "calls.sqlite") == rows


# --- cut short ---


def run_until(arguments: list[str], reached: Callable[[], bool]) -> None:
    """Start a script, and kill it when `reached`."""
    log = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not reached():
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_distilling_goes_on_after_a_kill_and_pays_nothing_twice(
    pipeline: Pipeline, run_script: Any, serve_teacher: Any
) -> None:
    first, second = (serve_teacher(pipeline.root / "world", delay_s=0.01) for _ in range(2))
    output, store = pipeline.root / "sft_killed", pipeline.root / "killed.sqlite"
    arguments = command(*pipeline.distill(output.name, store.name))
    run_until([*arguments, "--teacher_url", first.url], lambda: count_rows(store) >= 5 * TRAIN_QUESTIONS)
    paid = count_rows(store)
    assert not output.exists()

    outcome = run_script(*arguments, "--teacher_url", second.url)
    assert outcome.code == 0, outcome.err
    assert second.asked.total() == len(second.asked) == count_rows(store) - paid > 0
    assert (first.asked | second.asked).total() == count_rows(store), "whatever is asked is stored in the end"
    assert (first.asked & second.asked).total() <= 32, "only calls that were in flight are lost"
    for name in ("sft.jsonl", "dropped.jsonl", "data_card.md"):
        assert (output / name).read_bytes() == (pipeline.root / "sft" / name).read_bytes()


def test_answering_goes_on_after_a_kill_and_ends_with_the_same_traces(
    pipeline: Pipeline, run_script: Any, serve_teacher: Any
) -> None:
    first, second = (serve_teacher(pipeline.root / "world", delay_s=0.01) for _ in range(2))
    path, store = pipeline.root / "answers_killed" / "traces.jsonl", pipeline.root / "answers.sqlite"
    arguments = command(*pipeline.answer(path.parent.name, store.name))
    run_until(
        [*arguments, "--teacher_url", first.url],
        lambda: path.is_file() and path.read_bytes().count(b"\n") >= DEV_QUESTIONS // 2,
    )
    whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
    assert DEV_QUESTIONS // 2 <= whole.count(b"\n") < DEV_QUESTIONS
    path.write_bytes(whole + b'{"question_id": "cut')  # as a kill in the middle of a line leaves it

    paid = count_rows(store)
    outcome = run_script(*arguments, "--teacher_url", second.url)
    assert outcome.code == 0, outcome.err
    assert f"{DEV_QUESTIONS} questions" in outcome.log
    assert second.asked.total() == len(second.asked) == count_rows(store) - paid
    assert path.read_bytes().startswith(whole)
    undisturbed = pipeline.root / "study" / "cells" / "sam_rag-Rstar-G" / "traces.jsonl"
    assert compared(path) == compared(undisturbed)
    assert "nothing to do" in run_script(*arguments).log  # without a teacher


def compared(path: Path) -> dict[str, Trace]:
    """Traces by question; whether a reply came from the store does not count."""
    traces = read_records(path, Trace)
    assert len({trace.question_id for trace in traces}) == len(traces) == len(list(read_lines(path)))
    return {
        trace.question_id: dataclasses.replace(trace, usage=dataclasses.replace(trace.usage, cached_calls=0))
        for trace in traces
    }


# --- the paper's settings ---


def test_the_papers_configuration_runs_on_the_mini_world(
    pipeline: Pipeline, run_script: Any, serve_teacher: Any
) -> None:
    """The stages up to the training files; that all of configs/paper parses is a test of `test_configs`."""
    teacher = serve_teacher(pipeline.root / "world")
    root = pipeline.root / "paper"
    paper = dataclasses.replace(pipeline, root=root, url=teacher.url)
    images = pipeline.path(f"world/{IMAGES_FOLDER}")
    index, model = root / "index_train", ["--teacher_model", "simulated-teacher"]
    quickstart = ["--embedder", "quickstart"]
    commands = [
        ["data_gen/prepare.py", "--data_dir", pipeline.path("world"), "--image_root", images, "--output_dir",
         paper.path("data")],
        ["data_gen/caption.py", "--documents_files", paper.path("data/train/documents.jsonl"), "--image_root", images,
         *paper.teacher(), *model],
        paper.index("index_train", "train", "quickstart"),
        [*paper.distill(), "--image_root", images, *quickstart, *model],
        ["data_gen/mine.py", *paper.records("train"), "--index_dir", str(index), *quickstart,
         "--output_dir", paper.path("mined")],
    ]  # fmt: skip
    for stage in commands:
        outcome = run_script(*command(*stage, configs="configs/paper"))
        assert outcome.code == 0, outcome.err
    rows = read_records(root / "sft" / "sft.jsonl", SftRow)
    assert {"answer", "is_use", "is_sup"} <= {row.kind for row in rows}
    assert all(len(row.doc_ids) == 1 for row in rows), "the paper judges single documents"
    assert not [row for row in rows if row.label == "abstain"]
    mined = read_records(root / "mined" / "retriever.jsonl", RetrieverRow)
    assert all(len(row.neg) == 10 for row in mined)
    assert len(teacher.asked) == count_rows(root / "calls.sqlite")
    assert set(teacher.asked.values()) == {1}

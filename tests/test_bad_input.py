"""Bad input ends in exit status 2 and one sentence that names the file or key and the way out, never in a traceback."""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_gen import prepare
from samrag.benchmarks.corpus import SetAside
from samrag.files import read_records, write_json, write_records
from samrag.miniworld.dataset import IMAGES_FOLDER, SplitSize, write_gz, write_world
from samrag.miniworld.world import Split
from samrag.retrieval.embedder import QUICKSTART_PACKAGE
from samrag.schema import Document, Modality, Question, Trace
from tests.faulty_server import Fault, FaultyServer, serving

SIZE = SplitSize(8, 6)
TEXTS, IMAGES, TRAIN = "MMQA_texts.jsonl.gz", "MMQA_images.jsonl.gz", "MMQA_train.jsonl.gz"
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(QUICKSTART_PACKAGE) is None, reason="the quickstart embedder is not installed"
)


def refused(outcome: Any, *words: object) -> str:
    """Check that a run was refused in one sentence with these words in it; returns the sentence."""
    assert outcome.code == 2, outcome.err
    assert "Traceback" not in outcome.err
    (sentence,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.err.endswith(f"{sentence}\n"), "the sentence comes last, on one line"
    assert sentence.endswith((".", "`")) or ";" in sentence
    for word in words:
        assert str(word) in sentence
    return sentence


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a mini world, `world`, and its records, `data`."""
    folder = tmp_path_factory.mktemp("original")
    write_world(folder / "world", {Split.TRAIN: SIZE, Split.DEV: SIZE}, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", *prepare_arguments(folder)])
        prepare.main()
    return folder


def prepare_arguments(folder: Path) -> list[str]:
    world = folder / "world"
    return ["--data_dir", str(world), "--output_dir", str(folder / "data"), "--image_root", str(world / IMAGES_FOLDER)]


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change every object of a gzipped JSONL file in place."""
    rows = [json.loads(line) for line in gzip.open(path, "rt", encoding="utf-8")]
    for row in rows:
        change(row)
    write_gz(path, rows)


def records_of(folder: Path, split: str = "train") -> list[str]:
    """The flags that name a split's records and images."""
    data = folder / "data" / split
    files = ["--questions_file", data / "questions.jsonl", "--documents_file", data / "documents.jsonl"]
    return [*map(str, files), "--image_root", str(folder / "world" / IMAGES_FOLDER)]


class TestRawFiles:
    """prepare.py on files that are not what they should be."""

    def prepare(self, folder: Path, run_script: Any, *arguments: str) -> Any:
        shutil.rmtree(folder / "data")
        outcome = run_script("data_gen/prepare.py", *prepare_arguments(folder), *arguments)
        assert outcome.code == 0 or not (folder / "data" / "run.json").exists()
        return outcome

    def test_a_truncated_gzip_file(self, folder: Path, run_script: Any) -> None:
        path = folder / "world" / TEXTS
        path.write_bytes(path.read_bytes()[:-200])
        refused(self.prepare(folder, run_script), path, "not a whole gzip file", "download it again")

    def test_a_file_that_is_called_gz_and_is_none(self, folder: Path, run_script: Any) -> None:
        path = folder / "world" / TRAIN
        path.write_bytes(gzip.decompress(path.read_bytes()))
        refused(self.prepare(folder, run_script), path, "not a whole gzip file")

    def test_a_line_that_is_no_json(self, folder: Path, run_script: Any) -> None:
        path = folder / "world" / IMAGES
        lines = gzip.decompress(path.read_bytes()).splitlines()
        lines[2] = lines[2][:-9]
        path.write_bytes(gzip.compress(b"\n".join(lines)))
        refused(self.prepare(folder, run_script), f"{path}, line 3", "not valid JSON", "mend or remove")

    @pytest.mark.parametrize("name", [TRAIN, TEXTS, IMAGES])
    def test_a_missing_file(self, folder: Path, run_script: Any, name: str) -> None:
        (folder / "world" / name).unlink()
        refused(self.prepare(folder, run_script), folder / "world", name, "check data_dir")

    def test_a_missing_image(self, folder: Path, run_script: Any) -> None:
        image = min((folder / "world" / IMAGES_FOLDER).iterdir())
        image.unlink()
        refused(self.prepare(folder, run_script), "1 of 8 images", image, "missing", "leave image_root out")

    @pytest.mark.parametrize("content", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n and no more", b"<html>404</html>"])
    def test_a_corrupt_image(self, folder: Path, run_script: Any, content: bytes) -> None:
        image = min((folder / "world" / IMAGES_FOLDER).iterdir())
        image.write_bytes(content)
        refused(self.prepare(folder, run_script), "1 of 8 images", image, "corrupt", "restore them")

    def test_an_image_that_is_cut_off(self, folder: Path, run_script: Any) -> None:
        image = min((folder / "world" / IMAGES_FOLDER).iterdir())
        image.write_bytes(image.read_bytes()[:-40])
        refused(self.prepare(folder, run_script), "1 of 8 images", image, "corrupt")

    def test_bad_items_are_set_aside_when_that_is_asked_for(self, folder: Path, run_script: Any) -> None:
        image = min((folder / "world" / IMAGES_FOLDER).iterdir())
        image.write_bytes(b"GIF89a")
        path = folder / "world" / TRAIN
        rows = [json.loads(line) for line in gzip.open(path, "rt", encoding="utf-8")]
        rows[0]["answers"] = []
        write_gz(path, rows)
        assert self.prepare(folder, run_script, "--on_bad", "quarantine").code == 0
        records, aside = [], []
        for split in ("train", "dev"):
            data = folder / "data" / split
            records += read_records(data / "questions.jsonl", Question)
            aside += read_records(data / "quarantine.jsonl", SetAside, allow_empty=True)
        assert f"{path}, line 1, answers" in {item.item for item in aside}
        assert any(str(image) in item.reason and "corrupt" in item.reason for item in aside)
        assert len(records) + sum("question" in item.item or "answers" in item.item for item in aside) == 12

    def test_an_image_path_that_leaves_its_folder(self, folder: Path, run_script: Any) -> None:
        path = folder / "world" / IMAGES
        changed(path, lambda row: row.update(path=f"../{row['path']}"))
        refused(self.prepare(folder, run_script), f"{path}, line 1", "path", "../", "image folder")

    def test_an_empty_corpus(self, folder: Path, run_script: Any) -> None:
        for name in (TEXTS, IMAGES):
            changed(folder / "world" / name, lambda row: row.update(id=f"x{row['id']}"))
        refused(self.prepare(folder, run_script), folder / "world" / TRAIN, "none of 6 questions", "belong together")

    def test_an_empty_question_file(self, folder: Path, run_script: Any) -> None:
        write_gz(folder / "world" / TRAIN, [])
        refused(self.prepare(folder, run_script), folder / "world" / TRAIN, "no question")

    @pytest.mark.parametrize("corpus", ["selected", "split"])
    def test_no_question_of_the_wanted_types(self, folder: Path, run_script: Any, corpus: str) -> None:
        outcome = self.prepare(folder, run_script, "--question_types", "TableQ", "--corpus", corpus)
        refused(outcome, folder / "world" / TRAIN, "no question", "TableQ", "question_types")

    def test_a_split_without_labels(self, folder: Path, run_script: Any) -> None:
        path = folder / "world" / "MMQA_test.jsonl.gz"
        shutil.copy(folder / "world" / TRAIN, path)
        changed(path, lambda row: [row.pop(name) for name in ("answers", "supporting_context")])
        refused(self.prepare(folder, run_script, "--splits", "test"), path, "no labels", "use the dev split")


class TestConfiguration:
    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("data_dirr: x", ["data_dirr"]),
            ("splits: 7", ["splits"]),
            ("corpus: everything", ["corpus", "everything"]),
            ("missing_texts: [1]", ["missing_texts"]),
        ],
    )
    def test_a_wrong_key_or_value(self, folder: Path, run_script: Any, line: str, words: list[str]) -> None:
        path = folder / "prepare.yaml"
        path.write_text(f"data_dir: {folder / 'world'}\noutput_dir: {folder / 'out'}\n{line}\n", encoding="utf-8")
        refused(run_script("data_gen/prepare.py", "--config", path), *words)

    def test_broken_yaml_names_its_place(self, folder: Path, run_script: Any) -> None:
        path = folder / "prepare.yaml"
        path.write_text("data_dir: [1\noutput_dir: x\n", encoding="utf-8")
        outcome = run_script("data_gen/prepare.py", "--config", path)
        assert outcome.code == 2
        assert "Traceback" not in outcome.err
        assert "not valid YAML" in outcome.err and str(path) in outcome.err and "line 2" in outcome.err

    def test_a_missing_file(self, folder: Path, run_script: Any) -> None:
        outcome = run_script("data_gen/prepare.py", "--config", folder / "none.yaml")
        refused(outcome, folder / "none.yaml", "does not exist", "--config")

    @pytest.mark.parametrize("flag", [("--dev_clubs", 2), ("--dev_clubs", 10**6), ("--train_questions", -1)])
    def test_a_world_that_cannot_be(self, tmp_path: Path, run_script: Any, flag: tuple[str, int]) -> None:
        outcome = run_script("scripts/make_mini_world.py", "--output_dir", tmp_path / "w", *flag)
        refused(outcome, "no such world", "change the numbers of clubs and questions")


class TestTeacher:
    """The stages that ask a server."""

    def distill(self, folder: Path, run_script: Any, *arguments: object) -> Any:
        return run_script(
            "data_gen/distill.py", *records_of(folder), "--index_dir", folder / "index", "--embedder", "quickstart",
            "--output_dir", folder / "sft", "--store", folder / "calls.sqlite", *arguments,
        )  # fmt: skip

    def caption(self, folder: Path, run_script: Any, *arguments: object) -> Any:
        documents = folder / "data" / "train" / "documents.jsonl"
        return run_script(
            "data_gen/caption.py", "--documents_files", documents, "--image_root", folder / "world" / IMAGES_FOLDER,
            "--store", folder / "calls.sqlite", "--teacher_url", f"http://127.0.0.1:{free_port()}/v1", *arguments,
        )  # fmt: skip

    def test_no_server_at_the_address(self, folder: Path, run_script: Any) -> None:
        outcome = self.caption(folder, run_script, "--max_attempts", 1, "--timeout_s", 2)
        refused(outcome, "no server at http://127.0.0.1:", "start it")
        assert not (folder / "data" / "train" / "documents.captioned.jsonl").exists()

    def test_an_address_that_is_none(self, folder: Path, run_script: Any) -> None:
        outcome = self.caption(folder, run_script, "--max_attempts", 1, "--teacher_url", "nonsense")
        refused(outcome, "'nonsense' does not begin with http://")
        assert not (folder / "data" / "train" / "documents.captioned.jsonl").exists()

    def test_a_server_that_answers_nothing_stops_the_run_soon(self, folder: Path, run_script: Any) -> None:
        with serving(FaultyServer(lambda text, times: Fault.NOT_JSON)) as server:
            outcome = self.caption(folder, run_script, "--max_attempts", 1, "--teacher_url", server.url)
        refused(outcome, "has answered none of its requests", "check its address")

    def test_an_image_root_that_is_not_there(self, folder: Path, run_script: Any) -> None:
        outcome = self.caption(folder, run_script, "--image_root", folder / "none")
        refused(outcome, "image_root", folder / "none", "check the path")

    def test_a_folder_without_the_images(self, folder: Path, run_script: Any) -> None:
        outcome = self.caption(folder, run_script, "--image_root", folder / "data")
        refused(outcome, "none of the 8 images", "bad_image", ".png", "check image_root")

    def test_an_image_path_that_leaves_its_folder(self, folder: Path, run_script: Any) -> None:
        documents = folder / "data" / "train" / "documents.jsonl"
        write_records(documents, [Document("i", Modality.IMAGE, "An image", image="../world.json")])
        refused(self.caption(folder, run_script), "../world.json", "leaves the data folder")

    @pytest.mark.parametrize("content", [b"no database " * 400, b"SQLite format 3\0 but cut"])
    def test_a_store_that_is_no_database(self, folder: Path, run_script: Any, content: bytes) -> None:
        (folder / "calls.sqlite").write_bytes(content)
        refused(self.caption(folder, run_script), folder / "calls.sqlite", "not a usable reply store", "move it away")
        assert (folder / "calls.sqlite").read_bytes() == content

    def test_a_missing_questions_file(self, folder: Path, run_script: Any) -> None:
        path = folder / "data" / "train" / "questions.jsonl"
        path.unlink()
        refused(self.distill(folder, run_script), path, "does not exist", "run the stage that writes it")

    @pytest.mark.parametrize("name", ["questions", "documents"])
    def test_an_empty_file(self, folder: Path, run_script: Any, name: str) -> None:
        path = folder / "data" / "train" / f"{name}.jsonl"
        path.write_text("", encoding="utf-8")
        refused(self.distill(folder, run_script), path, "is empty")

    def test_a_line_that_is_no_record(self, folder: Path, run_script: Any) -> None:
        path = folder / "data" / "train" / "questions.jsonl"
        path.write_text('{"question_id": "q"}\n', encoding="utf-8")
        refused(self.distill(folder, run_script), f"{path}, line 1")

    @pytest.mark.parametrize(
        ("supports", "problem"), [((), "no supporting document"), (("nowhere",), "'nowhere' is not in")]
    )
    def test_a_question_without_its_supports(
        self, folder: Path, run_script: Any, supports: tuple[str, ...], problem: str
    ) -> None:
        path = folder / "data" / "train" / "questions.jsonl"
        questions = read_records(path, Question)
        questions[3] = Question("q3", "Where?", ("here",), "TextQ", "train", support_ids=supports)
        write_records(path, questions)
        refused(self.distill(folder, run_script), "'q3'", problem, "prepare the data again")


class TestSimulatedTeacher:
    def test_a_port_that_is_in_use(self, folder: Path, run_script: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            outcome = run_script("scripts/simulated_teacher.py", "--world", folder / "world", "--port", port)
        refused(outcome, f"port {port} is in use", "--port")

    def test_a_folder_without_a_world(self, tmp_path: Path, run_script: Any) -> None:
        refused(run_script("scripts/simulated_teacher.py", "--world", tmp_path), tmp_path / "world.json", "not exist")

    def test_a_world_of_something_else(self, tmp_path: Path, run_script: Any) -> None:
        write_json(tmp_path / "world.json", [{"name": "Bees"}])
        outcome = run_script("scripts/simulated_teacher.py", "--world", tmp_path)
        refused(outcome, tmp_path / "world.json", "no mini world", "make_mini_world.py")

    def test_an_impossible_error_rate(self, folder: Path, run_script: Any) -> None:
        outcome = run_script("scripts/simulated_teacher.py", "--world", folder / "world", "--error_rate", 2)
        refused(outcome, "error_rate", "between 0 and 1")


class TestRankers:
    def evaluate(self, folder: Path, run_script: Any, *arguments: object) -> Any:
        flags = [*records_of(folder, "dev")[:4], "--output_dir", folder / "study", *arguments]
        return run_script("inference/evaluate_retrieval.py", *flags)

    def test_an_unknown_ranker(self, folder: Path, run_script: Any) -> None:
        refused(self.evaluate(folder, run_script, "--rankers", "bm25", "google"), "'google'", "title, bm25")

    def test_an_index_entry_of_another_form(self, folder: Path, run_script: Any) -> None:
        refused(self.evaluate(folder, run_script, "--indexes", "runs/index"), "'runs/index'", "label=index")

    def test_an_embedder_that_is_no_folder(self, folder: Path, run_script: Any) -> None:
        path = folder / "none"
        refused(self.evaluate(folder, run_script, "--indexes", f"R=x={path}"), path, "no folder", "quickstart")

    def test_questions_without_labels(self, folder: Path, run_script: Any) -> None:
        path = folder / "data" / "dev" / "questions.jsonl"
        write_records(path, [Question("q0", "Where?", (), "", "test")])
        refused(self.evaluate(folder, run_script), path, "'q0'", "no supporting document", "split with labels")


@needs_minilm
class TestIndexes:
    """An index that does not belong to the embedder or the documents, or is not whole."""

    @pytest.fixture(scope="class")
    def index(self, original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return built(original, tmp_path_factory.mktemp("index"))

    def mine(self, folder: Path, run_script: Any, index: Path, embedder: object = "quickstart") -> Any:
        flags = [*records_of(folder)[:4], "--index_dir", index, "--embedder", embedder, "--output_dir", folder / "out"]
        flags += ["--store", folder / "calls.sqlite"]
        return run_script("data_gen/mine.py", *flags)

    def test_a_teacher_that_gives_nothing_usable(self, folder: Path, run_script: Any, index: Path) -> None:
        with serving(FaultyServer(lambda text, times: Fault.INVALID)) as server:
            outcome = run_script(
                "data_gen/distill.py", *records_of(folder), "--index_dir", index, "--embedder", "quickstart",
                "--output_dir", folder / "sft", "--store", folder / "calls.sqlite", "--teacher_url", server.url,
                "--num_samples", 1,
            )  # fmt: skip
        refused(outcome, "no item became a row", "invalid_reply", folder / "sft" / "dropped.jsonl", "check the teacher")
        assert not (folder / "sft" / "sft.jsonl").exists()

    def test_of_another_embedder(self, folder: Path, run_script: Any, index: Path) -> None:
        from samrag.retrieval.embedder import resolve_model

        other = folder / "embedder"
        shutil.copytree(resolve_model("quickstart"), other, copy_function=lambda a, b: Path(b).symlink_to(a))
        settings = other / "config_sentence_transformers.json"
        values = json.loads(settings.read_text(encoding="utf-8"))
        settings.unlink()
        write_json(settings, {**values, "prompts": {"query": "Find: "}})
        refused(self.mine(folder, run_script, index, other), index, "another embedder", "build the index again")

    def test_of_other_documents(self, folder: Path, run_script: Any, index: Path) -> None:
        path = folder / "data" / "train" / "documents.jsonl"
        write_records(path, read_records(path, Document)[::-1])
        refused(self.mine(folder, run_script, index), index, "other documents", "build_index.py")

    @pytest.mark.parametrize("name", ["manifest.json", "vectors-*.npy", "documents-*.json"])
    def test_half_written(self, folder: Path, run_script: Any, index: Path, name: str) -> None:
        half = Path(shutil.copytree(index, folder / "index"))
        next(half.glob(name)).unlink()
        refused(self.mine(folder, run_script, half), half)

    def test_cut_off(self, folder: Path, run_script: Any, index: Path) -> None:
        half = Path(shutil.copytree(index, folder / "index"))
        shard = next(half.glob("vectors-*.npy"))
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
        refused(self.mine(folder, run_script, half), shard, "build the index again")

    def test_that_is_not_there(self, folder: Path, run_script: Any) -> None:
        refused(self.mine(folder, run_script, folder / "none"), folder / "none", "build_index.py")


def built(folder: Path, index: Path, split: str = "train") -> Path:
    """An index over a split's documents."""
    from inference import build_index

    documents = str(folder / "data" / split / "documents.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        flags = ["--documents_file", documents, "--embedder", "quickstart", "--output_dir", str(index)]
        patch.setattr(sys, "argv", ["build_index.py", *flags])
        build_index.main()
    return index


@needs_minilm
class TestModels:
    """run.py with a model, an adapter or images that are not as they should be."""

    @pytest.fixture(scope="class", autouse=True)
    def one_thread(self) -> Iterator[None]:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    @pytest.fixture(scope="class")
    def index(self, original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return built(original, tmp_path_factory.mktemp("index"), "dev")

    def answer(self, folder: Path, run_script: Any, index: Path, *arguments: object) -> Any:
        return run_script(
            "inference/run.py", *records_of(folder, "dev"), "--index_dir", index, "--embedder", "quickstart",
            "--output_dir", folder / "answers", "--store", folder / "calls.sqlite", *arguments,
        )  # fmt: skip

    def test_no_model(self, folder: Path, run_script: Any, index: Path) -> None:
        refused(self.answer(folder, run_script, index), "model_path is not set", "engine api")

    def test_a_model_that_is_not_there(self, folder: Path, run_script: Any, index: Path) -> None:
        outcome = self.answer(folder, run_script, index, "--model_path", folder / "none")
        refused(outcome, "model_path", folder / "none", "check the path")

    def test_a_model_without_a_processor(self, folder: Path, run_script: Any, index: Path, tiny_llava: Path) -> None:
        outcome = self.answer(folder, run_script, index, "--model_path", bare(tiny_llava, folder / "bare"))
        refused(outcome, folder / "bare", "no usable processor", "save its model's processor")

    def test_training_on_a_model_without_a_processor(
        self, folder: Path, run_script: Any, tiny_llava: Path, sft_file: Path
    ) -> None:
        outcome = run_script(
            "train/sft.py", "--model_path", bare(tiny_llava, folder / "bare"), "--train_files", sft_file,
            "--output_dir", folder / "out", "--report_to", "none", "--use_cpu", "true", "--bf16", "false",
        )  # fmt: skip
        refused(outcome, folder / "bare", "no usable processor", "save its model's processor")

    def test_an_adapter_of_other_templates(
        self, folder: Path, run_script: Any, index: Path, tiny_llava: Path, adapter: Path
    ) -> None:
        outcome = self.answer(folder, run_script, index, "--model_path", tiny_llava, "--adapter", adapter)
        refused(outcome, adapter, "'old'", "train it again")

    def test_an_adapter_folder_without_an_adapter(
        self, folder: Path, run_script: Any, index: Path, tiny_llava: Path
    ) -> None:
        outcome = self.answer(folder, run_script, index, "--model_path", tiny_llava, "--adapter", tiny_llava)
        refused(outcome, tiny_llava, "no adapter folder", "adapter_config.json")

    @pytest.mark.parametrize("engine", ["local", "api"])
    @pytest.mark.parametrize("broken", ["missing", "corrupt"])
    def test_a_bad_image_fails_for_its_document_alone(
        self,
        folder: Path, run_script: Any, index: Path, tiny_llava: Path, serve_teacher: Any, engine: str, broken: str,
    ) -> None:  # fmt: skip
        documents = {d.doc_id: d for d in read_records(folder / "data" / "dev" / "documents.jsonl", Document)}
        images = [d for d in documents.values() if d.image]
        for image in images[::2]:
            path = folder / "world" / IMAGES_FOLDER / str(image.image)
            path.unlink() if broken == "missing" else path.write_bytes(b"no image")
        flags: list[object] = ["--model_path", tiny_llava, "--max_tokens", 4, "--num_threads", 1]
        if engine == "api":
            flags = ["--engine", "api", "--teacher_url", serve_teacher(folder / "world").url]
            flags += ["--teacher_model", "simulated-teacher"]
        outcome = self.answer(folder, run_script, index, *flags)
        assert outcome.code == 0, outcome.err
        traces = read_records(folder / "answers" / "traces.jsonl", Trace)
        assert len(traces) == SIZE.num_questions
        seen = [examined for trace in traces for examined in trace.documents]
        bad = {image.doc_id for image in images[::2]}
        assert {examined.doc_id for examined in seen if examined.failure == "bad_image"} == bad
        for examined in (examined for examined in seen if examined.doc_id in bad):
            assert (examined.failure, examined.verdict, examined.kept) == ("bad_image", None, False)
        assert engine == "local" or any(trace.answers for trace in traces)


def bare(model: Path, folder: Path) -> Path:
    """A model's folder without its processor."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(model / name, folder / name)
    return folder


@pytest.fixture
def sft_file(folder: Path) -> Path:
    """A file with one row."""
    from samrag.calls import CallKind
    from samrag.prompts import PromptStyle, template_hash
    from samrag.schema import ChatMessage, SftRow

    messages = (ChatMessage("user", "Is it red?"), ChatMessage("assistant", '{"Response": "True"}'))
    row = SftRow(messages, (), "is_rel_text", "True", "q", (), template_hash(PromptStyle.STUDENT, CallKind.IS_REL_TEXT))
    write_records(folder / "sft.jsonl", [row])
    return folder / "sft.jsonl"


@pytest.fixture
def adapter(folder: Path, tiny_llava: Path) -> Path:
    """An adapter that was trained with other prompt templates."""
    from peft import get_peft_model
    from transformers import AutoModelForImageTextToText

    from samrag.training.sft_arguments import SftArguments
    from samrag.training.student import ADAPTER_FILE, lora_config

    model = AutoModelForImageTextToText.from_pretrained(tiny_llava)
    get_peft_model(model, lora_config(model, SftArguments("x", ["x"]))).save_pretrained(folder / "adapter")
    write_json(folder / "adapter" / ADAPTER_FILE, {"templates": {"answer": "old"}})
    return folder / "adapter"


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])

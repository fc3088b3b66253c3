"""Exports: nothing leaks between the splits, each format says what the rows say, nothing of others is overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from samrag import exporting
from samrag.arguments import ExportArguments
from samrag.errors import UserError
from samrag.exporting import as_datasets, card, sharegpt_record, split_rows, trl_record
from samrag.files import read_json, replacing_folder, write_records
from samrag.schema import ChatMessage, SftRow


def row(question: int, *doc_ids: str, image: str = "", direct: bool = False) -> SftRow:
    user = ChatMessage("user", "Related?\n<image>\nQ: &lt;image&gt;" if image else f"Related? {question}")
    reply = ChatMessage("assistant", '{"Response": "True"}')
    images = (image,) if image else ()
    kind = "is_rel_image" if image else "is_rel_text"
    return SftRow(
        (user, reply), images, kind, "True", f"q{question}", doc_ids, "hash", direct,
        call_key=f"k{question}", teacher="some|teacher", teacher_template="asked", filters=("verdict True",),
    )  # fmt: skip


ROWS = [row(q, f"d{q}", f"d{q + 1}", direct=direct) for q in range(40) for direct in (False, True)]


def ids(rows: list[SftRow]) -> set[str]:
    return {row.question_id for row in rows}


def documents(rows: list[SftRow]) -> set[str]:
    return {doc_id for row in rows for doc_id in row.doc_ids}


class TestSplit:
    @pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
    def test_no_question_is_on_both_sides_and_no_row_is_lost(self, share: float) -> None:
        splits, left_out = split_rows(ROWS, share, False, seed=0)
        assert not ids(splits["train"]) & ids(splits["validation"])
        assert len(ids(splits["validation"])) == max(1, round(40 * share))
        assert left_out == 0 and sorted([*splits["train"], *splits["validation"]], key=ROWS.index) == ROWS

    def test_no_document_is_on_both_sides_when_that_is_asked_for(self) -> None:
        plain, _ = split_rows(ROWS, 0.2, False, seed=0)
        splits, left_out = split_rows(ROWS, 0.2, True, seed=0)
        assert documents(plain["train"]) & documents(plain["validation"])
        assert not documents(splits["train"]) & documents(splits["validation"])
        assert splits["validation"] == plain["validation"]
        assert left_out == len(plain["train"]) - len(splits["train"]) > 0

    def test_the_draw_depends_on_the_seed_and_not_on_the_order_of_rows(self) -> None:
        held_out = ids(split_rows(ROWS, 0.2, False, seed=0)[0]["validation"])
        assert held_out == ids(split_rows(ROWS[::-1], 0.2, False, seed=0)[0]["validation"])
        assert held_out != ids(split_rows(ROWS, 0.2, False, seed=1)[0]["validation"])

    def test_a_share_of_zero_is_no_validation(self) -> None:
        assert split_rows(ROWS, 0, True, seed=0) == ({"train": ROWS}, 0)

    def test_a_document_that_all_questions_share_leaves_nothing_to_train_on(self) -> None:
        with pytest.raises(UserError, match=r"no training row is left.*separate_documents: false"):
            split_rows([row(q, "all") for q in range(5)], 0.2, True, seed=0)


class TestForms:
    def test_trl_and_sharegpt_hold_the_same_turns_and_one_marker_an_image(self) -> None:
        for each in (row(1, "d", image="a.png"), row(2, "d")):
            trl, sharegpt = trl_record(each), sharegpt_record(each)
            turns = [
                {"role": t["role"], "content": "".join(p["text"] or "<image>" for p in t["content"])}
                for t in (*trl["prompt"], *trl["completion"])
            ]
            assert turns == sharegpt["messages"]
            assert [t["role"] for t in trl["completion"]] == ["assistant"]
            parts = [p for t in trl["prompt"] for p in t["content"]]
            assert sum(p["type"] == "image" for p in parts) == len(trl["images"]) == len(each.images)
            assert sum(m["content"].count("<image>") for m in sharegpt["messages"]) == len(sharegpt["images"])

    def test_datasets_hold_the_images_or_their_paths(self, tmp_path: Path) -> None:
        Image.new("RGB", (3, 2), "red").save(tmp_path / "a.png")
        splits = {"train": [row(1, "d", image="a.png"), row(2, "d")]}
        assert as_datasets(splits)["train"]["images"][:] == [["a.png"], []]
        with_images = as_datasets(splits, {"a.png": tmp_path / "a.png"})["train"]
        assert with_images[0]["images"][0].size == (3, 2) and with_images[1]["images"] == []
        assert with_images[0]["teacher"] == "some|teacher" and with_images[0]["filters"] == ["verdict True"]

    def test_the_card_says_counts_licences_teacher_and_templates(self) -> None:
        arguments = ExportArguments("x", "y", "z", data_licence="CC-BY-SA", validation_share=0.2)
        splits, left_out = split_rows(ROWS, 0.2, False, seed=0)
        text = card(splits, left_out, arguments)
        assert yaml.safe_load(text.split("---")[1])["size_categories"] == ["n<1K"]
        for words in (
            "| train | 32 | 64 |",
            "CC-BY-SA",
            "some\\|teacher (80)",
            "asked (80)",
            "hash (80)",
            "verdict True",
        ):
            assert words in text
        old = SftRow(ROWS[0].messages, (), "answer", "answer", "q", (), "hash")
        assert "| teacher | not noted (1) |" in card({"train": [old]}, 0, arguments)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with replacing_folder(folder) as new:
        (new / "old.txt").write_text("old")
    with pytest.raises(ZeroDivisionError), replacing_folder(folder) as new:
        (new / "new.txt").write_text("new")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "old.txt"]
    with replacing_folder(folder) as new:
        (new / "new.txt").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "new.txt"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"formats": ["trl", "alpaca"]}, "formats"),
        ({"formats": []}, "formats"),
        ({"validation_share": 1.0}, "validation_share"),
        ({"name": "a b"}, "name"),
        ({"push_to": "nobody", "copy_images": True}, "owner/name"),
        ({"push_to": "a/b"}, "copy_images"),
        ({"push_to": "a/b", "copy_images": True, "formats": ["trl"]}, "format datasets"),
    ],
)
def test_arguments_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ExportArguments("x", "y", "z", **changes)


class TestStage:
    @pytest.fixture
    def export(self, tmp_path: Path, run_script: Callable[..., Any]) -> Callable[..., Any]:
        (tmp_path / "pictures").mkdir()
        Image.new("RGB", (3, 2), "red").save(tmp_path / "pictures" / "a.png")
        write_records(tmp_path / "sft.jsonl", [*ROWS, row(99, "d", image="a.png")])
        flags = ["--sft_file", tmp_path / "sft.jsonl", "--image_root", tmp_path / "pictures"]
        return lambda *more: run_script("data_gen/export.py", *flags, "--output_dir", tmp_path / "out", *more)

    def test_what_is_written_can_be_read_by_its_readers(self, tmp_path: Path, export: Callable[..., Any]) -> None:
        from datasets import load_dataset, load_from_disk

        assert export("--copy_images", "true", "--validation_share", "0.2").code == 0
        out = tmp_path / "out"
        assert (out / "images" / "a.png").read_bytes() == (tmp_path / "pictures" / "a.png").read_bytes()
        saved = load_from_disk(str(out / "dataset"))
        files = {split: str(out / "trl" / f"{split}.jsonl") for split in ("train", "validation")}
        read = load_dataset("json", data_files=files, cache_dir=str(tmp_path / "cache"))
        information = read_json(out / "llama_factory" / "dataset_info.json")
        settings = yaml.safe_load((out / "llama_factory" / "train.yaml").read_text(encoding="utf-8"))
        assert settings["media_dir"] == str(out / "images")
        assert Path(settings["output_dir"]).parent == out, "the next export replaces the folders of its formats"
        for split, key in (("train", "dataset"), ("validation", "eval_dataset")):
            table = read_json(out / "llama_factory" / information[settings[key]]["file_name"])
            assert len(table) == len(saved[split]) == len(read[split])
            assert read[split]["prompt"][:] == saved[split]["prompt"][:]
        assert json.loads((out / "run.json").read_text())["configuration"]["ExportArguments"]["copy_images"] is True

    def test_it_is_done_once_and_gives_the_same_bytes_again(self, tmp_path: Path, export: Callable[..., Any]) -> None:
        export("--formats", "trl", "llama_factory")
        out = tmp_path / "out"
        files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "run.json"}
        assert "up to date" in export("--formats", "trl", "llama_factory").log
        (out / "run.json").unlink()
        export("--formats", "trl", "llama_factory")
        assert all(path.read_bytes() == content for path, content in files.items())
        assert not [path for path in out.iterdir() if path.name.endswith(".part")]

    def test_folders_of_the_user_are_not_overwritten(self, tmp_path: Path, export: Callable[..., Any]) -> None:
        (tmp_path / "out" / "images").mkdir(parents=True)
        outcome = export("--copy_images", "true")
        assert outcome.code == 2 and "not from an export" in outcome.err
        assert (tmp_path / "out" / "images").is_dir()

    def test_folders_of_other_formats_are_not_left_to_go_stale(self, export: Callable[..., Any]) -> None:
        export("--formats", "trl", "llama_factory")
        outcome = export("--formats", "trl")
        assert outcome.code == 2 and "llama_factory is of an earlier export" in outcome.err

    @pytest.mark.parametrize(("image", "words"), [("b.png", "'b.png'"), ("../sft.jsonl", "leaves the data folder")])
    def test_images_that_are_not_there(
        self, tmp_path: Path, export: Callable[..., Any], image: str, words: str
    ) -> None:
        write_records(tmp_path / "sft.jsonl", [*ROWS, row(99, "d", image=image)])
        outcome = export()
        assert outcome.code == 2 and words in outcome.err and "Traceback" not in outcome.err

    def test_nothing_is_pushed_unless_asked_and_a_refusal_is_one_sentence(
        self, export: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import huggingface_hub

        asked: list[str] = []

        class Hub:
            def create_repo(self, name: str, **options: Any) -> None:
                asked.append(name)
                raise OSError("no such host")

        monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
        assert export("--copy_images", "true").code == 0 and not asked
        outcome = export("--copy_images", "true", "--push_to", "me/data")
        assert asked == ["me/data"]
        assert outcome.code == 2 and "could not push to me/data (no such host); log in" in outcome.err

    def test_the_card_goes_up_before_the_data_whose_push_completes_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import huggingface_hub
        from datasets import DatasetDict

        done: list[str] = []

        class Hub:
            def create_repo(self, name: str, *, private: bool, **options: Any) -> None:
                done.append(f"create {name} private={private}")

            def upload_file(self, *, path_in_repo: str, **options: Any) -> None:
                done.append(f"upload {path_in_repo}")

        monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
        monkeypatch.setattr(DatasetDict, "push_to_hub", lambda self, name, private: done.append(f"push {name}"))
        exporting.push(as_datasets({"train": ROWS}), tmp_path / "README.md", "me/data", private=True)
        assert done == ["create me/data private=True", "upload README.md", "push me/data"]

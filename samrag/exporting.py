"""Training rows in the forms that other trainers read: TRL, LLaMA-Factory, Hugging Face datasets.

Rows are dealt to train and validation by question: near copies (the same verdict with and without its reasoning, the
same document before and after others) never stand on both sides. Every format is a folder that is written beside its
place and moved over it. Left out: alpaca and parquet files (`datasets` converts to the latter).
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samrag.arguments import ExportArguments
from samrag.errors import UserError
from samrag.files import replacing_folder, within, write_json, write_text
from samrag.prompts.render import content_parts
from samrag.schema import SftRow

if TYPE_CHECKING:
    from datasets import DatasetDict

Splits = Mapping[str, Sequence[SftRow]]
"""Rows by split: `train`, and `validation` unless its share is 0."""

IMAGES_FOLDER = "images"
PROVENANCE = (
    *("kind", "label", "direct", "question_id", "doc_ids"),
    *("template", "teacher", "teacher_template", "call_key", "filters"),
)
"""Columns that say where a row came from."""
FOLDERS = {"trl": "trl", "llama_factory": "llama_factory", "datasets": "dataset"}
"""The folder of each format."""
_MARK = ".samrag_export"


def split_rows(
    rows: Sequence[SftRow], validation_share: float, separate_documents: bool, seed: int
) -> tuple[dict[str, list[SftRow]], int]:
    """Deal rows to train and validation by question; the order is kept.

    Args:
        rows: all rows.
        validation_share: of the questions; above 0, at least one question is for validation.
        separate_documents: leave training rows out that show a document of the validation rows.
        seed: of the draw, which depends on nothing else but the set of questions.

    Returns:
        The rows by split, and how many were left out.

    Raises:
        UserError: no training row would be left.
    """
    if not validation_share:
        return {"train": list(rows)}, 0
    questions = sorted({row.question_id for row in rows})
    count = max(1, round(validation_share * len(questions)))
    held_out = set(random.Random(f"export:{seed}").sample(questions, count))
    validation = [row for row in rows if row.question_id in held_out]
    shown = {doc_id for row in validation for doc_id in row.doc_ids} if separate_documents else set()
    train = [row for row in rows if row.question_id not in held_out and not shown.intersection(row.doc_ids)]
    if not train:
        raise UserError(
            f"no training row is left beside {count} of {len(questions)} questions for validation; "
            "choose a smaller validation_share, or separate_documents: false."
        )
    return {"train": train, "validation": validation}, len(rows) - len(train) - len(validation)


def claim_folder(output: Path, formats: Sequence[str]) -> None:
    """See that an export may replace what lies in its folders, and leave a mark there.

    Raises:
        UserError: they hold what is not from an export, or the folder of a format that is not asked for now.
    """
    folders = [output / name for name in (*FOLDERS.values(), IMAGES_FOLDER)]
    there = [path for path in folders if path.exists()]
    if there and not (output / _MARK).is_file():
        raise UserError(f"{there[0]} is there already, and not from an export; choose another output_dir.")
    stale = [path for path in there if path.name in {v for k, v in FOLDERS.items() if k not in formats}]
    if stale:
        raise UserError(
            f"{stale[0]} is of an earlier export with other formats; remove it, or choose another output_dir."
        )
    write_text(output / _MARK, "The folders beside this file are replaced by the next export.\n")


def image_files(rows: Iterable[SftRow], root: Path) -> dict[str, Path]:
    """The rows' images: the file of each path.

    Raises:
        UserError: one is missing, or leaves the folder.
    """
    files = {image: within(root, image) for row in rows for image in row.images}
    missing = [image for image, path in files.items() if not path.is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(files)} images are not in {root}, first {missing[0]!r}; check image_root."
        )
    return files


def copy_images(files: Mapping[str, Path], folder: Path) -> None:
    """Copy images into a folder, under the paths that rows give them."""
    with replacing_folder(folder) as temporary:
        for image, path in files.items():
            target = temporary / image
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


# --- the formats ---


def trl_record(row: SftRow) -> dict[str, Any]:
    """A row in TRL's conversational prompt/completion form: loss falls on the completion alone."""
    turns = [{"role": message.role, "content": content_parts(message.content)} for message in row.messages]
    return {"prompt": turns[:-1], "completion": turns[-1:], "images": list(row.images), **_provenance(row)}


def sharegpt_record(row: SftRow) -> dict[str, Any]:
    """A row in LLaMA-Factory's sharegpt form."""
    messages = [{"role": message.role, "content": message.content} for message in row.messages]
    return {"messages": messages, "images": list(row.images)}


def _provenance(row: SftRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in PROVENANCE}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def write_trl(splits: Splits, folder: Path) -> None:
    """Write `<split>.jsonl`."""
    with replacing_folder(folder) as temporary:
        for split, rows in splits.items():
            lines = (json.dumps(trl_record(row), ensure_ascii=False) for row in rows)
            write_text(temporary / f"{split}.jsonl", "".join(f"{line}\n" for line in lines))


def write_llama_factory(splits: Splits, folder: Path, arguments: ExportArguments) -> None:
    """Write `<split>.json`, `dataset_info.json` and `train.yaml`, which trains on them."""
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    information = {
        f"{arguments.name}_{split}": {
            "file_name": f"{split}.json",
            "formatting": "sharegpt",
            "columns": columns,
            "tags": {**tags, "system_tag": "system"},
        }
        for split in splits
    }
    with replacing_folder(folder) as temporary:
        for split, rows in splits.items():
            write_json(temporary / f"{split}.json", [sharegpt_record(row) for row in rows])
        write_json(temporary / "dataset_info.json", information)
        write_text(temporary / "train.yaml", _llama_factory_yaml(splits, folder, arguments))


def _llama_factory_yaml(splits: Splits, folder: Path, arguments: ExportArguments) -> str:
    """A training configuration with LLaMA-Factory's own defaults for LoRA and the paper's settings."""
    import yaml

    media = folder.parent / IMAGES_FOLDER if arguments.copy_images else Path(arguments.image_root)
    settings: dict[str, Any] = {
        "model_name_or_path": arguments.model_path,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "dataset_dir": str(folder),
        "media_dir": str(media),
        "dataset": f"{arguments.name}_train",
        "template": "llava",
        "cutoff_len": 4096,
        "output_dir": str(folder.parent / "llama_factory_adapter"),  # not inside: an export replaces its folders
        "logging_steps": 10,
        "save_strategy": "epoch",
        "plot_loss": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1.0e-4,
        "num_train_epochs": 5.0,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "bf16": True,
        "seed": arguments.seed,
    }
    if "validation" in splits:
        settings |= {"eval_dataset": f"{arguments.name}_validation", "eval_strategy": "epoch"}
        settings["per_device_eval_batch_size"] = 1
    note = (
        f"# llamafactory-cli train {folder / 'train.yaml'}\n"
        "# Learning rate, epochs and batch are the paper's. LLaMA-Factory's llava template has a system prompt and no\n"
        "# BOS token, so an adapter trained here is to be served with that template too, not with samrag's.\n"
    )
    return note + yaml.safe_dump(settings, sort_keys=False)


def write_datasets(splits: Splits, folder: Path, files: Mapping[str, Path] | None) -> DatasetDict:
    """Save the splits as Hugging Face datasets; see `as_datasets`."""
    from datasets import disable_progress_bars

    disable_progress_bars()
    made = as_datasets(splits, files)
    with replacing_folder(folder) as temporary:
        made.save_to_disk(temporary)
    return made


def as_datasets(splits: Splits, files: Mapping[str, Path] | None = None) -> DatasetDict:
    """The splits as Hugging Face datasets, with every column of the TRL form.

    Args:
        splits: rows by split.
        files: image files to put into the data set; None keeps the images' paths.
    """
    from datasets import Dataset, DatasetDict, Features, Image, List, Value

    text = Value("string")
    turn = {"role": text, "content": List({"type": text, "text": text})}
    features = Features(
        {
            **{"prompt": List(turn), "completion": List(turn), "images": List(text if files is None else Image())},
            **dict.fromkeys(PROVENANCE, text),
            **{"direct": Value("bool"), "doc_ids": List(text), "filters": List(text)},
        }
    )
    made = {}
    for split, rows in splits.items():
        records = [trl_record(row) for row in rows]
        if files is not None:
            for record in records:
                record["images"] = [{"path": i, "bytes": files[i].read_bytes()} for i in record["images"]]
        columns = {name: [record[name] for record in records] for name in features}
        made[split] = Dataset.from_dict(columns, features=features)
    return DatasetDict(made)


def push(datasets: DatasetDict, card: Path, repository: str, private: bool) -> None:
    """Push data sets and their card to the hub; the token is the one that the hub's own client finds.

    Raises:
        UserError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hub = HfApi()
        hub.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
        hub.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=repository, repo_type="dataset")
        datasets.push_to_hub(repository, private=private)  # adds its own fields to the card's head
    except (HfHubHTTPError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"could not push to {repository} ({first}); log in with a token that may write there."
        ) from error


# --- the card ---


def card(splits: Splits, num_left_out: int, arguments: ExportArguments) -> str:
    """README.md: what is in the export, where it came from, how it is read."""
    import yaml

    rows = [row for of_split in splits.values() for row in of_split]
    head = {
        "pretty_name": arguments.name,
        "task_categories": ["image-text-to-text", "visual-question-answering"],
        "tags": ["retrieval-augmented-generation", "verification", "synthetic", "distillation", "samrag"],
        "size_categories": [_size(len(rows))],
    }
    counts = Counter((row.kind, row.label, "verdict alone" if row.direct else "reasoned") for row in rows)
    of_split = {split: Counter((r.kind, r.label, "verdict alone" if r.direct else "reasoned") for r in part)
                for split, part in splits.items()}  # fmt: skip
    lines = [
        "---", yaml.safe_dump(head, sort_keys=False).rstrip(), "---", "",
        f"# {arguments.name}", "",
        "Verification data for multimodal retrieval-augmented generation, in the manner of SAM-RAG (arXiv 2410.11321):"
        " a teacher judged documents and answers and gave reasons, and only what agrees with gold labels is kept."
        " Reasoning that is wrong and ends right cannot be seen by such a filter.", "",
        "## Rows", "",
        *_table(("split", "questions", "rows", "rows with an image"), [
            (split, len({row.question_id for row in part}), len(part), sum(bool(row.images) for row in part))
            for split, part in splits.items()
        ]),
        *_table(("kind", "label", "form", *splits), [
            (*group, *(of_split[split][group] for split in splits)) for group in sorted(counts)
        ]),
        "## Splits", "", *_split_words(splits, num_left_out, arguments), "",
        "## Origin", "",
        *_table(("", ""), [
            ("licence of questions, texts and images", arguments.data_licence),
            ("teacher", _names(row.teacher for row in rows)),
            ("teacher's templates", _names(row.teacher_template for row in rows)),
            ("templates of these prompts", _names(row.template for row in rows)),
            ("filters passed", _names(name for row in rows for name in row.filters)),
        ]),
        "The terms of the teacher's provider may limit what a model trained on its replies may be used for.", "",
        "## Use", "", *_use(arguments),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    def cell(value: object) -> str:
        return f"{value:,}" if type(value) is int else str(value).replace("|", "\\|").replace("\n", " ")

    body = ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body, ""]


def _names(values: Iterable[str]) -> str:
    """Distinct values with their rows, most frequent first; rows from before they were noted are named as such."""
    counts = Counter(values).most_common()
    return ", ".join(f"{value or 'not noted'} ({count:,})" for value, count in counts) or "not noted"


def _size(count: int) -> str:
    for bound, name in ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M")):
        if count < bound:
            return name
    return "1M<n<10M"


def _split_words(splits: Splits, num_left_out: int, arguments: ExportArguments) -> list[str]:
    if "validation" not in splits:
        return ["All rows are for training."]
    words = f"Dealt by question (seed {arguments.seed}): no question is in both splits."
    if arguments.separate_documents:
        words += f" No document is in both either; {num_left_out:,} training rows were left out for it."
    else:
        shown = [{doc_id for row in splits[split] for doc_id in row.doc_ids} for split in ("train", "validation")]
        words += f" {len(shown[0] & shown[1]):,} of {len(shown[1]):,} documents of validation are in training rows too."
    return [words]


def _use(arguments: ExportArguments) -> list[str]:
    where = f"`{IMAGES_FOLDER}/`" if arguments.copy_images else "the folder that was given as `image_root`"
    lines = [f"Image paths are relative to {where}. Loss belongs on the last assistant turn alone.", ""]
    if "trl" in arguments.formats:
        load = 'load_dataset("json", data_files={"train": "trl/train.jsonl"})'
        lines += [f"- TRL: `{load}`; put the folder of the images before each path."]
    if "llama_factory" in arguments.formats:
        lines += ["- LLaMA-Factory: `llamafactory-cli train llama_factory/train.yaml`."]
    if "datasets" in arguments.formats:
        held = "the images are in it" if arguments.copy_images else "with paths of images"
        lines += [f'- Hugging Face datasets: `load_from_disk("dataset")`; {held}.']
    return lines

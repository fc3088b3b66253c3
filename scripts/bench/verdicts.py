"""How well a tuned student judges and answers on the mini world's held-out questions, kind by kind.

    python scripts/bench/verdicts.py --run_dir runs/quickstart --num_questions 100

Needs a finished quickstart. The rows are made as the training rows were, from questions, clubs and names of the dev
split, by the simulated teacher without errors; the student writes its replies itself.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch

from samrag.distilling import rows_of
from samrag.miniworld.dataset import read_truth
from samrag.miniworld.teacher import Teacher
from samrag.miniworld.trial import bm25_materials, follow, recipe
from samrag.training import sft, student
from samrag.training.evaluation import score, summary
from samrag.vlm import ChatProcessor, load_adapter, load_model, model_folder


def main() -> None:
    """Make the rows, let the student reply, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--model_path", default="samrag/miniworld/tiny_llava_base")
    parser.add_argument("--adapter", type=Path, help="default: the quickstart's student")
    parser.add_argument("--num_questions", type=int, default=100)
    parser.add_argument("--rows_a_label", type=int, default=100, help="most rows of a kind, form and label")
    parser.add_argument("--num_threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.num_threads)

    arguments, teacher = recipe(), Teacher(read_truth(options.run_dir / "world"), error_rate=0.0)
    materials = bm25_materials(options.run_dir, arguments, options.num_questions, "dev")
    results = [follow(material, teacher, arguments)[0] for material in materials]
    groups: dict[tuple[str, bool, str], list[sft.Located]] = defaultdict(list)
    for row in rows_of(results, arguments, "simulated-teacher", lambda call: ""):
        groups[row.kind, row.direct, row.label].append(
            sft.Located(row, options.run_dir / "world" / "final_dataset_images")
        )
    rows = [item for _, group in sorted(groups.items()) for item in sft.spread(group, options.rows_a_label)]

    adapter = options.adapter or options.run_dir / "student"
    base = load_model(model_folder(options.model_path))
    chat = ChatProcessor.load(adapter)
    checked = sft.preflight(rows, chat, base)
    model = load_adapter(base, adapter)
    student.check_adapter(model, chat, adapter)
    scored = score(model, chat, checked.held_out(len(rows)), batch_size=64)
    scores = summary(scored)
    kinds = sorted({item.kind + "_direct" * item.direct for item in scored})
    columns = ("parse_rate", "stop_rate", "verdict_accuracy", "verdict_f1", "ece", "auroc", "em", "f1")
    print(f"{len(scored)} rows of {len(materials)} questions")
    print(f"{'kind':<22}{'rows':>6}" + "".join(f"{column:>18}" for column in columns))
    for kind in kinds:
        count = sum(item.kind + "_direct" * item.direct == kind for item in scored)
        cells = (scores.get(f"{kind}_{column}") for column in columns)
        print(f"{kind:<22}{count:>6}" + "".join(f"{'' if v is None else f'{v:.3f}':>18}" for v in cells))
    print(f"{'all':<22}{len(scored):>6}{scores['parse_rate']:>18.3f}{scores['stop_rate']:>18.3f}")


if __name__ == "__main__":
    main()

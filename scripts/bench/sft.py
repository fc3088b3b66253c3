"""Rows a second of train/sft.py's trainer against TRL's own SFTTrainer with its defaults, paired in one run.

    python scripts/bench/sft.py --run_dir runs/quickstart --num_rows 768 --repeats 3

Needs a finished quickstart (its rows and images). Both tune the same base on the same rows in the same order, with the
same adapter, chat template, batch size, learning rate and number of passes, in processes of their own, one after the
other. Ours encodes rows and images once, computes a batch in parts of similar length, and does not recompute
activations; TRL's renders and preprocesses at each step, pads to the longest row, and recomputes. The time is from rows
in memory to the end of training, encoding included. The held-out loss is measured in the same way for both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE = Path(__file__).parents[2] / "samrag" / "miniworld" / "tiny_llava_base"


def work(whose: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Train in this process; returns seconds, rows a second and the held-out loss."""
    import torch
    from datasets import Dataset
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    from samrag.exporting import trl_record
    from samrag.files import within
    from samrag.training import sft, student
    from samrag.training.collator import SftCollator
    from samrag.training.sft_arguments import SftArguments

    torch.set_num_threads(options.num_threads)
    set_seed(0)
    run_dir = Path(options.run_dir)
    root = run_dir / "world" / "final_dataset_images"
    rows = sft.located(run_dir / "sft" / "sft.jsonl", root)
    random.Random(0).shuffle(rows)
    rows, held_out = rows[: options.num_rows], rows[options.num_rows : options.num_rows + 256]
    arguments = SftArguments(str(BASE), ["rows"], lora_r=32, lora_alpha=64, max_batch_tokens=options.max_batch_tokens)
    model, chat = student.load(arguments)
    common: dict[str, Any] = {
        "num_train_epochs": options.epochs, "per_device_train_batch_size": options.batch_size,
        "learning_rate": 2e-3, "lr_scheduler_type": "cosine", "warmup_steps": 0.05, "use_cpu": True, "bf16": False,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1000, "seed": seed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        if whose == "samrag":
            settings = SFTConfig(
                output_dir=folder, max_length=None, activation_checkpointing=False,
                **common,
            )  # fmt: skip
            trainer = sft.build_trainer(model, chat, settings, arguments, sft.preflight(rows, chat, model))
        else:
            records = [
                {**trl_record(row), "images": [str(within(where, image)) for image in row.images]}
                for row, where in rows
            ]
            table = Dataset.from_list([{k: r[k] for k in ("prompt", "completion", "images")} for r in records])
            trainer = SFTTrainer(
                model=model, args=SFTConfig(output_dir=folder, **common), train_dataset=table,
                processing_class=chat.processor, peft_config=student.lora_config(model, arguments),
            )  # fmt: skip
        trainer.train()
        taken_s = time.perf_counter() - begun
    checked = sft.preflight(held_out, chat, model)
    collator, losses, tokens = SftCollator(chat), 0.0, 0
    trainer.model.eval()
    with torch.no_grad():
        for start in range(0, len(checked.dataset), 32):
            batch = collator([checked.dataset[i] for i in range(start, min(start + 32, len(checked.dataset)))])
            count = int((batch["labels"] != -100).sum())
            losses += float(trainer.model(**batch).loss) * count
            tokens += count
    return {"seconds": taken_s, "rows_a_second": len(rows) * options.epochs / taken_s, "eval_loss": losses / tokens}


def main() -> None:
    """Alternate the two, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", default="runs/quickstart")
    parser.add_argument("--num_rows", type=int, default=768)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max_batch_tokens", type=int, default=2048, help="ours: tokens of a part")
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--worker", help="used by the script itself")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.worker, options, options.seed)))
        return
    found: dict[str, list[dict[str, float]]] = {"samrag": [], "trl": []}
    for seed in range(options.repeats):
        for whose in ("samrag", "trl") if seed % 2 == 0 else ("trl", "samrag"):
            command = [sys.executable, *sys.argv, "--worker", whose, "--seed", str(seed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found[whose].append(json.loads(done.stdout.splitlines()[-1]))
            print(whose, {k: round(v, 4) for k, v in found[whose][-1].items()}, flush=True)
    speed = [a["rows_a_second"] / b["rows_a_second"] for a, b in zip(found["samrag"], found["trl"], strict=True)]
    losses = {whose: statistics.median(run["eval_loss"] for run in runs) for whose, runs in found.items()}
    print(f"rows a second, samrag / TRL: median {statistics.median(speed):.2f} ({min(speed):.2f} to {max(speed):.2f})")
    print(f"held-out loss, medians: samrag {losses['samrag']:.4f}, TRL {losses['trl']:.4f}")


if __name__ == "__main__":
    main()

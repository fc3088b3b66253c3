"""The retriever's training against FlagEmbedding's own runner: time, memory and held-out strict recall@5, paired.

    python scripts/bench/retriever_training.py --run_dir runs/quickstart

Needs a finished quickstart (its mined rows and its dev split). All start from the same MiniLM, see the same rows as
often, in batches of the same size with the same negatives, learning rate and temperature, in processes of their own.
`cached` is ours with cached gradients. The recall is taken after every step, in the tuned model as it then is, and the
time of that is left out; compared are the times until the recall that FlagEmbedding ends with is first reached, and the
processes' peaks of memory, as a whole and above what they had before training. FlagEmbedding pads each batch to its
longest text and keeps all activations.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("flagembedding", "samrag", "cached")


def work(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; returns seconds, MB, and seconds and strict recall@5 after each step."""
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers import TrainerCallback, set_seed

    from samrag.files import read_records, write_records
    from samrag.retrieval.embedder import Embedder
    from samrag.schema import Document, Question, RetrieverRow
    from samrag.training import flagembedding, retriever
    from samrag.training.retrieval_evaluation import HeldOutEvaluator
    from samrag.training.retriever_arguments import RetrieverArguments

    set_seed(options.seed)
    embedder = Embedder.load("quickstart", num_threads=options.num_threads, device="cpu")
    embedder.model.max_seq_length = options.max_length
    rows = retriever.load_rows(options.run_dir / "mined" / "retriever.jsonl")
    rows = rows.select(range(min(options.num_rows, len(rows))))
    dev = options.run_dir / "data" / "dev"
    texts = {d.doc_id: d.retrieval_text for d in read_records(dev / "documents.captioned.jsonl", Document)}
    with tempfile.TemporaryDirectory() as scratch:
        held_out = [
            RetrieverRow(
                query=question.question, pos=tuple(texts[i] for i in question.support_ids), neg=tuple(texts.values())
            )
            for question in read_records(dev / "questions.jsonl", Question)
        ]
        write_records(Path(scratch) / "held_out.jsonl", held_out)
        evaluator = HeldOutEvaluator(retriever.load_rows(Path(scratch) / "held_out.jsonl"), batch_size=8)
        curve: list[tuple[float, float]] = []
        watched_s = 0.0

        class Watch(TrainerCallback):  # type: ignore[misc]
            """Takes the recall after each step, and the time that takes."""

            def on_step_end(self, *given: Any, model: Any, **more: Any) -> None:
                nonlocal watched_s
                since = time.perf_counter()
                if way == "flagembedding":  # it trains a copy of its own
                    embedder.model[0].model.load_state_dict(model.model.state_dict())
                curve.append((since - begun - watched_s, evaluator(embedder.model)["strict_recall@5"]))
                model.train()
                watched_s += time.perf_counter() - since

        settings = SentenceTransformerTrainingArguments(
            output_dir=scratch, num_train_epochs=options.epochs, per_device_train_batch_size=options.batch_size,
            learning_rate=1e-4, warmup_steps=0.1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
            logging_strategy="no", seed=options.seed, dataloader_drop_last=True,
        )  # fmt: skip
        arguments = RetrieverArguments(
            "quickstart", "rows", num_negatives=options.num_negatives, max_length=options.max_length,
            cache_gradients=way == "cached", max_chunk_tokens=options.max_chunk_tokens,
            trainer="flagembedding" if way == "flagembedding" else "samrag",
        )  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        begun = time.perf_counter()
        if way == "flagembedding":
            flagembedding.train(embedder, rows, arguments, settings, [Watch()])
        else:
            retriever.build_trainer(embedder.model, settings, rows, arguments, callbacks=[Watch()]).train()
        taken_s = time.perf_counter() - begun - watched_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": taken_s, "peak_mb": peak, "added_mb": peak - before, "curve": curve}


def reached_s(curve: list[tuple[float, float]], recall: float) -> float:
    """Seconds until a recall; infinity if it is not reached."""
    return next((seconds for seconds, value in curve if value >= recall), float("inf"))


def main() -> None:
    """Alternate the ways, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--num_rows", type=int, default=10**9)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--num_negatives", type=int, default=7)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--max_chunk_tokens", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", choices=WAYS, help="used by the script itself")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.worker, options)))
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for seed in range(options.seed, options.seed + options.repeats):
        for way in WAYS if seed % 2 == 0 else WAYS[::-1]:
            command = [sys.executable, *sys.argv, "--worker", way, "--seed", str(seed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
            shown = {name: round(found[way][-1][name], 1) for name in ("seconds", "peak_mb", "added_mb")}
            print(f"{way:<14}", shown, "recall", [round(value, 3) for _, value in found[way][-1]["curve"]], flush=True)
        wanted = found["flagembedding"][-1]["curve"][-1][1]
        for way in WAYS:
            found[way][-1]["seconds_to_recall"] = reached_s(found[way][-1]["curve"], wanted)
    for way in WAYS[1:]:
        for name in ("seconds_to_recall", "seconds", "peak_mb", "added_mb"):
            ratios = [a[name] / b[name] for a, b in zip(found[way], found["flagembedding"], strict=True)]
            print(f"{way} / flagembedding, {name}: median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()

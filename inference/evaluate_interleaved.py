"""Score interleaved answers: python inference/evaluate_interleaved.py --config configs/evaluate_interleaved.yaml.

Takes model outputs and RAG-IGBench's rows, scores them in the three modes (samrag/metrics/interleaved.py), and writes
metrics.json, tables.md, and the scores of each answer in samples/<system>.<mode>.jsonl. Without a text encoder there
is no alignment, without an image encoder no CLIP, and without either no mean.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from samrag.config import parse, run
from samrag.report.arguments import InterleavedEvaluationArguments

if TYPE_CHECKING:
    from samrag.schema import InterleavedQuestion

log = logging.getLogger(__name__)


def evaluate(arguments: InterleavedEvaluationArguments) -> None:
    """Read, score, write, show."""
    from rich.console import Console

    from samrag.benchmarks.rag_igbench import read_outputs, read_questions, samples_of
    from samrag.files import write_json, write_records, write_text
    from samrag.metrics.interleaved import Mode
    from samrag.metrics.rag_igbench import score_samples, summarize
    from samrag.provenance import write_run_record
    from samrag.report import interleaved_scores, tables
    from samrag.retrieval.clip import ClipEncoder
    from samrag.retrieval.embedder import Embedder

    folder, data = Path(arguments.output_dir), Path(arguments.data_file)
    questions = read_questions(data, arguments.language, arguments.split)
    left_out = _without_images(questions, arguments)
    paths = arguments.paths
    outputs = {system: read_outputs(path) for system, path in paths.items()}
    kept = [question for question in questions if question.question_id not in left_out]
    texts = Embedder.load(arguments.text_encoder) if arguments.text_encoder else None
    images = None
    if arguments.image_encoder and arguments.image_root:
        images = ClipEncoder.load(Path(arguments.image_encoder), Path(arguments.image_root), arguments.batch_size)

    scores = {}
    for system, answers in outputs.items():
        samples = samples_of(kept, {i: answer for i, answer in answers.items() if i not in left_out})
        for mode in Mode:
            encode = texts.encode_documents if texts else None
            scores[system, mode] = score_samples(samples, mode, encode, images)
            write_records(folder / "samples" / f"{system}.{mode}.jsonl", scores[system, mode])
    summaries = {
        system: {mode: summarize(scores[system, mode], arguments.level, arguments.seed) for mode in Mode}
        for system in outputs
    }
    strict = {system: scores[system, Mode.STRICT] for system in outputs}
    comparisons = interleaved_scores.compared(strict, arguments.seed)
    metrics = {
        "level": arguments.level,
        "left_out": left_out,
        "systems": {
            system: {mode: interleaved_scores.summary_json(summary) for mode, summary in by_mode.items()}
            for system, by_mode in summaries.items()
        },
        "comparisons": comparisons,
    }
    write_json(folder / "metrics.json", metrics)
    shown = interleaved_scores.score_tables(summaries, comparisons)
    write_text(folder / "tables.md", "\n".join(tables.to_markdown(table) for table in shown))
    write_run_record(folder, [arguments], [data, *paths.values()], arguments.seed)
    console = Console()
    for table in shown:
        if not table.name.endswith("_categories"):
            console.print(tables.to_rich(table))
    console.print(f"tables: {folder / 'tables.md'}", soft_wrap=True, markup=False, highlight=False)


def _without_images(questions: list[InterleavedQuestion], arguments: InterleavedEvaluationArguments) -> dict[str, str]:
    """Ids of questions that CLIP cannot score, since an image of theirs was never fetched, with that image.

    Raises:
        UserError: there are such questions and they are not to be left out, or no other question is left.
    """
    from samrag.errors import UserError
    from samrag.files import within

    if not (arguments.image_encoder and arguments.image_root):
        return {}
    root = Path(arguments.image_root)
    missing = {
        question.question_id: image.image
        for question in questions
        for image in question.images
        if image.image and not within(root, image.image).is_file()
    }
    if missing and (arguments.missing_images == "error" or len(missing) == len(questions)):
        first, image = next(iter(missing.items()))
        raise UserError(
            f"{len(missing)} of {len(questions)} questions lack an image in {root} (question {first!r}: {image}); fetch"
            " them by data_gen/download_images.py, leave such questions out by missing_images: leave_out, or leave"
            " out the image encoder."
        )
    if missing:
        log.warning("%d of %d questions are left out: images of theirs are missing", len(missing), len(questions))
    return missing


def main() -> None:
    """Parse the configuration, then evaluate."""
    evaluate(*parse(InterleavedEvaluationArguments))


if __name__ == "__main__":
    run(main)

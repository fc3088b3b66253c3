"""How fast the adaptive loop answers, step by step from the published shape to ours, on one model and one ranking.

    python scripts/bench/loop.py --run_dir runs/quickstart

Needs a finished quickstart. The published shape asks one call at a time and draws each answer five times; it and our
own sequential schedule answer the first questions only, all others answer all. Prints questions a second (median of the
rounds, which take turns), EM, calls and tokens kind by kind. Exits with status 1 when a trace of the lockstep differs
from the sequential schedule's in anything, calls and tokens included.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from samrag.answering import Method, depth, looked_up, open_index
from samrag.arguments import LoopArguments
from samrag.calls import Call, Completion
from samrag.engines.base import Engine
from samrag.engines.local import LocalBackend
from samrag.files import read_records
from samrag.metrics.answers import mmqa_list_em
from samrag.programs.verdicts import VerdictMode
from samrag.prompts import PromptStyle
from samrag.schedule import Completer, Schedule, gather
from samrag.schema import Document, Question, Trace, Usage

NUM_VOTES = 5
"""Answers that the published loop draws a time; all are greedy, so they are alike."""
ALMOST_GREEDY = 1e-4
"""Its temperature here, since greedy votes are refused as the waste they are."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the loop."""

    name: str
    schedule: Schedule
    loop: LoopArguments
    num_questions: int


class Counting:
    """An engine that sums usage by kind."""

    def __init__(self, engine: Completer) -> None:
        self.engine = engine
        self.by_kind: dict[str, Usage] = defaultdict(Usage)

    async def complete(self, calls: Sequence[Call]) -> list[Completion]:
        """Pass on, and count."""
        completions = await self.engine.complete(calls)
        for call, completion in zip(calls, completions, strict=True):
            self.by_kind[str(call.kind) + " (direct)" * call.direct] += completion.usage
        return completions


async def compare(options: argparse.Namespace) -> bool:
    """Run the rounds and print; whether lockstep and sequential traces are equal."""
    run_dir: Path = options.run_dir
    documents = read_records(run_dir / "data/dev/documents.captioned.jsonl", Document)
    questions = read_records(run_dir / "data/dev/questions.jsonl", Question)[: options.num_questions]
    base = LoopArguments(max_batches=2, max_tokens=192)
    index, vectors = open_index(questions, documents, run_dir / "index_dev_tuned", str(run_dir / "retriever"))
    rankings = looked_up(index.search(vectors, depth(base)), documents)
    backend = LocalBackend.load(
        options.model_path,
        image_root=run_dir / "world/final_dataset_images",
        adapter=run_dir / "student",
        num_threads=options.num_threads,
        max_batch=options.max_batch,
        batch_tokens=options.batch_tokens,
    )

    async def answer(variant: Variant) -> tuple[list[Trace], float, dict[str, Usage]]:
        counting = Counting(Engine(backend, PromptStyle.STUDENT))
        pairs = list(zip(questions, rankings, strict=True))[: variant.num_questions]
        programs = [Method("sam_rag").program(*pair, variant.loop) for pair in pairs]
        begun = time.perf_counter()
        results = await gather(programs, counting, variant.schedule)
        traces = [dataclasses.replace(result.value, usage=result.usage) for result in results]
        return traces, time.perf_counter() - begun, counting.by_kind

    votes = dataclasses.replace(base, num_votes=NUM_VOTES, vote_temperature=ALMOST_GREEDY)
    direct = dataclasses.replace(base, verdict_mode=VerdictMode.DIRECT)
    variants = [
        Variant("published shape", Schedule.SEQUENTIAL, votes, options.num_sequential),
        Variant("sequential", Schedule.SEQUENTIAL, base, options.num_sequential),
        Variant("lockstep", Schedule.LOCKSTEP, base, len(questions)),
        Variant("lockstep, direct", Schedule.LOCKSTEP, direct, len(questions)),
    ]
    await answer(dataclasses.replace(variants[2], num_questions=4))  # the first pass reads weights and images
    rates: dict[str, list[float]] = defaultdict(list)
    traces: dict[str, list[Trace]] = {}
    usages: dict[str, dict[str, Usage]] = {}
    for _ in range(options.rounds):
        for variant in variants:
            traces[variant.name], seconds, usages[variant.name] = await answer(variant)
            rates[variant.name].append(variant.num_questions / seconds)
    await backend.close()

    slowest = statistics.median(rates["published shape"])
    print(f"{'':<20}{'questions':>10}{'questions/s':>13}{'times':>8}{'EM':>8}")
    for variant in variants:
        rate, own = statistics.median(rates[variant.name]), traces[variant.name]
        ems = [mmqa_list_em(t.answers, q.answers) if t.answers else 0.0 for t, q in zip(own, questions, strict=False)]
        em = 100 * statistics.fmean(ems)
        print(f"{variant.name:<20}{variant.num_questions:>10}{rate:>13.2f}{rate / slowest:>8.1f}{em:>8.1f}")
    print(f"\n{'a question':<20}{'kind':<24}{'calls':>8}{'tokens in':>12}{'tokens out':>12}")
    for variant in variants:
        for kind, usage in sorted(usages[variant.name].items()):
            means = [v / variant.num_questions for v in (usage.calls, usage.input_tokens, usage.output_tokens)]
            print(f"{variant.name:<20}{kind:<24}{means[0]:>8.2f}{means[1]:>12.0f}{means[2]:>12.0f}")
    same = traces["sequential"] == traces["lockstep"][: options.num_sequential]
    print(f"\nlockstep and sequential, call for call: {'equal' if same else 'DIFFERENT'}")
    return same


def main() -> int:
    """Parse and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--model_path", default="samrag/miniworld/tiny_llava_base")
    parser.add_argument("--num_questions", type=int, default=200)
    parser.add_argument("--num_sequential", type=int, default=20, help="questions of the sequential schedules")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--max_batch", type=int, default=64)
    parser.add_argument("--batch_tokens", type=int, default=32768)
    options = parser.parse_args()
    torch.set_num_threads(options.num_threads)
    return int(not asyncio.run(compare(options)))


if __name__ == "__main__":
    sys.exit(main())

"""How many of a teacher's wrong replies the filters catch, and how many of its right ones they keep.

    python scripts/bench/filter_yield.py --run_dir runs/quickstart --error_rate 0.3

Needs the mini world's prepared training data (scripts/quickstart.sh writes it). The teacher is the simulated one, asked
without a server; the truth is the oracle's reply to the same call, on what the documents truly say. Calls by which a
filter itself asks back are no items and are not counted. A caption is wrong when it misstates what was asked for.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from samrag.calls import Answer, Call, CallKind, Caption, Judgement, Passage, Reply
from samrag.miniworld import oracle
from samrag.miniworld.dataset import read_truth
from samrag.miniworld.language import EMBLEM, club_text, describe, founder_text
from samrag.miniworld.teacher import Teacher
from samrag.miniworld.trial import bm25_materials, follow, recipe
from samrag.miniworld.world import Club
from samrag.programs.steps import spoken
from samrag.replies import parse, write


def is_right(call: Call, reply: Reply, true_text: dict[str, str], teacher: Teacher, gold: str) -> bool:
    """Whether a reply is what the oracle says, given what the documents truly say."""
    passages = tuple(Passage(p.title, true_text[p.title]) for p in call.passages)
    emblem = teacher.emblems.get(call.title)
    right = oracle.reply(call.kind, call.question, passages, call.title, emblem, call.answer)
    truth = parse(call.kind, write(right.reasoning, right.response))
    if isinstance(reply, Judgement) and isinstance(truth, Judgement):
        return reply.verdict is truth.verdict
    if isinstance(reply, Answer) and isinstance(truth, Answer):
        return reply.values == truth.values
    return isinstance(reply, Caption) and f" is {gold}" in reply.text


def true_texts(clubs: Sequence[Club]) -> dict[str, str]:
    """What every document truly says, by title; an image by its full description."""
    return {
        title: text
        for club in clubs
        for title, text in (
            (club.name, club_text(club)),
            (club.name + EMBLEM, describe(club.emblem)),
            (club.founder.name, founder_text(club)),
        )
    }


def main() -> None:
    """Run the recipe over the training questions and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--error_rate", type=float, default=0.3)
    parser.add_argument("--max_questions", type=int, default=None)
    options = parser.parse_args()

    clubs = read_truth(options.run_dir / "world")
    teacher = Teacher(clubs, options.error_rate)
    arguments = recipe()
    materials = bm25_materials(options.run_dir, arguments, options.max_questions)
    true_text = true_texts(clubs)

    counts: Counter[tuple[CallKind, bool, bool]] = Counter()
    for material in materials:
        result, items = follow(material, teacher, arguments)
        kept = {(passed.call, passed.reply) for passed in result.passed}
        for call, reply in items:
            if isinstance(reply, (Judgement, Answer, Caption)):
                right = is_right(call, reply, true_text, teacher, spoken(material.question.answers))
                counts[call.kind, right, (call, reply) in kept] += 1

    print(f"{len(materials)} questions, error rate {options.error_rate}")
    print(f"{'kind':<16}{'wrong':>8}{'caught, %':>11}{'right':>8}{'kept, %':>10}")
    for kind in [*sorted({kind for kind, _, _ in counts}), None]:
        cells = {key[1:]: 0 for key in [(0, r, k) for r in (True, False) for k in (True, False)]}
        for (one, right, is_kept), count in counts.items():
            cells[right, is_kept] += count if kind in (one, None) else 0
        wrong, right_ones = cells[False, True] + cells[False, False], cells[True, True] + cells[True, False]
        caught, kept_share = 100 * cells[False, False] / max(1, wrong), 100 * cells[True, True] / max(1, right_ones)
        print(f"{kind or 'all':<16}{wrong:>8}{caught:>11.1f}{right_ones:>8}{kept_share:>10.1f}")


if __name__ == "__main__":
    main()

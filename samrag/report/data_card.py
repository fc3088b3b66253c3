"""The page beside a set of teacher data: what is in it, what was refused and why, how it was made, what it took.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from samrag.arguments import DistillArguments, TeacherArguments
from samrag.prompts import PromptStyle, style_hash
from samrag.schema import DroppedItem, SftRow, Usage

SWITCHES = {
    "num_samples": "draws per item until one passes its filter",
    "temperature": "the teacher's",
    "bridge_positives": "supports without the answer are positives: is_rel True, is_sup Partial",
    "multi_document": "contexts as inference has them: all positives True, some of them Partial, none of them False",
    "wrong_answers": "answers of other questions that is_use and is_sup must refuse, per question",
    "wrong_forms": "the right answer in a form that nobody asked for, which is_use must refuse",
    "refusals": 'contexts without the answer, where the right reply is "not stated"',
    "direct_verdicts": "beside each reasoned verdict, a row with the verdict alone",
    "negatives_top": "negatives are drawn from this many best-ranked non-supports",
    "negatives_per_positive": "negatives per positive",
    "min_f1": "least official list F1 of an answer with gold; 1 is exact match",
    "max_class_ratio": "of each kind, no class is larger than so many times the smallest",
    "max_per_kind": "rows per kind at most",
    "seed": "of every draw",
}
"""What each switch of the recipe does, in the order of the card."""


_NUMBERS = ("rows", "items", "kept", "dropped", "kept, %", "replies refused", "of replies, %")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    rule = "|" + "|".join("---:" if name in _NUMBERS else "---" for name in head)
    body = ["| " + " | ".join(f"{v:,}" if type(v) is int else str(v) for v in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", rule + "|", *body, ""]


def data_card(
    rows: Sequence[SftRow],
    num_passed: Counter[str],
    dropped: Sequence[DroppedItem],
    refused: Mapping[tuple[str, str], int],
    usage: Usage,
    arguments: DistillArguments,
    teacher: TeacherArguments,
    num_questions: int,
    cost: str = "",
) -> str:
    """The card as Markdown.

    Args:
        rows: the set.
        num_passed: items that passed their filters, by kind, before balance and caps.
        dropped: items that did not.
        refused: replies that did not pass, by kind and reason; an item may take several until one passes.
        usage: what the calls took, stored ones included.
        arguments: the recipe's switches.
        teacher: who was asked.
        num_questions: questions the recipe was applied to.
        cost: what was paid, in words; empty when there is no price.
    """
    reasons = Counter((item.kind, item.reason) for item in dropped)
    num_dropped = Counter(item.kind for item in dropped)
    num_refused: Counter[str] = Counter()
    for (kind, _), count in refused.items():
        num_refused[kind] += count
    kinds = sorted(num_passed | num_dropped)
    made = Counter(
        (row.kind, row.label, "direct" if row.direct else "reasoned", "image" if row.images else "text") for row in rows
    )
    lines = [
        "# Teacher data",
        "",
        f"{len(rows):,} rows from {num_questions:,} questions. Every verdict and answer agrees with the gold labels; a"
        " failed call is never a label. What a filter cannot see: reasoning that is wrong and ends right.",
        "",
        "## Yield by filter",
        "",
        *_table(
            ("kind", "kept", "dropped", "kept, %", "replies refused", "of replies, %"),
            (
                (
                    kind,
                    num_passed[kind],
                    num_dropped[kind],
                    f"{100 * num_passed[kind] / total:.1f}",
                    num_refused[kind],
                    f"{100 * num_refused[kind] / max(1, num_passed[kind] + num_refused[kind]):.1f}",
                )
                for kind in kinds
                if (total := num_passed[kind] + num_dropped[kind])
            ),
        ),
        "An item is drawn until a reply passes, `num_samples` times at most. Replies refused, by reason:",
        "",
        *_table(("kind", "reason", "items"), ((*key, count) for key, count in sorted(refused.items()))),
        "Dropped, each item with its reason in `dropped.jsonl`; what had no usable reply also in `quarantine.jsonl`:",
        "",
        *_table(("kind", "reason", "items"), ((*key, count) for key, count in sorted(reasons.items()))),
        "## Rows",
        "",
        *_table(("kind", "label", "form", "modality", "rows"), ((*key, count) for key, count in sorted(made.items()))),
        "## Recipe",
        "",
        *_table(
            ("switch", "value", "what it does"),
            ((f"`{name}`", getattr(arguments, name), text) for name, text in SWITCHES.items()),
        ),
        "## Origin",
        "",
        *_table(
            ("", ""),
            (
                ("teacher", f"`{teacher.teacher_model}`"),
                ("teacher templates", f"`{style_hash(PromptStyle.TEACHER)}`"),
                ("student templates", f"`{style_hash(PromptStyle.STUDENT)}`"),
                ("licence of questions and documents", arguments.data_licence),
                ("calls", f"{usage.calls:,}, of them {usage.failures:,} without a usable reply"),
                ("tokens", f"{usage.input_tokens:,} in, {usage.output_tokens:,} out"),
                *((("cost", cost),) if cost else ()),
            ),
        ),
    ]
    return "\n".join(lines)

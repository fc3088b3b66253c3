"""A trace in the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from samrag.programs.steps import spoken
from samrag.schema import Document, Draft, Trace, Verdict

_COLOURS = {Verdict.TRUE: "green", Verdict.PARTIAL: "yellow", Verdict.FALSE: "red"}


def _verdict(verdict: Verdict | None, failure: str = "") -> Text:
    if verdict is None:
        return Text(failure or "-", style="magenta" if failure else "dim")
    return Text(str(verdict), style=_COLOURS[verdict])


def show_trace(console: Console, question: str, trace: Trace, documents: Mapping[str, Document]) -> None:
    """Print documents with verdicts, drafts with verdicts, and the answer with its evidence."""
    console.print(Text(question, style="bold"))
    judge = "score" if any(item.score is not None for item in trace.documents) else "is_rel"
    seen = Table("batch", "document", "kind", judge, "reasoning", title="Documents examined", title_justify="left")
    for item in trace.documents:
        document = documents[item.doc_id]
        kept = "bold" if item.kept else "dim"
        seen.add_row(
            str(item.batch),
            Text(document.title, style=kept),
            str(document.modality),
            _verdict(item.verdict, item.failure) if item.score is None else Text(f"{item.score:.2f}"),
            Text(item.reasoning),
        )
    console.print(seen)
    if trace.drafts:
        console.print(_drafts(trace.drafts))
    answer = spoken(trace.answers) or "(no answer that the evidence supports)"
    trust = "" if trace.confidence is None else f", confidence {trace.confidence:.2f}"
    console.print(
        Text(f"{answer}  [{trace.exit_reason}{trust}]", style="bold green" if trace.answers else "bold yellow")
    )
    for doc_id in trace.context_ids if trace.answers else ():
        console.print(Text(f"  evidence: {documents[doc_id].title}"))
    usage = trace.usage
    console.print(
        Text(f"{usage.calls} calls, {usage.input_tokens:,} tokens in, {usage.output_tokens:,} out", style="dim")
    )


def _drafts(drafts: tuple[Draft, ...]) -> Table:
    refined = any(draft.accepted is not None for draft in drafts)
    checks = ("looked for", "confidence") if refined else ("is_use", "is_sup")
    table = Table("round" if refined else "batch", "draft", *checks, "reasoning", title="Drafts", title_justify="left")
    for draft in drafts:
        said = spoken(draft.answers) or (f"failed: {draft.failure}" if draft.failure else "not stated")
        cells = _refinement(draft) if refined else (_verdict(draft.is_use), _verdict(draft.is_sup))
        table.add_row(str(draft.batch), Text(said), *cells, Text(draft.reasoning))
    return table


def _refinement(draft: Draft) -> tuple[Text, Text]:
    """What the evidence was chosen for, and the confidence it led to."""
    confidence = "-" if draft.confidence is None else f"{draft.confidence:.2f}"
    colour = "green" if draft.accepted else "red"
    return Text(draft.facet or "-"), Text(f"{confidence} {'' if draft.accepted else 'rejected'}".strip(), style=colour)

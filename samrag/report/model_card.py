"""The card of a tuned student: what it was tuned from, on what, how it scored, and how to run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_card(facts: Mapping[str, Any], data_licence: str = "not stated") -> str:
    """Markdown with the hub's front matter.

    Args:
        facts: the trained folder's `samrag.json`.
        data_licence: of the training data's inputs.
    """
    training = facts["training"]
    rows = [
        f"| {kind} | {label} | {count:,} |"
        for kind, labels in sorted(training["rows"].items())
        for label, count in sorted(labels.items())
    ]
    scores = training.get("scores") or {}
    teachers = ", ".join(f"`{name}`" for name in training.get("teachers", [])) or "not stated"
    library = "peft" if facts["tuning"] == "lora" else "transformers"
    front = [
        "---",
        f"base_model: {facts['base_model']}",
        f"library_name: {library}",
        "pipeline_tag: image-text-to-text",
        "tags: [samrag, multimodal-rag, self-verification]",
        "---",
    ]
    body = [
        "# A student of samrag",
        "",
        "Judges whether documents are relevant, answers from those it kept, and judges whether the answer is useful"
        " and supported, as SAM-RAG does. It replies in JSON with its reasoning first.",
        "",
        f"- Base: `{facts['base_model']}` (fingerprint `{facts['base_fingerprint']}`), tuning: {facts['tuning']}.",
        f"- Teacher of its training replies: {teachers}; licence of the inputs: {data_licence}.",
        f"- Chat template `{facts['chat_template']}`, images by {facts['image_processor']}.",
        "- Prompt templates: " + ", ".join(f"{kind} `{value}`" for kind, value in facts["templates"].items()) + ".",
        "",
        "## Training rows",
        "",
        "| kind | label | rows |",
        "|---|---|---:|",
        *rows,
        "",
        f"{training['num_tokens']:,} tokens a pass; the longest row has {training['longest']:,}.",
    ]
    if scores:
        body += ["", "## Scores on held-out rows", "", "| score | value |", "|---|---:|"]
        body += [f"| {name} | {value:.3f} |" for name, value in sorted(scores.items())]
    body += [
        "",
        "## Use",
        "",
        "Run it with samrag (`inference/answer.py --model_path <base> --adapter <this folder>`), which checks that the"
        " prompts are those of the training. Its verdicts and answers can be wrong, the more so on other sorts of"
        " documents than those it was tuned on.",
        "",
    ]
    return "\n".join([*front, *body])

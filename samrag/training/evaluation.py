"""A student's own replies on held-out rows while it is trained: can they be read, do they end, are they right.

The evaluation loss says none of that, since it is measured with the teacher's words before each token. Probabilities of
verdicts are those of the verdict's tokens after the reasoning that the student wrote, renormalised over the verdicts
that the kind has.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from samrag.calls import JUDGEMENTS, Answer, CallKind, Failure, Judgement
from samrag.metrics.answers import mmqa_list_em, mmqa_list_f1
from samrag.metrics.calibration import auroc, expected_calibration_error
from samrag.replies import parse, write
from samrag.schema import ChatMessage, SftRow
from samrag.training.collator import padded, read_picture
from samrag.vlm import ChatProcessor, Picture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MORE_ROOM = 1.5  # a reply may be so much longer than the longest target


@dataclass(frozen=True, slots=True)
class Scored:
    """What a student replied to a held-out row."""

    kind: str
    direct: bool
    question_id: str
    prompt: str
    images: tuple[str, ...]
    wanted: str
    reply: str
    stopped: bool
    """The stop token came before the room was used up."""
    parsed: bool
    correct: bool | None
    """The verdict or the answer is the wanted one; None for kinds that have neither."""
    f1: float | None
    """Of an answer's list of values."""
    confidence: float | None
    """Probability of the verdict given, among those the kind has; None without a verdict."""
    verdict: str | None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A row made ready."""

    row: SftRow
    paths: tuple[Path, ...]
    prompt: list[int]
    """Token ids of the open prompt."""
    target: list[int]


@torch.no_grad()
def generate(
    model: PreTrainedModel, chat: ChatProcessor, rows: Sequence[HeldOut], batch_size: int
) -> list[tuple[str, bool]]:
    """Greedy replies as text, and whether each came to its stop token.

    Args:
        model: base with its adapter, or a tuned model.
        chat: its processor, with the template of training.
        rows: what to reply to.
        batch_size: rows at once.
    """
    room = math.ceil(_MORE_ROOM * max(len(row.target) for row in rows)) + 8
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].prompt))
    replies: dict[int, tuple[str, bool]] = {}
    was_training, ends = model.training, [chat.stop_token_id]
    model.eval()
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        ids, mask = padded([rows[i].prompt for i in part], chat.pad_token_id, left=True)
        pictures = [read_picture(chat, path) for i in part for path in rows[i].paths]
        output = model.generate(
            **_on_device(chat.inputs(ids, mask, pictures), model), max_new_tokens=room, do_sample=False, num_beams=1,
            eos_token_id=ends, pad_token_id=chat.pad_token_id, use_cache=True,
        )  # fmt: skip
        for i, tokens in zip(part, output[:, ids.shape[1] :].tolist(), strict=True):
            stop = next((place for place, token in enumerate(tokens) if token in ends), None)
            replies[i] = (chat.decode(tokens[:stop]), stop is not None)
    model.train(was_training)
    return [replies[i] for i in range(len(rows))]


@torch.no_grad()
def verdict_probabilities(
    model: PreTrainedModel,
    chat: ChatProcessor,
    prompts: Sequence[tuple[list[int], Sequence[Picture]]],
    replies: Sequence[Sequence[list[int]]],
    batch_size: int,
) -> list[list[float]]:
    """For each prompt, probabilities of its alternative replies (token ids) among one another.

    Args:
        model: as for `generate`.
        chat: likewise.
        prompts: token ids of the open prompts, with their pictures.
        replies: of each, the alternatives; they mostly share their beginning.
        batch_size: sequences at once.
    """
    flat = [(i, j) for i, own in enumerate(replies) for j in range(len(own))]
    scores: dict[tuple[int, int], float] = {}
    was_training = model.training
    model.eval()
    for start in range(0, len(flat), batch_size):
        part = flat[start : start + batch_size]
        rows = [prompts[i][0] + replies[i][j] for i, j in part]
        ids, mask = padded(rows, chat.pad_token_id)
        pictures = [picture for i, _ in part for picture in prompts[i][1]]
        logits = model(**_on_device(chat.inputs(ids, mask, pictures), model)).logits
        for (i, j), row, own in zip(part, rows, logits, strict=True):
            begin = len(prompts[i][0])
            chosen = torch.tensor(row[begin:], device=own.device)
            logs = own[begin - 1 : len(row) - 1].float().log_softmax(-1)
            scores[i, j] = float(logs.gather(1, chosen[:, None]).sum())
    model.train(was_training)
    return [torch.tensor([scores[i, j] for j in range(len(own))]).softmax(-1).tolist() for i, own in enumerate(replies)]


def score(model: PreTrainedModel, chat: ChatProcessor, rows: Sequence[HeldOut], batch_size: int) -> list[Scored]:
    """Generate the replies to held-out rows, and judge each against its target."""
    if not rows:
        return []
    replies = generate(model, chat, rows, batch_size)
    parsed = [parse(CallKind(item.row.kind), text) for item, (text, _) in zip(rows, replies, strict=True)]
    judged = [i for i, reply in enumerate(parsed) if isinstance(reply, Judgement)]
    alternatives = [_alternatives(rows[i].row, parsed[i]) for i in judged]
    prompts = [(rows[i].prompt, [read_picture(chat, path) for path in rows[i].paths]) for i in judged]
    found = verdict_probabilities(model, chat, prompts, [chat.encode_replies(own) for own in alternatives], batch_size)
    confidence = {
        i: dict(zip(JUDGEMENTS[CallKind(rows[i].row.kind)], own, strict=True))
        for i, own in zip(judged, found, strict=True)
    }
    scored = []
    for i, (item, (text, stopped), reply) in enumerate(zip(rows, replies, parsed, strict=True)):
        row = item.row
        wanted = parse(CallKind(row.kind), row.messages[-1].content)
        correct, f1, verdict = None, None, None
        if isinstance(wanted, Judgement):
            correct = isinstance(reply, Judgement) and reply.verdict is wanted.verdict
            verdict = str(reply.verdict) if isinstance(reply, Judgement) else None
        elif isinstance(wanted, Answer):
            given = list(reply.values) if isinstance(reply, Answer) else []
            correct, f1 = mmqa_list_em(given, wanted.values) == 1.0, mmqa_list_f1(given, wanted.values)
        stated = confidence[i][reply.verdict] if isinstance(reply, Judgement) else None
        scored.append(
            Scored(
                row.kind, row.direct, row.question_id, row.messages[0].content, row.images, row.messages[-1].content,
                text, stopped, not isinstance(reply, Failure), correct, f1, stated, verdict,
            )
        )  # fmt: skip
    return scored


def _alternatives(row: SftRow, reply: object) -> list[tuple[ChatMessage, ...]]:
    """The row's chat with the student's own reasoning and each verdict of the kind."""
    assert isinstance(reply, Judgement)
    reasoning = "" if row.direct else reply.reasoning
    return [
        (*row.messages[:-1], ChatMessage("assistant", write(reasoning, verdict)))
        for verdict in JUDGEMENTS[CallKind(row.kind)]
    ]


def summary(scored: Sequence[Scored]) -> dict[str, float]:
    """Scores in all and by kind; verdicts given directly, without reasoning, are a kind of their own.

    `parse_rate`, `stop_rate`; for verdicts `accuracy` (a reply that cannot be read is wrong), macro `f1`, `ece` and
    `auroc` of their probabilities; for answers `em` and `f1` of the list.
    """
    groups: dict[str, list[Scored]] = defaultdict(list)
    for item in scored:
        groups[item.kind + "_direct" * item.direct].append(item)
    scores: dict[str, float] = {}
    for name, group in [("all", list(scored)), *sorted(groups.items())]:
        if not group:
            continue
        prefix = "" if name == "all" else f"{name}_"
        scores[f"{prefix}parse_rate"] = sum(item.parsed for item in group) / len(group)
        scores[f"{prefix}stop_rate"] = sum(item.stopped for item in group) / len(group)
        judged = [item for item in group if CallKind(item.kind) in JUDGEMENTS]
        if judged:
            scores |= {f"{prefix}{key}": value for key, value in _verdict_scores(judged).items()}
        answers = [item for item in group if item.f1 is not None]
        if answers and prefix:
            scores[f"{prefix}em"] = sum(bool(item.correct) for item in answers) / len(answers)
            scores[f"{prefix}f1"] = sum(item.f1 or 0.0 for item in answers) / len(answers)
    return scores


def _verdict_scores(judged: Sequence[Scored]) -> dict[str, float]:
    from sklearn.metrics import f1_score

    truth = [_verdict_of(item) for item in judged]
    given = [item.verdict or "unreadable" for item in judged]
    sure = [(item.confidence, bool(item.correct)) for item in judged if item.confidence is not None]
    scores = {
        "verdict_accuracy": sum(bool(item.correct) for item in judged) / len(judged),
        "verdict_f1": float(f1_score(truth, given, labels=sorted(set(truth)), average="macro", zero_division=0.0)),
    }
    if sure:
        stated, right = zip(*sure, strict=True)
        scores["ece"] = expected_calibration_error(stated, right)
        scores["auroc"] = auroc(stated, right)
    return {key: value for key, value in scores.items() if not math.isnan(value)}


def _verdict_of(item: Scored) -> str:
    wanted = parse(CallKind(item.kind), item.wanted)
    assert isinstance(wanted, Judgement)
    return str(wanted.verdict)


def write_samples(path: Path, scored: Sequence[Scored]) -> None:
    """All replies of one evaluation, one JSON line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in scored), encoding="utf-8")


def sample_table(scored: Sequence[Scored], image_roots: Mapping[str, Path], most: int = 64) -> Any:
    """A W&B table of replies with their images."""
    import wandb

    columns: list[str | int] = [
        "kind",
        "direct",
        "image",
        "prompt",
        "wanted",
        "reply",
        "correct",
        "confidence",
        "stopped",
    ]
    table = wandb.Table(columns=columns)
    for item in scored[:most]:
        image = wandb.Image(str(image_roots[item.images[0]])) if item.images else None
        table.add_data(
            item.kind, item.direct, image, item.prompt, item.wanted, item.reply, item.correct, item.confidence,
            item.stopped,
        )  # fmt: skip
    return table


def _on_device(batch: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    device, dtype = model.device, model.dtype
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in batch.items()}

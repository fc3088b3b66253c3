"""Build and pretrain the tiny LLaVA of the mini world.

    python scripts/build_tiny_llava.py --output_dir samrag/miniworld/tiny_llava_base

Two stages, as with the real LLaVA: first the vision tower alone, on emblems with labels; then, with the tower frozen,
projector and language model on repeating words, comparing names, captioning, and answering from given content. No
verdicts. The result is shipped with samrag; running this again is only needed after a change of the mini world or of
the student prompts.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from samrag.miniworld import tiny_llava
from samrag.miniworld.drawing import draw
from samrag.miniworld.pretraining import (
    MAX_PASSAGES,
    Example,
    Names,
    draw_example,
    rehearsed_compare_example,
    repeat_example,
)
from samrag.miniworld.world import COLOURS, COUNTS, SHAPES, Split, draw_emblem_facts

Lesson = Callable[[random.Random, Names], Example]
VISION_LABELS = {"background": COLOURS, "colour": COLOURS, "shape": SHAPES, "count": COUNTS}


def pretrain_vision(model: Any, processor: Any, num_steps: int, seed: int, num_images: int = 16000) -> dict[str, float]:
    """Train the vision tower so that every patch tells the whole emblem; returns accuracy on images held out.

    Linear heads read the layer that LLaVA reads, features[B, patches, D], and are thrown away afterwards.
    """
    rng = random.Random(f"vision:{seed}")
    emblems = [draw_emblem_facts(rng) for _ in range(num_images)]
    pixels = torch.cat(
        [
            processor.image_processor([draw(e) for e in emblems[i : i + 500]], return_tensors="pt")["pixel_values"]
            for i in range(0, num_images, 500)
        ]
    )
    labels = torch.tensor([[values.index(getattr(e, k)) for k, values in VISION_LABELS.items()] for e in emblems])
    tower = model.model.vision_tower
    heads = torch.nn.ModuleList(
        [torch.nn.Linear(tower.config.hidden_size, len(values)) for values in VISION_LABELS.values()]
    )
    optimizer = torch.optim.AdamW([*tower.parameters(), *heads.parameters()], lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, num_steps)
    generator = torch.Generator().manual_seed(seed)
    num_train = num_images - 1000
    for _ in range(num_steps):
        drawn = torch.randint(0, num_train, (128,), generator=generator)
        features = tower(pixel_values=pixels[drawn], output_hidden_states=True).hidden_states[-1][:, 1:]
        losses = [
            torch.nn.functional.cross_entropy(
                head(features).flatten(0, 1), labels[drawn, k].repeat_interleave(features.shape[1])
            )
            for k, head in enumerate(heads)
        ]
        loss = sum(losses, start=torch.zeros(()))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        features = tower(pixel_values=pixels[num_train:], output_hidden_states=True).hidden_states[-1][:, 1:]
        right = [head(features).mean(1).argmax(-1) == labels[num_train:, k] for k, head in enumerate(heads)]
    tower.requires_grad_(False)
    return {name: round(hits.float().mean().item(), 3) for name, hits in zip(VISION_LABELS, right, strict=True)}


class Batches:
    """Batches of equal size whose examples have similar lengths."""

    def __init__(self, processor: Any, names: Names, batch_size: int, seed: int) -> None:
        self.processor, self.names, self.batch_size = processor, names, batch_size
        self.rng = random.Random(seed)
        self.lesson: Lesson = repeat_example
        """Draws the examples of the present part of the curriculum."""

    def encode(self, example: Example) -> tuple[list[int], int, torch.Tensor | None]:
        """Token ids, where the target begins, and pixel values[3, H, W]."""
        tokenizer = self.processor.tokenizer
        prompt = example.prompt.replace("<image>", "<image>" * 16)
        head = tokenizer(f"<s>USER: {prompt}\nASSISTANT:", add_special_tokens=False)["input_ids"]
        tail = tokenizer(f" {example.target}</s>", add_special_tokens=False)["input_ids"]
        pixels = None
        if example.emblem is not None:
            pixels = self.processor.image_processor(draw(example.emblem), return_tensors="pt")["pixel_values"][0]
        return head + tail, len(head), pixels

    def collate(self, rows: list[tuple[list[int], int, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        """Pad on the right; labels on targets alone."""
        width = max(len(ids) for ids, _, _ in rows)
        pad = self.processor.tokenizer.pad_token_id
        input_ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _, _ in rows])
        labels = torch.full_like(input_ids, -100)
        for i, (ids, start, _) in enumerate(rows):
            labels[i, start : len(ids)] = input_ids[i, start : len(ids)]
        batch = {"input_ids": input_ids, "attention_mask": (input_ids != pad).long(), "labels": labels}
        images = [pixels for _, _, pixels in rows if pixels is not None]
        if images:
            batch["pixel_values"] = torch.stack(images)
        return batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            rows = [self.encode(self.lesson(self.rng, self.names)) for _ in range(8 * self.batch_size)]
            rows.sort(key=lambda row: len(row[0]))
            chunks = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
            self.rng.shuffle(chunks)
            yield from map(self.collate, chunks)


def forward(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss[N], hits[N] and row[N] over the N label tokens; logits are computed there only."""
    labels = batch["labels"][:, 1:]
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    hidden = model.model(**inputs).last_hidden_state[:, :-1]
    rows, columns = (labels != -100).nonzero(as_tuple=True)
    logits = model.lm_head(hidden[rows, columns])
    wanted = labels[rows, columns]
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted, rows


@torch.no_grad()
def exact_match(model: Any, batches: Batches, examples: list[Example]) -> dict[str, float]:
    """Share of unseen-name examples whose whole greedy reply is right, by task."""
    model.eval()
    right: dict[str, list[bool]] = defaultdict(list)
    for i in range(0, len(examples), 50):
        part = examples[i : i + 50]
        _, hits, rows = forward(model, batches.collate([batches.encode(e) for e in part]))
        wrong = set(rows[~hits].tolist())
        for j, example in enumerate(part):
            right[example.task].append(j not in wrong)
    model.train()
    return {task: round(sum(values) / len(values), 3) for task, values in sorted(right.items())}


def lesson(step: int, args: argparse.Namespace) -> Lesson:
    """The curriculum: copy words, compare names, then read one document, and more of them bit by bit."""
    first = args.num_repeat_steps + args.num_compare_steps
    if step <= first:
        return repeat_example if step <= args.num_repeat_steps else rehearsed_compare_example
    share = (step - first) / max(1, args.num_steps - first)
    return functools.partial(draw_example, max_passages=1 + int((MAX_PASSAGES - 1) * min(1.0, 2 * share)))


def main() -> None:
    """Build the tokenizer, pretrain, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--num_vision_steps", type=int, default=1500)
    parser.add_argument("--num_repeat_steps", type=int, default=700)
    parser.add_argument("--num_compare_steps", type=int, default=500)
    parser.add_argument("--num_steps", type=int, default=4700)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log_every", type=int, default=100)
    args = parser.parse_args()

    torch.set_num_threads(args.num_threads)
    tokenizer = tiny_llava.build_tokenizer(seed=args.seed)
    processor = tiny_llava.build_processor(tokenizer)
    model = tiny_llava.build_model(tokenizer, args.hidden, args.num_layers, args.seed)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(tokenizer)} tokens", flush=True)

    vision = pretrain_vision(model, processor, args.num_vision_steps, args.seed)
    print(json.dumps({"vision_accuracy": vision}), flush=True)
    batches = Batches(processor, Names.of(Split.PRETRAIN), args.batch_size, args.seed)
    rng = random.Random(args.seed + 1)
    held_out = [draw_example(rng, Names.of(Split.DEV)) for _ in range(600)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    warmup = min(200, args.num_steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (
            min(1.0, (s + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, s / args.num_steps))))
        ),
    )
    start, tokens = time.time(), 0
    losses: list[float] = []
    history: list[dict[str, Any]] = [{"vision_accuracy": vision}]
    for step, batch in enumerate(batches, 1):
        batches.lesson = lesson(step, args)
        loss = forward(model, batch)[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += int(batch["attention_mask"].sum())
        if step % args.log_every == 0 or step == args.num_steps:
            seconds = time.time() - start
            record: dict[str, Any] = {
                "step": step,
                "loss": round(sum(losses) / len(losses), 4),
                "seconds": round(seconds),
            }
            record["tokens_per_s"] = round(tokens / seconds)
            if step % (5 * args.log_every) == 0 or step == args.num_steps:
                record["exact"] = exact_match(model, batches, held_out)
                save(model, processor, args.output_dir, [*history, record])
            losses.clear()
            history.append(record)
            print(json.dumps(record), flush=True)
        if step == args.num_steps:
            break


def model_card(command: str, num_parameters: int, history: list[dict[str, Any]]) -> str:
    """What the model is, how it was made, and how good it is."""
    last = history[-1]
    exact = "\n".join(f"| {task} | {share:.3f} |" for task, share in last["exact"].items())
    return f"""---
license: apache-2.0
---
# Tiny LLaVA of the mini world

A `LlavaForConditionalGeneration` that reads, captions and answers in samrag's mini world, and does nothing else. It is
the quickstart's student M before tuning. It has seen no verdict: judging relevance, use and support is what the adapter
learns.

| | |
|---|---|
| made by | `{command}` |
| parameters | {num_parameters:,} |
| steps | {last["step"]:,} |
| final training loss | {last["loss"]} |
| vision accuracy, images held out | {history[0]["vision_accuracy"]} |

First the vision tower alone, on emblems with labels; then, with the tower frozen, projector and language model on
repeating words, comparing names, captioning, and answering from at most {MAX_PASSAGES} documents. Share of
examples with never-seen names whose whole greedy reply is right:

| task | exact |
|---|---:|
{exact}

Weights are float16. `pretraining.json` has the learning curve.
"""


def save(model: Any, processor: Any, folder: Path, history: list[dict[str, Any]]) -> None:
    """Save weights as float16: half the size, and far below what the pretraining noise leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(torch.float16) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    processor.save_pretrained(folder)
    (folder / "pretraining.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    num_parameters = sum(p.numel() for p in model.parameters())
    command = " ".join(["python", "scripts/build_tiny_llava.py", *sys.argv[1:]])
    (folder / "README.md").write_text(model_card(command, num_parameters, history), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Batches: padding, labels, and the order of rows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from samrag.errors import UserError
from samrag.training.collator import IGNORED, LengthGroupedBatches, SftCollator, by_length, read_picture
from samrag.vlm import ChatProcessor, Picture, join


class Chat:
    """Pads; its images are of one value each."""

    pad_token_id = 0

    def picture(self, path: Path) -> Picture:
        return Picture([], {"pixel_values": torch.full((1, 1, 2, 2), float(path.name))})

    def inputs(self, input_ids, attention_mask, pictures):
        return {"input_ids": input_ids, "attention_mask": attention_mask, **join(pictures)}


def test_labels_are_the_target_and_nothing_else():
    rows = [
        {"input_ids": [1, 5, 6, 7, 2], "label_start": 3, "images": []},
        {"input_ids": [1, 5, 2], "label_start": 1, "images": []},
    ]
    batch = SftCollator(Chat())(rows)
    assert batch["input_ids"].tolist() == [[1, 5, 6, 7, 2], [1, 5, 2, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, IGNORED, 7, 2], [IGNORED, 5, 2, IGNORED, IGNORED]]
    assert "pixel_values" not in batch


def test_a_pad_token_inside_a_row_is_not_masked():
    chat = Chat()
    chat.pad_token_id = 2
    batch = SftCollator(chat)([{"input_ids": [1, 2, 2], "label_start": 1, "images": []}])
    assert batch["labels"].tolist() == [[IGNORED, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("start", [0, 3])
def test_a_row_without_target_or_prompt_is_refused(start):
    with pytest.raises(AssertionError):
        SftCollator(Chat())([{"input_ids": [1, 2, 3], "label_start": start, "images": []}])


def test_images_stand_in_the_order_of_rows(tmp_path):
    for name in "12":
        (tmp_path / name).touch()
    rows = [
        {"input_ids": [1, 2], "label_start": 1, "images": [str(tmp_path / name) for name in names]}
        for names in ("2", "", "12")
    ]
    assert SftCollator(Chat())(rows)["pixel_values"][:, 0, 0, 0].tolist() == [2.0, 1.0, 2.0]


def test_missing_and_broken_images_are_named(tiny_llava, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    for name in ("absent.png", "broken.png"):
        with pytest.raises(UserError, match=name):
            read_picture(ChatProcessor.load(tiny_llava), tmp_path / name)


def test_every_row_comes_once_and_batches_have_similar_lengths():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 500, (1003,), generator=generator).tolist()
    order = list(LengthGroupedBatches(lengths, 8, seed=1))
    assert sorted(order) == list(range(1003))
    spans = [[lengths[i] for i in order[start : start + 8]] for start in range(0, 1003, 8)]
    padded = sum(len(span) * max(span) for span in spans)
    assert padded < 1.05 * sum(lengths)
    assert len(spans[-1]) == 3


def test_long_batches_do_not_come_first():
    lengths = list(range(800))
    order = list(LengthGroupedBatches(lengths, 8, seed=0))
    first, second = sum(order[:400]) / 400, sum(order[400:]) / 400
    assert abs(first - second) < 150


def test_the_order_depends_on_seed_and_epoch_alone():
    def orders(seed, epochs):
        sampler = LengthGroupedBatches(list(range(100)), 4, seed)
        found = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    assert orders(0, [0, 1, 2])[2] == orders(0, [2])[0]
    assert orders(0, [0])[0] != orders(0, [1])[0]
    assert orders(0, [0])[0] != orders(1, [0])[0]


def test_rows_with_and_without_image_share_no_full_batch():
    with_image = [i % 3 == 0 for i in range(200)]
    order = list(LengthGroupedBatches([1 + i % 40 for i in range(200)], 8, 0, with_image))
    assert sorted(order) == list(range(200))
    batches = [order[i : i + 8] for i in range(0, 200, 8)]
    mixed = [batch for batch in batches if len({with_image[row] for row in batch}) > 1]
    assert len(mixed) <= 2
    assert mixed == batches[len(batches) - len(mixed) :]


@pytest.mark.parametrize("max_tokens", [50, 800, 10**6])
def test_parts_keep_within_the_tokens_and_hold_every_row_once(max_tokens):
    rng = random.Random(0)
    rows = [{"input_ids": [i] * rng.randrange(10, 200)} for i in range(100)]
    parts = by_length(rows, max_tokens)
    assert sorted(row["input_ids"][0] for part in parts for row in part) == list(range(100))
    for part in parts:
        assert len(part) == 1 or len(part) * max(len(row["input_ids"]) for row in part) <= max_tokens
    padded_tokens = sum(len(part) * len(part[0]["input_ids"]) for part in parts)
    assert padded_tokens <= 100 * max(len(row["input_ids"]) for row in rows)
    assert (len(parts) == 1) is (max_tokens == 10**6)


def test_parts_have_the_labels_of_the_whole():
    rows = [{"input_ids": [1] * n, "label_start": n // 2, "images": []} for n in (9, 4, 7, 30)]
    parts, whole = SftCollator(Chat(), max_tokens=20)(rows), SftCollator(Chat())(rows)
    assert [len(part["input_ids"]) for part in parts["parts"]] == [1, 2, 1]
    assert (parts["labels"] != IGNORED).sum() == (whole["labels"] != IGNORED).sum()

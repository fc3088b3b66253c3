"""Batches: padding, labels, pixel cache, and the order of rows."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from samrag.errors import UserError
from samrag.training.collator import IGNORED, LengthGroupedBatches, PixelCache, SftCollator


@pytest.fixture
def image_processor():
    return CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "a.png"
    Image.effect_noise((20, 12), 90).convert("RGB").save(path)
    return str(path)


def test_labels_are_the_target_and_nothing_else():
    rows = [
        {"input_ids": [1, 5, 6, 7, 2], "label_start": 3, "images": []},
        {"input_ids": [1, 5, 2], "label_start": 1, "images": []},
    ]
    batch = SftCollator({}, pad_token_id=0)(rows)
    assert batch["input_ids"].tolist() == [[1, 5, 6, 7, 2], [1, 5, 2, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, IGNORED, 7, 2], [IGNORED, 5, 2, IGNORED, IGNORED]]
    assert "pixel_values" not in batch


def test_a_pad_token_inside_a_row_is_not_masked():
    batch = SftCollator({}, pad_token_id=2)([{"input_ids": [1, 2, 2], "label_start": 1, "images": []}])
    assert batch["labels"].tolist() == [[IGNORED, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("start", [0, 3])
def test_a_row_without_target_or_prompt_is_refused(start):
    with pytest.raises(AssertionError):
        SftCollator({}, pad_token_id=0)([{"input_ids": [1, 2, 3], "label_start": start, "images": []}])


def test_images_stand_in_the_order_of_rows():
    pixels = {name: torch.full((1, 2, 2), value) for name, value in (("a", 1.0), ("b", 2.0))}
    rows = [{"input_ids": [1, 2], "label_start": 1, "images": images} for images in (["b"], [], ["a", "b"])]
    assert SftCollator(pixels, 0)(rows)["pixel_values"][:, 0, 0, 0].tolist() == [2.0, 1.0, 2.0]


@pytest.mark.parametrize("max_bytes", [0, 1 << 20])
def test_cached_pixels_are_the_processors_own(image_processor, image, max_bytes):
    cache = PixelCache(image_processor, max_bytes)
    assert tuple(cache.add(image)) == (3, 8, 8)
    assert len(cache) == (1 if max_bytes else 0)
    wanted = image_processor(Image.open(image), return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(cache[image], wanted, atol=1e-5, rtol=0)


def test_a_kept_image_takes_one_byte_a_value(image_processor, image):
    cache = PixelCache(image_processor, 3 * 8 * 8)
    cache.add(image)
    assert len(cache) == 1


def test_a_processor_with_other_arithmetic_is_kept_as_float(image_processor, image):
    image_processor.do_normalize = False
    cache = PixelCache(image_processor, 1 << 20)
    cache.add(image)
    wanted = image_processor(Image.open(image), return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(cache[image], wanted)


def test_missing_and_broken_images_are_named(image_processor, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    for name in ("absent.png", "broken.png"):
        with pytest.raises(UserError, match=name):
            PixelCache(image_processor, 0).add(str(tmp_path / name))


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

"""CLIP vectors from a tiny model built here: batches change nothing, equal files are read once, bad ones are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from samrag.errors import UserError
from samrag.metrics.interleaved import Mode
from samrag.metrics.rag_igbench import Metric, Sample, score_samples
from samrag.retrieval.clip import ClipEncoder
from samrag.retrieval.embedder import Embedder
from samrag.schema import Language

COLOURS = ("red", "green", "blue")
TEXT_LENGTH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of random weights."""
    path = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", *COLOURS, "a", "square"])}
    config = CLIPConfig(
        text_config={
            **sizes,
            "vocab_size": len(vocabulary),
            "max_position_embeddings": TEXT_LENGTH,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    CLIPModel(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    size = {"height": 16, "width": 16}
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size).save_pretrained(path)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for colour in COLOURS:
        Image.new("RGB", (20, 20), colour).save(tmp_path / f"{colour}.png")
    shutil.copy(tmp_path / "red.png", tmp_path / "again.png")
    return tmp_path


def test_batches_and_repetitions_change_nothing_and_equal_files_are_encoded_once(folder: Path, pictures: Path) -> None:
    names = ["red.png", "again.png", "blue.png", "green.png", "red.png"]
    one, many = (ClipEncoder.load(folder, pictures, batch_size, "cpu") for batch_size in (1, 64))
    vectors = many.encode_images(names)
    assert vectors.shape == (5, 12)
    assert np.array_equal(vectors[0], vectors[1])
    assert len(many._by_content) == 3
    np.testing.assert_allclose(one.encode_images(names), vectors, atol=1e-5)
    np.testing.assert_allclose(many.encode_images(names[::-1]), vectors[::-1], atol=1e-6)
    texts = ["a red square", "blue", "", "a a a"]
    np.testing.assert_allclose(one.encode_texts(texts), many.encode_texts(texts), atol=1e-5)


def test_a_long_text_is_cut_to_what_the_model_takes(folder: Path, pictures: Path) -> None:
    encoder = ClipEncoder.load(folder, pictures, device="cpu")
    long, cut = encoder.encode_texts(["red " * 50, "red " * TEXT_LENGTH])
    np.testing.assert_allclose(long, cut, atol=1e-6)


def test_an_image_that_cannot_be_read_is_named(folder: Path, pictures: Path) -> None:
    (pictures / "broken.png").write_bytes(b"no image")
    encoder = ClipEncoder.load(folder, pictures, device="cpu")
    for name in ("none.png", "broken.png"):
        with pytest.raises(UserError, match=name):
            encoder.encode_images([name])
    with pytest.raises(UserError, match="leaves the data folder"):
        encoder.encode_images(["../x.png"])


def test_a_folder_without_a_model_is_refused(folder: Path, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        ClipEncoder.load(tmp_path / "none", pictures)
    with pytest.raises(UserError, match="batch_size is 0"):
        ClipEncoder.load(folder, pictures, batch_size=0)
    shutil.copytree(folder, tmp_path / "part")
    (tmp_path / "part" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="could not be loaded as a CLIP model"):
        ClipEncoder.load(tmp_path / "part", pictures)


def test_with_both_encoders_an_answer_has_all_scores(folder: Path, pictures: Path) -> None:
    gold = "A red square ![r](IMG#1) and then a blue one ![b](IMG#3)."
    samples = [
        Sample(str(i), output, gold, 3, Language.EN, candidates=tuple(f"{c}.png" for c in COLOURS))
        for i, output in enumerate([gold, "No picture.", "A red thing ![r](IMG#1), a green thing ![g](IMG#2)."])
    ]
    minilm, clip = Embedder.load("quickstart", device="cpu"), ClipEncoder.load(folder, pictures, device="cpu")
    perfect, bare, other = score_samples(samples, Mode.PAPER, minilm.encode_documents, clip)
    assert all(set(score.values) == set(Metric) for score in (perfect, bare, other))
    assert perfect.values[Metric.ALIGNMENT] == pytest.approx(1, abs=1e-5)
    assert bare.values[Metric.ALIGNMENT] == bare.values[Metric.CLIP] == 0
    assert other.values[Metric.MEAN] < perfect.values[Metric.MEAN]

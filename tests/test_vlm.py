"""Model families: the same chat code fits each; pictures are the processor's own; adapters lie where they should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from samrag.calls import Call, CallKind, Passage
from samrag.errors import UserError
from samrag.prompts import PromptStyle, render
from samrag.schema import ChatMessage
from samrag.training import student
from samrag.training.collator import IGNORED, SftCollator, padded
from samrag.training.sft_arguments import SftArguments
from samrag.vlm import ChatProcessor, family_of, join, load_processor
from tests import families

NAMES = list(families.FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: families.build(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("images")
    made = {}
    for name, size in (("wide", (90, 40)), ("tall", (30, 60)), ("small", (16, 16))):
        made[name] = folder / f"{name}.png"
        Image.effect_noise(size, 90).convert("RGB").save(made[name])
    return made


def load(folder: Path, **changes: object) -> tuple[object, ChatProcessor]:
    return student.load(SftArguments(str(folder), ["x"], **changes))  # type: ignore[arg-type]


def chats(images: dict[str, Path]) -> list[tuple[tuple[ChatMessage, ...], list[Path]]]:
    """Two prompts with an image and one without, each with a reply."""
    reply = ChatMessage("assistant", '{"Reasoning": "It is red.", "Response": "True"}')
    text = Call(CallKind.IS_REL_TEXT, "Is it red?", (Passage("Club", "It is red & <b>blue</b>."),))
    calls = [
        (Call(CallKind.IS_REL_IMAGE, "Is it red?", title=name, image=name), [path]) for name, path in images.items()
    ]
    return [((render(call, PromptStyle.STUDENT).message(), reply), paths) for call, paths in [*calls[:2], (text, [])]]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_the_processors_own_and_batches_run(name: str, folders: dict[str, Path], images: dict[str, Path]):
    model, chat = load(folders[name])
    rows = []
    for messages, paths in chats(images):
        pictures = [chat.picture(path) for path in paths]
        (prompt,) = chat.encode([chat.text(messages[:-1])], [[p.tokens for p in pictures]])
        assert prompt == chat.reference(messages[:-1], paths)
        (reply,) = chat.encode_replies([messages])
        assert reply[-1] == chat.stop_token_id
        assert chat.decode(reply) == messages[-1].content
        rows.append({"input_ids": prompt + reply, "label_start": len(prompt), "images": list(map(str, paths))})
    batch = SftCollator(chat)(rows)
    assert not (batch["labels"] == chat.image_token_id).any()
    together = model(**batch).loss * (batch["labels"] != IGNORED).sum()
    alone = [SftCollator(chat)([row]) for row in rows]
    apart = sum(model(**one).loss * (one["labels"] != IGNORED).sum() for one in alone)
    torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-3)  # padding and other rows' images change nothing


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_bytes", [0, 1 << 24])
def test_pictures_are_what_the_processor_makes(
    name: str, max_bytes: int, folders: dict[str, Path], images: dict[str, Path]
) -> None:
    processor = load_processor(folders[name])
    processor.chat_template = "x"
    chat = ChatProcessor(processor, max_bytes)
    for path in [*images.values(), *images.values()]:
        image = Image.open(path).convert("RGB")
        wanted = processor(text=[chat.image_token], images=[image], return_tensors="pt")
        made = chat.picture(path)
        for key, value in made.tensors.items():
            torch.testing.assert_close(value, wanted[key], atol=1e-5, rtol=0)
    assert bool(chat._kept) is bool(max_bytes)


@pytest.mark.parametrize("name", NAMES)
def test_the_adapter_lies_in_the_language_model_unless_asked_otherwise(name: str, folders: dict[str, Path]) -> None:
    from peft import get_peft_model

    for freeze in (True, False):
        arguments = SftArguments(
            str(folders[name]), ["x"], freeze_vision_tower=freeze, freeze_multi_modal_projector=freeze
        )
        model, _ = student.load(arguments)
        family = family_of(model.config)
        tuned = get_peft_model(model, student.lora_config(model, arguments))
        names = student.check_trainable(tuned, arguments)
        found = {part for part in ("language_model", "text_model") for n in names if part in n}
        assert found == {family.language_model}
        others = [n for n in names if family.language_model not in n]
        assert bool(others) is not freeze
        assert len(names) - len(others) == 2 * 7 * 2  # layers, projections, A and B


@pytest.mark.parametrize("name", NAMES)
def test_full_tuning_leaves_the_tower_alone(name: str, folders: dict[str, Path]) -> None:
    arguments = SftArguments(str(folders[name]), ["x"], tuning="full")
    model, _ = student.load(arguments)
    student.freeze(model, arguments)
    names = student.check_trainable(model, arguments)
    assert any("lm_head" in n or "embed_tokens" in n for n in names)


def test_an_unknown_family_is_refused() -> None:
    from transformers import LlamaConfig

    with pytest.raises(UserError, match=r"type 'llama' is not known; the types known are llava"):
        family_of(LlamaConfig())


def test_pictures_of_other_sizes_are_filled_up_with_zeros(folders: dict[str, Path], images: dict[str, Path]) -> None:
    _, chat = load(folders["llava_next"])
    pictures = [chat.picture(path) for path in images.values()]
    joined = join(pictures)["pixel_values"]
    assert len(joined) == len(pictures)
    for own, picture in zip(joined, pictures, strict=True):
        tiles = picture.tensors["pixel_values"][0]
        assert torch.equal(own[: len(tiles)], tiles)
        assert not own[len(tiles) :].any()


def test_kept_images_are_bounded(folders: dict[str, Path], images: dict[str, Path]) -> None:
    processor = load_processor(folders["llava_next"])
    processor.chat_template = "x"
    for keep_first in (True, False):
        chat = ChatProcessor(processor, 5 * 3 * 28 * 28 + 100, keep_first)  # one image of five tiles, a byte a value
        for path in images.values():
            chat.picture(path)
        assert [version[0] for version in chat._kept] == [list(images.values())[0 if keep_first else -1]]


@pytest.mark.parametrize("left", [True, False])
def test_rows_are_padded_on_one_side_and_masked(left: bool) -> None:
    ids, mask = padded([[1, 2, 3], [4]], 0, left)
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4] if left else [4, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1] if left else [1, 0, 0]]


def test_quantisation_without_a_gpu_is_refused(folders: dict[str, Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=r"needs a CUDA GPU and bitsandbytes"):
        load(folders["llava_next"], quantization="4bit")
